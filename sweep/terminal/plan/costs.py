"""Owns how costs look: a bill item by item, offers side by side, and what may be said of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from reports import units
from search_spaces.prices import Offer
from sweep.predict.cost import Bill, BillItem, BreakEven, OfferComparison, Workload, is_surely_less
from sweep.terminal.plan.layout import empty_grid

ITEM_WORDS = {
    "training": "training",
    "boot": "container boot",
    "download": "model download",
    "queue": "queueing",
    "preemptions": "spot preemptions",
    "rounding": "rounding up to the billing unit",
    "minimum": "minimum charge",
}


def usd_range(bill: Bill) -> str:
    """Return what a bill may come to inside the uncertainty of its step: ``$0.60 to $1.50``."""
    return " to ".join(units.usd(end.usd) for end in bill.extremes)


def short_usd_range(bill: Bill) -> str:
    """Return the same for a cell: ``$0.60–1.50``."""
    low, high = bill.extremes
    return units.usd_interval((low.usd, high.usd))


def bill_lines(bill: Bill) -> Iterator[str]:
    """Yield a bill item by item."""
    yield f"{bill.offer.label}, item by item:"
    for item in bill.items:
        if item.seconds > 0:
            yield f"  {_item(item)}"
    if bill.usd_per_epoch is not None:
        size = bill.workload.dataset_samples
        yield f"an epoch of {size:,} samples: {units.usd(bill.usd_per_epoch)}"


def source_words(offer: Offer) -> str:
    """Return where a price was read, and when."""
    return f"{offer.provider}, read on {offer.date}, {offer.source}"


def work_words(work: Workload) -> str:
    """Return an amount of work: ``1,000 steps (8,000 samples, 4.1 M tokens)``."""
    return (
        f"{units.plural(work.steps, 'step')} ({units.plural(work.samples, 'sample')}, "
        f"{work.tokens / 1e6:,.1f} M tokens)"
    )


def _item(item: BillItem) -> str:
    return f"{ITEM_WORDS[item.name]:<32}{units.duration(item.seconds):>14}  {units.usd(item.usd)}"


def offers_view(bills: Sequence[Bill]) -> RenderableType:
    """Return offers in a table, in their order."""
    numbers: tuple[str, ...] = ("per hour", "in all", "1 M tokens", "1,000 steps", "hours")
    if all(bill.workload.steps == 1000 for bill in bills):
        numbers = tuple(name for name in numbers if name != "1,000 steps")
    rows = empty_grid("offer", *numbers, "mostly", right=numbers)
    for bill in bills:
        told = {
            "per hour": units.usd(bill.cards * bill.offer.usd_per_hour),
            "in all": units.usd(bill.usd),
            "1 M tokens": units.usd(bill.usd_per_million_tokens),
            "1,000 steps": units.usd(bill.usd_per_1000_steps),
            "hours": f"{bill.wall_hours:.2f}",
        }
        mostly = f"{ITEM_WORDS[bill.dominant.name]} {units.percent(bill.dominant.usd / bill.usd)}"
        rows.add_row(bill.offer.label, *(told[name] for name in numbers), mostly)
    return rows


def comparison_lines(comparison: OfferComparison) -> Iterator[str]:
    """Yield where the cheapest offer changes, as far as the speeds are known well enough."""
    for point in comparison.break_evens:
        yield _break_even(point)
    cheapest, *others = comparison.bills
    if comparison.break_evens or not others:
        return
    if all(is_surely_less(cheapest, other) for other in others):
        yield f"no break-even: {cheapest.offer.label} is the cheapest for any amount of work"
    else:
        yield (
            "no break-even is claimed: inside the uncertainty of the speeds it is open which of "
            "them is the cheapest"
        )


def _break_even(point: BreakEven) -> str:
    steps = "" if point.steps is None else f" ({units.plural(round(point.steps), 'step')})"
    low, high = (f"{round(end):,}" for end in point.samples_range)
    between = "" if low == high else f", between {low} and {high} for all that is known"
    return (
        f"break-even at {round(point.samples):,} samples{steps}{between}: "
        f"{point.cheaper_below.label} is cheaper below, {point.cheaper_above.label} above"
    )
