"""Owns how configurations look: speed, memory as a bar, what each is bound by, what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports import units
from search_spaces.config import TrialConfig
from search_spaces.knobs import CAPACITY_KEYS, SIZE_KEYS
from sweep.planning.forecast import Forecast
from sweep.predict.cost import Bill, BillItem, BreakEven, OfferComparison
from sweep.predict.memory.peaks import PARTS
from sweep.predict.memory.predictor import Fit, MemoryPrediction
from sweep.predict.speed.predictor import SpeedPrediction
from sweep.terminal.console import table

BAR_WIDTH = 60
FORBIDDEN = "invalid"
"""What a rule forbids is not a question of memory, and no table may call it too large."""
_SHORT_WORDS = {Fit.YES: "yes", Fit.NO: "no", Fit.UNCERTAIN: "?"}
FIT_STYLES = {Fit.YES: "green", Fit.UNCERTAIN: "yellow", Fit.NO: "dim"}
PART_MARKS = {
    "weights": ("█", "blue"),
    "adapters": ("◆", "magenta"),
    "gradients": ("▲", "cyan"),
    "optimizer": ("●", "yellow"),
    "activations": ("▓", "green"),
    "loss": ("▒", "red"),
}
"""A glyph and a colour for each part of a peak, so that either alone tells them apart."""
FREE_MARK = "·"
TERM_WORDS = {
    "matmul": "matrix products",
    "lora": "adapters",
    "attention": "attention",
    "dequant": "dequantization",
    "elementwise": "norms, casts and activations",
    "loss": "the loss",
    "optimizer": "the optimizer",
    "launch": "waiting for launches",
    "overhead": "fixed work of the host",
}
TERMS_SHOWN = 3
ITEM_WORDS = {
    "training": "training",
    "boot": "container boot",
    "download": "model download",
    "queue": "queueing",
    "preemptions": "spot preemptions",
    "rounding": "rounding up to the billing unit",
    "minimum": "minimum charge",
}
_OFFER_HEADER = (
    "offer",
    "per hour",
    "1,000 steps",
    "1 M tokens",
    "sample",
    "in all",
    "hours",
    "mostly",
)


def describe(config: TrialConfig) -> str:
    """Return a configuration in words: ``8 x 512, rank 16, adapters on q,k,v,o, ...``."""
    return f"{units.size(config)}, {structure(config)}"


def structure(config: TrialConfig) -> str:
    """Return all but micro-batch and length, as far as it is not the standard recipe's."""
    capacity = [units.phrase(key, getattr(config, key)) for key in CAPACITY_KEYS]
    return ", ".join([*capacity, *_changed(config)])


def knobs(config: TrialConfig) -> str:
    """Return all but the capacity class, as far as it is not the standard recipe's."""
    return ", ".join([units.size(config), *_changed(config)])


def _changed(config: TrialConfig) -> Iterator[str]:
    for key, value in units.differing(config, TrialConfig()).items():
        if key not in (*SIZE_KEYS, *CAPACITY_KEYS):
            yield units.phrase(key, value)


def answer_view(forecast: Forecast, *, budget_bytes: int, gpu: str) -> RenderableType:
    """Return what is expected of a configuration.

    Args:
        forecast: the expectation.
        budget_bytes: what a training may take of the card.
        gpu: the card's name.
    """
    parts: list[RenderableType] = [Text(describe(forecast.config))]
    if forecast.broken is not None:
        parts.append(Text(f"{forecast.broken.rule}: {forecast.broken.reason}", style="red"))
    if forecast.step_seconds is not None:
        parts.append(Text(_speed_line(forecast), style="bold"))
    if forecast.memory is not None:
        parts += _memory(forecast.memory, budget_bytes)
    if forecast.speed is not None:
        parts += map(Text, _bottleneck_lines(forecast.speed, forecast.config, gpu))
    return Group(*parts)


def _speed_line(forecast: Forecast) -> str:
    ends = forecast.tokens_per_second_range
    between = "" if ends is None else f" ({units.rate(ends[0])} to {units.rate(ends[1])})"
    return (
        f"{units.rate(forecast.tokens_per_second)} tokens/s{between}, "
        f"{units.step_time(forecast.step_seconds)} per step ({forecast.speed_basis})"
    )


