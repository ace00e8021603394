"""The section on settings: what each is worth, drawn and in words, and what cannot be told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import plotly.graph_objects as go

from reports import units
from reports.design import Quantity
from reports.document import memory_unit
from reports.effects import Basis, Change, Effect, Effects, effects_of
from reports.figures.figure import PageFigure
from reports.figures.style import LIMIT_COLOUR, MARKS, framed, whiskers
from storage.definition import StudySnapshot
from storage.records import Verdict

_ROW_PIXELS = 46
_SYMBOLS: dict[Basis, tuple[str, str]] = {
    "pairs": ("circle", "matched pairs"),
    "fit": ("diamond", "fitted model"),
    "pair": ("circle-open", "a single pair"),
}


@dataclass(frozen=True)
class EffectRow:
    """One change that is told, as text."""

    change: str
    speed: str
    memory: str
    basis: str
    unfit: str


@dataclass(frozen=True)
class UntoldRow:
    """One change that cannot be told."""

    change: str
    why: str
    would_tell: str


@dataclass(frozen=True)
class KnobSection:
    """What the page says of settings."""

    lead: str
    rows: tuple[EffectRow, ...]
    untold: tuple[UntoldRow, ...]
    figures: tuple[PageFigure, ...]


def knobs_of(snapshot: StudySnapshot) -> KnobSection | None:
    """Return the section of settings; None where fewer than two trials were measured."""
    known = effects_of(snapshot)
    if known is None:
        return None
    told = tuple(effect for effect in known.effects if effect.speed or effect.memory)
    unit = memory_unit(snapshot)
    return KnobSection(
        lead=_lead(known),
        rows=tuple(_row(effect, unit) for effect in told),
        untold=tuple(
            UntoldRow(effect.label, effect.untold, effect.would_tell)
            for effect in known.effects
            if effect.speed is None
        ),
        figures=_figures(told, unit),
    )


def _lead(known: Effects) -> str:
    told = sum(effect.speed is not None for effect in known.effects)
    out_of = f"{told} of {units.plural(len(known.effects), 'change')}"
    left_out = (
        f", less {units.plural(known.left_out, 'trial')} stopped before a speed had an interval"
        if known.left_out
        else ""
    )
    return (
        f"Of speed {out_of} can be told, from {units.plural(known.trials, 'trial')} on "
        f"{known.measured_on}{left_out}."
    )


def _row(effect: Effect, unit: units.MemoryUnit) -> EffectRow:
    return EffectRow(
        change=effect.label,
        speed=units.DASH if effect.speed is None else speed_words(effect.speed),
        memory=units.DASH if effect.memory is None else memory_words(effect.memory, unit),
        basis=_basis(effect),
        unfit=_unfit(effect),
    )


def speed_words(change: Change) -> str:
    """Return a change of speed: ``+60 % (+58 to +62 %)``, ``not told from 0 (-2 to +3 %)``."""
    known = change.estimate
    ends = f"{_percent(known.low)} to {_percent(known.high)} %"
    if known.low <= 1.0 <= known.high:
        return f"no difference told ({ends})"
    return f"{_percent(known.value)} % ({ends})"


def _percent(ratio: float) -> str:
    share = 100 * (ratio - 1)
    if share >= 1000:
        return "over +1,000"
    return f"{share:+.1f}" if abs(share) < 10 else f"{share:+.0f}"


def memory_words(change: Change, unit: units.MemoryUnit) -> str:
    """Return a change of memory: ``-4.66 GiB (-6.51 to -2.81)``; one pair's is exact."""
    known = change.estimate
    value = f"{known.value / unit.bytes:+.2f} {unit.name}"
    if change.basis == "pair":
        return "none" if abs(known.value) < unit.bytes / 1000 else value
    ends = f"{known.low / unit.bytes:+.2f} to {known.high / unit.bytes:+.2f}"
    if known.low <= 0 <= known.high:
        return f"no difference told ({ends} {unit.name})"
    return f"{value} ({ends})"


def _basis(effect: Effect) -> str:
    words = [
        f"{name}: {_told_by(change)}"
        + (f" ({change.pair})" if change.pair and change.pair != effect.label else "")
        for name, change in (("speed", effect.speed), ("memory", effect.memory))
        if change is not None
    ]
    bare = {word.split(": ", 1)[1] for word in words}
    return bare.pop() if len(words) == 2 and len(bare) == 1 else "; ".join(words)


def _told_by(change: Change) -> str:
    match change.basis:
        case "pairs":
            return f"{change.count} matched pairs"
        case "fit":
            return f"the fitted model, {change.count} trials"
        case "pair":
            return "one pair"


