"""Owns the figure of throughput against peak memory.

Pure: a study's snapshot in, a plotly figure out. What has no speed is never drawn as if it had one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from reports import units
from reports.figures.style import (
    FRONT_COLOUR,
    HOVER_TEMPLATE,
    LIMIT_COLOUR,
    MARKS,
    OUTLINE,
    WINNER_COLOUR,
    frame,
    hover,
    lanes_of,
    measured_trials,
)
from reports.outcomes import VERDICT_LABELS
from search_spaces.gpus import GIB
from search_spaces.space import Objective
from storage.definition import StudySnapshot
from storage.ranking import pareto_front, rank_study
from storage.records import Measurement, TrialRecord, Verdict, need_of

MEASURED = (Verdict.FITS, Verdict.PRUNED_SLOW)
AXES: tuple[Objective, ...] = ("tokens_per_second", "peak_memory")
"""What the line of the front trades where a study has one objective: the figure's two axes."""
FAR_BEYOND_BUDGET = 1.3
"""Needs above this many budgets are drawn at it, so that one absurd candidate squeezes nothing."""


def pareto_figure(snapshot: StudySnapshot) -> go.Figure:
    """Draw tokens/s against peak allocated GiB; every trial without a speed sits in a lane below.

    A trial that did not fit is placed at what it needs at least or is predicted to need, never
    below the budget if it ran out, and one without any memory figure at the left edge with a
    question mark.
    """
    figure = go.Figure()
    measured = measured_trials(snapshot.records)
    for verdict in MEASURED:
        here = [pair for pair in measured if pair[0].verdict is verdict]
        _add_measured(figure, snapshot, here, verdict)
    _add_front(figure, snapshot)
    _add_named(figure, snapshot)
    lanes = lanes_of(snapshot.records, without=MEASURED)
    left, right = _memory_range(snapshot)
    for lane, verdict in enumerate(lanes):
        _add_lane(figure, snapshot, verdict, lane=lane, unknown=left + 0.02 * (right - left))
    axis = {"range": [left, right], **_memory_ticks(left, right)}
    frame(figure, lanes=lanes, x_axis=axis)
    _add_budget_line(figure, snapshot)
    return figure


def memory_position_gib(record: TrialRecord, *, budget_bytes: int) -> float | None:
    """Return where on the memory axis a trial without a speed belongs; None where nothing says.

    What did not fit is placed at its need, though not beyond `FAR_BEYOND_BUDGET`.
    """
    need = need_of(record, budget_bytes=budget_bytes)
    if need is not None:
        return min(need.allocated_bytes, FAR_BEYOND_BUDGET * budget_bytes) / GIB
    if record.prediction is not None:
        return min(record.prediction.peak_allocated_bytes, FAR_BEYOND_BUDGET * budget_bytes) / GIB
    return None


def _add_measured(
    figure: go.Figure,
    snapshot: StudySnapshot,
    pairs: Sequence[tuple[TrialRecord, Measurement]],
    verdict: Verdict,
) -> None:
    if not pairs:
        return
    budget_bytes = snapshot.definition.target.budget_bytes
    # A speed without an interval has no whiskers: its own value at both ends.
    intervals = [m.speed_interval or (m.tokens_per_second, m.tokens_per_second) for _, m in pairs]
    mark = MARKS[verdict]
    figure.add_scatter(
        name=VERDICT_LABELS[verdict],
        mode="markers",
        x=[m.peak_allocated_bytes / GIB for _, m in pairs],
        y=[m.tokens_per_second for _, m in pairs],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [
                high - m.tokens_per_second
                for (_, m), (_, high) in zip(pairs, intervals, strict=True)
            ],
            "arrayminus": [
                m.tokens_per_second - low for (_, m), (low, _) in zip(pairs, intervals, strict=True)
            ],
            "thickness": 1,
            "width": 2,
        },
        marker={"color": mark.colour, "symbol": mark.symbol, "size": 9},
        hovertext=[hover(record, budget_bytes=budget_bytes) for record, _ in pairs],
        hovertemplate=HOVER_TEMPLATE,
    )


def _add_front(figure: go.Figure, snapshot: StudySnapshot) -> None:
    """Draw the front of the figure's axes as a line, and a front of other objectives as rings.

    The line is for a study of one objective too, as what more memory would buy; it leaves out what
    the space does not hold, as the ranking does.
    """
    ranking = rank_study(snapshot)
    on_axes = pareto_front(ranking.ranked, AXES)
    if len(ranking.objectives) == 1 or set(ranking.objectives) == set(AXES):
        _add_line(figure, [r.measurement for r in on_axes if r.measurement is not None])
    else:
        _add_rings(figure, [r.measurement for r in ranking.front if r.measurement is not None])