def _memory(memory: MemoryPrediction, budget_bytes: int) -> Iterator[RenderableType]:
    share = memory.peak_allocated_bytes / budget_bytes
    yield Text(
        f"peak {units.gib(memory.peak_allocated_bytes)} allocated, {units.percent(share)} of the "
        f"budget, reached in {memory.moment}; {units.gib(memory.peak_reserved_bytes)} reserved"
    )
    yield memory_bar(memory, budget_bytes)
    yield _legend(memory)


def memory_bar(memory: MemoryPrediction, budget_bytes: int) -> Text:
    """Return the peak's parts along the budget; where they exceed it, along themselves."""
    whole = max(budget_bytes, memory.peak_allocated_bytes)
    bar, done, drawn = Text(), 0, 0
    for part in PARTS:
        done += memory.breakdown[part]
        # Ends are rounded, not widths, so that the bar is as long as the sum.
        end = round(BAR_WIDTH * done / whole)
        mark, style = PART_MARKS[part]
        bar.append(mark * (end - drawn), style=style)
        drawn = end
    bar.append(FREE_MARK * (BAR_WIDTH - drawn), style="dim")
    return bar


def _legend(memory: MemoryPrediction) -> RenderableType:
    cells = []
    for part in PARTS:
        mark, style = PART_MARKS[part]
        words = f" {part} {units.gib(memory.breakdown[part])}"
        cells.append(Text.assemble((mark, style), words))
    grid = Table.grid(padding=(0, 3, 0, 0))
    half = len(cells) // 2
    grid.add_row(*cells[:half])
    grid.add_row(*cells[half:])
    return grid


def _bottleneck_lines(speed: SpeedPrediction, config: TrialConfig, gpu: str) -> Iterator[str]:
    ranked = sorted(speed.terms.items(), key=lambda term: -term[1])[:TERMS_SHOWN]
    shares = ", ".join(
        f"{TERM_WORDS[term]} {units.percent(seconds / speed.step_seconds)}"
        for term, seconds in ranked
    )
    yield f"bound by {speed.bottleneck}; of a step: {shares}"
    used = units.percent(speed.flops_utilization)
    yield f"{used} of the {gpu}'s {config.compute_dtype} peak is put to use"
    yield f"to go faster: {_advice(speed, config)}"


def _advice(speed: SpeedPrediction, config: TrialConfig) -> str:
    match speed.bottleneck:
        case "launch":
            return "a larger micro-batch or compiled layers, as the card waits for the host"
        case "bandwidth":
            return "fused kernels, compiled layers or no fp32 upcast, which move fewer bytes"
        case "compute" if config.checkpoint_fraction > 0:
            return "recompute fewer layers, as far as the memory allows"
        case _:
            return "a card with more FLOP/s; what is not matrix products is little"


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
    return table(_OFFER_HEADER, rows)


def comparison_lines(comparison: OfferComparison) -> Iterator[str]:
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


def configurations_view(
    forecasts: Sequence[Forecast], cheapest: Sequence[Bill | None]
) -> RenderableType:
    """Return a table of many configurations in their order, each with its cheapest bill."""
    numbers = ("peak", "tokens/s", "1,000 steps")
    rows = empty_grid("", "fits", *numbers, "bound by", "configuration", right=numbers)
    for number, (forecast, bill) in enumerate(zip(forecasts, cheapest, strict=True), start=1):
        memory, speed = forecast.memory, forecast.speed
        rows.add_row(
            f"{number:,}",
            Text(_short_word(forecast), FIT_STYLES[forecast.fit]),
            units.gib(memory.peak_allocated_bytes if memory else None),
            units.rate(forecast.tokens_per_second),
            usd(bill.usd_per_1000_steps) if bill else units.DASH,
            speed.bottleneck if speed else units.DASH,
            ": ".join([describe(forecast.config), *_why_not(forecast)]),
        )
    return Group(rows, Text("'?' is too close to the budget to be sure", style="dim"))


def _short_word(forecast: Forecast) -> str:
    if forecast.broken is not None:
        return FORBIDDEN
    return units.DASH if forecast.fits is None else _SHORT_WORDS[forecast.fit]


def _why_not(forecast: Forecast) -> Iterator[str]:
    """Yield why there is no answer for a configuration, if there is none."""
    if forecast.broken is not None:
        yield forecast.broken.reason
    elif forecast.memory is None:
        yield forecast.notes[0]


def empty_grid(*headers: str, right: Sequence[str] = ()) -> Table:
    """Return a borderless table without rows, some of its columns to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left")
    return table