def _unfit(effect: Effect) -> str:
    parts = [
        f"{where} it in {units.plural(count, 'pair')}"
        for count, where in ((effect.unfit_after, "after"), (effect.unfit_before, "before"))
        if count
    ]
    return ", ".join(parts) or units.DASH


def _figures(told: Sequence[Effect], unit: units.MemoryUnit) -> tuple[PageFigure, ...]:
    """Return the figure of speed, and that of memory, each where anything is told of it.

    The table behind them is the section's own, which is always open.
    """
    shown: tuple[tuple[str, str, Quantity], ...] = (
        ("knobs-speed", "What each setting does to the speed", "speed"),
        ("knobs-memory", "What each setting does to peak memory", "memory"),
    )
    return tuple(
        PageFigure(id, title, _CAPTIONS[quantity], _drawing(effects, quantity, unit))
        for id, title, quantity in shown
        if (effects := [e for e in told if _of(e, quantity) is not None])
    )


_CAPTIONS: dict[Quantity, str] = {
    "speed": "Tokens/s after the change over tokens/s before it, all else being equal; whiskers "
    "are 95 % intervals. At the dashed line nothing changes.",
    "memory": "Peak allocated memory after the change less that before it; whiskers are 95 % "
    "intervals, and a single pair is exact, as peaks repeat to the byte.",
}


def _of(effect: Effect, quantity: Quantity) -> Change | None:
    return effect.speed if quantity == "speed" else effect.memory


def _drawing(effects: Sequence[Effect], quantity: Quantity, memory: units.MemoryUnit) -> go.Figure:
    figure = go.Figure()
    for basis, (symbol, name) in _SYMBOLS.items():
        chosen = [
            (place, effect, change)
            for place, effect in enumerate(effects)
            if (change := _of(effect, quantity)) is not None and change.basis == basis
        ]
        if chosen:
            colour = MARKS[Verdict.FITS].colour
            marker = {"symbol": symbol, "size": 10, "color": colour}
            figure.add_scatter(**_trace(chosen, quantity, memory), name=name, marker=marker)
    neutral = 1.0 if quantity == "speed" else 0.0
    figure.add_vline(x=neutral, line={"color": LIMIT_COLOUR, "width": 1, "dash": "dash"})
    figure.update_layout(
        **framed(110 + _ROW_PIXELS * len(effects)),
        showlegend=True,
        xaxis=_axis(effects, quantity, memory),
        yaxis={
            "tickmode": "array",
            "tickvals": list(range(len(effects))),
            "ticktext": [_in_two_lines(effect.label) for effect in effects],
            "range": [len(effects) - 0.5, -0.5],
            "zeroline": False,
            "fixedrange": True,
        },
    )
    return figure


def _trace(
    chosen: Sequence[tuple[int, Effect, Change]], quantity: Quantity, memory: units.MemoryUnit
) -> dict[str, Any]:
    """Return marks with their whiskers, at ratios or in the unit of memory."""
    unit = 1.0 if quantity == "speed" else memory.bytes
    known = [change.estimate for _, _, change in chosen]

    def words(change: Change) -> str:
        return speed_words(change) if quantity == "speed" else memory_words(change, memory)

    return {
        "mode": "markers",
        "x": [estimate.value / unit for estimate in known],
        "y": [place for place, _, _ in chosen],
        "error_x": whiskers(
            [one.value / unit for one in known],
            [(one.low / unit, one.high / unit) for one in known],
        ),
        "hovertext": [
            "<br>".join(map(escape, (effect.label, words(change), _told_by(change))))
            for _, effect, change in chosen
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _axis(
    effects: Sequence[Effect], quantity: Quantity, memory: units.MemoryUnit
) -> dict[str, Any]:
    """Return the axis of changes, of speed in logarithms: twice and half are as far from one."""
    if quantity == "memory":
        return {"title": {"text": f"change of peak memory ({memory.name})"}, "zeroline": False}
    values = [e.speed.estimate.value for e in effects if e.speed is not None]
    # Of an interval that says next to nothing the ends are cut off.
    reach = max(math.log10(1.5), *(1.6 * abs(math.log10(value)) for value in values))
    return {
        "title": {"text": "speed after / before"},
        "type": "log",
        "range": [-reach, reach],
        "tickvals": [0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 5, 10],
        "tickformat": "~g",
        "ticksuffix": "x",
        "zeroline": False,
    }


def _in_two_lines(label: str) -> str:
    before, arrow, after = label.partition(" → ")
    return f"{escape(before)}<br>→ {escape(after)}" if arrow else escape(label)
