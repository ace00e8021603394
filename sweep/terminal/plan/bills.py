"""Owns how bills read: the offers of a card, one bill item by item, several cards side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from reports import units
from sweep.predict.cost import Bill, BillItem, BreakEven, Comparison
from sweep.terminal.console import table

ITEM_WORDS = {
    "training": "training",
    "boot": "container boot",
    "download": "model download",
    "queue": "queueing",
    "preemptions": "spot preemptions",
    "rounding": "rounding up to the billing unit",
    "minimum": "minimum charge",
}
_HEADER = ("offer", "per hour", "1,000 steps", "1 M tokens", "sample", "in all", "hours", "mostly")


def usd(amount: float) -> str:
    """Return dollars: ``$1.10``, and with three digits where they are few: ``$0.000114``."""
    if amount >= 1 or amount <= 0:
        return f"${amount:,.2f}"
    return f"${amount:.{2 - math.floor(math.log10(amount))}f}"


def bill_lines(bills: Sequence[Bill]) -> Iterator[str]:
    """Yield the offers of one card, the cheapest first and item by item."""
    yield from _offers(bills).split("\n")
    cheapest = bills[0]
    yield f"{cheapest.offer.label}, item by item:"
    for item in cheapest.items:
        if item.seconds > 0:
            yield f"  {_item(item)}"
    if cheapest.usd_per_epoch is not None:
        size = cheapest.workload.dataset_samples
        yield f"an epoch of {size:,} samples: {usd(cheapest.usd_per_epoch)}"


def work_words(bill: Bill) -> str:
    """Return an amount of work: ``1,000 steps (8,000 samples, 4.1 M tokens)``."""
    work = bill.workload
    return (
        f"{units.plural(work.steps, 'step')} ({units.plural(work.samples, 'sample')}, "
        f"{work.tokens / 1e6:,.1f} M tokens)"
    )


def _item(item: BillItem) -> str:
    return f"{ITEM_WORDS[item.name]:<32}{units.duration(item.seconds):>14}  {usd(item.usd)}"


def _offers(bills: Sequence[Bill]) -> str:
    rows = [
        (
            bill.offer.label,
            usd(bill.offer.usd_per_hour),
            usd(bill.usd_per_1000_steps),
            usd(bill.usd_per_million_tokens),
            usd(bill.usd_per_sample),
            usd(bill.usd),
            f"{bill.wall_hours:.2f}",
            f"{ITEM_WORDS[bill.dominant.name]} {units.percent(bill.dominant.usd / bill.usd)}",
        )
        for bill in bills
    ]
    return table(_HEADER, rows)


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield one training on several cards: every offer, the cheapest, the soonest, break-evens."""
    yield from _offers(comparison.bills).split("\n")
    cheapest, soonest = comparison.cheapest, comparison.soonest
    yield f"cheapest: {cheapest.offer.label}, {usd(cheapest.usd)}"
    yield f"soonest: {soonest.offer.label}, {soonest.wall_hours:.2f} h, {usd(soonest.usd)}"
    for point in comparison.break_evens:
        yield _break_even(point)
    if not comparison.break_evens:
        yield "no break-even: the cheapest is that for any amount of work"


def _break_even(point: BreakEven) -> str:
    steps = "" if point.steps is None else f" ({units.plural(round(point.steps), 'step')})"
    return (
        f"break-even at {round(point.samples):,} samples{steps}: {point.cheaper_below.label} is "
        f"cheaper below, {point.cheaper_above.label} above"
    )