def _add_line(figure: go.Figure, measured: Sequence[Measurement]) -> None:
    points = sorted((m.peak_allocated_bytes / GIB, m.tokens_per_second) for m in measured)
    if points:
        figure.add_scatter(
            name="best for its memory (Pareto front)",
            mode="lines",
            x=[x for x, _ in points],
            y=[y for _, y in points],
            line={"color": FRONT_COLOUR, "width": 2, "shape": "hv"},
            hoverinfo="skip",
        )


def _add_rings(figure: go.Figure, measured: Sequence[Measurement]) -> None:
    if measured:
        figure.add_scatter(
            name="on the front of the objectives",
            mode="markers",
            x=[m.peak_allocated_bytes / GIB for m in measured],
            y=[m.tokens_per_second for m in measured],
            marker={
                "symbol": "circle-open",
                "size": 15,
                "color": FRONT_COLOUR,
                "line": {"width": 2},
            },
            hoverinfo="skip",
        )


def _add_named(figure: go.Figure, snapshot: StudySnapshot) -> None:
    """Mark the winner and the baseline over the rest."""
    ranking = rank_study(snapshot)
    budget_bytes = snapshot.definition.target.budget_bytes
    best = "knee of the front" if ranking.front else "winner"
    named = (("baseline", "diamond", 13), (best, "star", 18))
    for (name, symbol, size), record in zip(named, (ranking.baseline, ranking.winner), strict=True):
        if record is None or record.measurement is None:
            continue
        figure.add_scatter(
            name=name,
            mode="markers",
            x=[record.measurement.peak_allocated_bytes / GIB],
            y=[record.measurement.tokens_per_second],
            marker={"symbol": symbol, "size": size, "color": WINNER_COLOUR, "line": OUTLINE},
            hovertext=[hover(record, budget_bytes=budget_bytes)],
            hovertemplate=HOVER_TEMPLATE,
        )


def _add_lane(
    figure: go.Figure, snapshot: StudySnapshot, verdict: Verdict, *, lane: int, unknown: float
) -> None:
    records = [record for record in snapshot.records if record.verdict is verdict]
    budget_bytes = snapshot.definition.target.budget_bytes
    positions = [memory_position_gib(record, budget_bytes=budget_bytes) for record in records]
    figure.add_scatter(
        name=VERDICT_LABELS[verdict],
        yaxis="y2",
        mode="markers+text",
        x=[unknown if position is None else position for position in positions],
        y=[lane] * len(records),
        text=["?" if position is None else "" for position in positions],
        textposition="middle right",
        marker={"color": MARKS[verdict].colour, "symbol": MARKS[verdict].symbol, "size": 10},
        hovertext=[hover(record, budget_bytes=budget_bytes) for record in records],
        hovertemplate=HOVER_TEMPLATE,
        showlegend=False,
    )


def _memory_range(snapshot: StudySnapshot) -> tuple[float, float]:
    """Return the ends of the memory axis in GiB: all marks and the budget inside, with some air."""
    budget_bytes = snapshot.definition.target.budget_bytes
    positions = [
        memory_position_gib(r, budget_bytes=budget_bytes)
        for r in snapshot.records
        if r.measurement is None
    ]
    known = [position for position in positions if position is not None] + [budget_bytes / GIB]
    known += [m.peak_allocated_bytes / GIB for _, m in measured_trials(snapshot.records)]
    air = 0.06 * (max(known) - min(known)) or 0.1 * max(known)
    return max(min(known) - air, 0.0), max(known) + air


def _memory_ticks(left: float, right: float) -> dict[str, Any]:
    """Return title and ticks of the memory axis, whose values are GiB; little is told in MiB."""
    if not units.is_small(right * GIB):
        return {"title": {"text": "peak allocated memory (GiB)"}}
    scale = GIB / units.MIB
    step = 10 ** math.floor(math.log10((right - left) * scale))
    ticks = [n * step for n in range(math.ceil(left * scale / step), int(right * scale / step) + 1)]
    return {
        "title": {"text": "peak allocated memory (MiB)"},
        "tickvals": [tick / scale for tick in ticks],
        "ticktext": [f"{tick:g}" for tick in ticks],
    }


def _add_budget_line(figure: go.Figure, snapshot: StudySnapshot) -> None:
    budget_bytes = snapshot.definition.target.budget_bytes
    figure.add_shape(
        type="line",
        x0=budget_bytes / GIB,
        x1=budget_bytes / GIB,
        y0=0,
        y1=1,
        yref="paper",
        line={"color": LIMIT_COLOUR, "width": 2, "dash": "dash"},
    )
    figure.add_annotation(
        x=budget_bytes / GIB,
        y=1,
        yref="paper",
        yanchor="bottom",
        text=f"budget {units.gib(budget_bytes)}",
        showarrow=False,
        font={"color": LIMIT_COLOUR},
    )
