"""Owns how configurations look: their words, memory as a bar, what each is bound by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports import units
from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec
from search_spaces.knobs import CAPACITY_KEYS, SIZE_KEYS
from sweep.predict.cost import Bill
from sweep.predict.forecast import Forecast
from sweep.predict.memory.peaks import PARTS
from sweep.predict.memory.predictor import Fit, MemoryPrediction
from sweep.predict.speed.predictor import SpeedPrediction
from sweep.terminal.plan.layout import empty_grid

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
    "eight_bit": "8-bit matrix products",
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
ADVICE = {
    "launch": "a larger micro-batch or compiled layers, as the GPU waits for the host",
    "bandwidth": "fused kernels, compiled layers or no fp32 upcast, which move fewer bytes",
    "compute": "a GPU with more FLOP/s; what is not matrix products is little",
}


def structure(config: TrialConfig) -> str:
    """Return all but micro-batch and length, as far as it is not the standard recipe's."""
    return ", ".join(_structure(config))


def _structure(config: TrialConfig) -> list[str]:
    return [*(units.phrase(key, getattr(config, key)) for key in CAPACITY_KEYS), *knobs(config)]


def knobs(config: TrialConfig) -> list[str]:
    """Return all but size and capacity class, as far as it is not the standard recipe's."""
    return list(_changed(config))


def shared_words(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the words that several rows have in common, to be said once."""
    if len(rows) < 2:
        return []
    first, *others = rows
    return [word for word in first if all(word in other for other in others)]


def shared_line(words: Sequence[str]) -> Iterator[RenderableType]:
    """Yield the line that says them, where there is anything to say."""
    if words:
        yield Text(f"all of them: {', '.join(words)}", style="dim")


def _changed(config: TrialConfig) -> Iterator[str]:
    for key, value in units.differing(config, TrialConfig()).items():
        if key not in (*SIZE_KEYS, *CAPACITY_KEYS):
            yield units.phrase(key, value)


def answer_view(forecast: Forecast, *, gpu: GpuSpec, budget_bytes: int) -> RenderableType:
    """Return where a configuration's memory and time go.

    Args:
        forecast: the expectation.
        gpu: the GPU.
        budget_bytes: what a training may take of it.
    """
    parts: list[RenderableType] = []
    if forecast.memory is not None:
        parts += _memory(forecast.memory, budget_bytes)
    if forecast.step_seconds is not None:
        seconds = units.step_time(forecast.step_seconds)
        parts.append(Text(f"{seconds} per step ({forecast.speed_basis})"))
    if forecast.speed is not None:
        parts += map(Text, _bottleneck_lines(forecast.speed, forecast.config, gpu.name))
    return Group(*parts)


def _memory(memory: MemoryPrediction, budget_bytes: int) -> Iterator[RenderableType]:
    yield Text(
        f"peak {units.gib(memory.peak_allocated_bytes)} allocated, reached in {memory.moment}; "
        f"{units.gib(memory.peak_reserved_bytes)} reserved"
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
    advice = ADVICE[speed.bottleneck]
    if speed.bottleneck == "compute" and config.checkpoint_fraction > 0:
        advice = "less gradient checkpointing, as far as the memory allows"
    yield f"to go faster: {advice}"


def configurations_view(
    forecasts: Sequence[Forecast], cheapest: Sequence[Bill | None]
) -> RenderableType:
    """Return a table of many configurations in their order, each with its cheapest bill."""
    numbers = ("peak", "tokens/s", "1,000 steps")
    words = [_structure(forecast.config) for forecast in forecasts]
    shared = shared_words(words)
    rows = empty_grid("", "fits", *numbers, "bound by", "configuration", right=numbers)
    for number, (forecast, bill) in enumerate(zip(forecasts, cheapest, strict=True), start=1):
        own = [word for word in words[number - 1] if word not in shared]
        memory, speed = forecast.memory, forecast.speed
        rows.add_row(
            f"{number:,}",
            Text(_short_word(forecast), FIT_STYLES[forecast.fit]),
            units.gib(memory.peak_allocated_bytes if memory else None),
            units.rate(forecast.tokens_per_second),
            units.usd(bill.usd_per_1000_steps) if bill else units.DASH,
            speed.bottleneck if speed else units.DASH,
            ": ".join([", ".join([units.size(forecast.config), *own]), *_why_not(forecast)]),
        )
    return Group(
        rows, *shared_line(shared), Text("'?' is too close to the budget to be sure", style="dim")
    )


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
