"""Owns the figure of settings: the speed of what fitted, by the value of each dimension.

Pure: a study's snapshot in, a plotly figure out. It shows what was seen, not causes: the values of
one dimension were tried in the company of different values of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

import plotly.graph_objects as go

from reports import units
from reports.figures.style import HOVER_TEMPLATE, MARKS, OUTLINE, WINNER_COLOUR, measured_trials
from search_spaces.knobs import KNOBS
from storage.definition import StudySnapshot
from storage.ranking import rank_study
from storage.records import OUT_OF_MEMORY, TrialRecord, Verdict

VALUES_SHOWN = 10
"""A numeric dimension with more values than this is shown in at most as many ranges."""
_ROW_PIXELS = 24


@dataclass(frozen=True)
class Effect:
    """What the trials with one value, or range of values, of one dimension came to."""

    key: str
    label: str
    speeds: tuple[float, ...]
    """Tokens/s of each trial that fitted, also of those stopped as too slow."""
    out_of_memory: int


def effects_of(snapshot: StudySnapshot) -> tuple[Effect, ...]:
    """Return the effects of every dimension that was tried at more than one value.

    A baseline that the space does not hold is left out: it differs in more than the dimension.
    """
    records = rank_study(snapshot).of_space
    fitting = [record for record, _ in measured_trials(records)]
    return tuple(
        effect
        for key in snapshot.definition.space.dimensions
        for effect in _of_dimension(key, records, fitting=fitting)
    )


def _of_dimension(
    key: str, records: Sequence[TrialRecord], *, fitting: Sequence[TrialRecord]
) -> list[Effect]:
    values = {getattr(record.config, key) for record in records}
    if len(values) < 2:
        return []
    return [
        Effect(
            key,
            _label(key, group),
            tuple(
                r.measurement.tokens_per_second
                for r in fitting
                if r.measurement is not None and getattr(r.config, key) in group
            ),
            sum(r.verdict in OUT_OF_MEMORY and getattr(r.config, key) in group for r in records),
        )
        for group in _groups(values)
    ]


def _groups(values: set[Any]) -> list[tuple[Any, ...]]:
    """Return the values in order, each alone; numbers in ranges where there are too many."""
    if not all(isinstance(value, int | float) for value in values):
        return [(value,) for value in sorted(values, key=str)]
    ordered = sorted(values)
    size = -(-len(ordered) // VALUES_SHOWN)
    return [tuple(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def _label(key: str, group: tuple[Any, ...]) -> str:
    if len(group) == 1:
        return units.short(units.phrase(key, group[0]))
    return f"{KNOBS[key].label} {units.short(group[0])}–{units.short(group[-1])}"


def settings_figure(snapshot: StudySnapshot) -> go.Figure:
    """Draw one row per value of each dimension: the median and the best tokens/s of what fitted."""
    effects = effects_of(snapshot)
    figure = go.Figure()
    rows = [(row, effect) for row, effect in enumerate(effects) if effect.speeds]
    if rows:
        _add_ranges(figure, rows)
        _add_points(figure, rows, name="median of what fitted", best=False)
        _add_points(figure, rows, name="fastest", best=True)
        _add_empty(figure, [row for row, effect in enumerate(effects) if not effect.speeds])
    figure.update_layout(
        height=max(220, 120 + _ROW_PIXELS * len(effects)),
        margin={"l": 8, "r": 12, "t": 40, "b": 52},
        hovermode="closest",
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        xaxis={"title": {"text": "tokens/s"}, "rangemode": "tozero", "tickformat": ",~r"},
        yaxis={
            "tickmode": "array",
            "tickvals": list(range(len(effects))),
            "ticktext": [escape(effect.label) for effect in effects],
            "range": [len(effects) - 0.5, -0.5],
            "zeroline": False,
            "fixedrange": True,
        },
    )
    return figure


def _add_ranges(figure: go.Figure, rows: Sequence[tuple[int, Effect]]) -> None:
    """Join each row's median to its best."""
    figure.add_scatter(
        mode="lines",
        x=[x for _, e in rows for x in (median(e.speeds), max(e.speeds), None)],
        y=[y for row, _ in rows for y in (row, row, None)],
        line={"color": MARKS[Verdict.PRUNED_SLOW].colour, "width": 3},
        hoverinfo="skip",
        showlegend=False,
    )


def _add_points(
    figure: go.Figure, rows: Sequence[tuple[int, Effect]], *, name: str, best: bool
) -> None:
    figure.add_scatter(
        name=name,
        mode="markers",
        x=[max(e.speeds) if best else median(e.speeds) for _, e in rows],
        y=[row for row, _ in rows],
        marker={
            "size": 11 if best else 9,
            "symbol": "star" if best else "circle",
            "color": WINNER_COLOUR if best else MARKS[Verdict.FITS].colour,
            "line": OUTLINE if best else {"width": 0},
        },
        hovertext=[_hover(effect) for _, effect in rows],
        hovertemplate=HOVER_TEMPLATE,
    )


def _add_empty(figure: go.Figure, rows: Sequence[int]) -> None:
    figure.add_scatter(
        mode="text",
        x=[0] * len(rows),
        y=rows,
        text=["\u2003nothing fitted"] * len(rows),
        textposition="middle right",
        hoverinfo="skip",
        showlegend=False,
    )


def _hover(effect: Effect) -> str:
    return (
        f"<b>{escape(effect.label)}</b><br>median {units.rate(median(effect.speeds))} tokens/s<br>"
        f"fastest {units.rate(max(effect.speeds))} tokens/s<br>"
        f"{len(effect.speeds)} fitted, {effect.out_of_memory} did not"
    )
