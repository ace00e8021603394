"""Owns the figure of throughput against peak memory.

Pure: a study's snapshot in, a plotly figure out. What has no speed is never drawn as if it had one.
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from reports import units
from reports.advice import needed_bytes
from reports.lanes import frame, lanes_of
from reports.marks import (
    FRONT_COLOUR,
    HOVER_TEMPLATE,
    LIMIT_COLOUR,
    MARKS,
    OUTLINE,
    WINNER_COLOUR,
    hover,
)
from reports.measured import measured_trials, rankable
from reports.tables import VERDICT_LABELS
from search_spaces.gpus import GIB
from search_spaces.space import Objective
from storage import ranking
from storage.definition import StudySnapshot
from storage.records import OUT_OF_MEMORY, Measurement, TrialRecord, Verdict

MEASURED = (Verdict.FITS, Verdict.PRUNED_SLOW)
OBJECTIVES: tuple[Objective, ...] = ("tokens_per_second", "peak_memory")
"""What the front trades: the figure's two axes."""
FAR_BEYOND_BUDGET = 1.3
"""Needs above this many budgets are drawn at it, so that one absurd candidate squeezes nothing."""


def throughput_figure(snapshot: StudySnapshot) -> go.Figure:
    """Draw tokens/s against peak allocated GiB; every trial without a speed sits in a lane below.

    A trial that did not fit is placed at the memory that it is known or predicted to need (at the
    budget where neither is), and one without any memory figure at the left edge with a question
    mark.
    """
    figure = go.Figure()
    measured = measured_trials(snapshot.records)
    for verdict in MEASURED:
        _add_measured(figure, [pair for pair in measured if pair[0].verdict is verdict], verdict)
    _add_front(figure, snapshot)
    _add_named(figure, snapshot)
    lanes = lanes_of(snapshot.records, without=MEASURED)
    left, right = _memory_range(snapshot)
    for lane, verdict in enumerate(lanes):
        _add_lane(figure, snapshot, verdict, lane=lane, unknown=left + 0.02 * (right - left))
    axis = {"title": {"text": "peak allocated memory (GiB)"}, "range": [left, right]}
    frame(figure, lanes=lanes, x_axis=axis)
    _add_budget_line(figure, snapshot)
    return figure


def placed_gib(record: TrialRecord, *, budget_bytes: int) -> float | None:
    """Return where on the memory axis a trial without a speed belongs; None where nothing says.

    What did not fit is never placed below what it was seen to hold, nor beyond `FAR_BEYOND_BUDGET`.
    """
    if record.verdict in OUT_OF_MEMORY:
        need = needed_bytes(record) or budget_bytes
        return min(need, FAR_BEYOND_BUDGET * budget_bytes) / GIB
    if record.prediction is not None:
        return min(record.prediction.peak_allocated_bytes, FAR_BEYOND_BUDGET * budget_bytes) / GIB
    return None


def _add_measured(
    figure: go.Figure, pairs: Sequence[tuple[TrialRecord, Measurement]], verdict: Verdict
) -> None:
    if not pairs:
        return
    intervals = [ranking.speed_interval(m) for _, m in pairs]
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
        hovertext=[hover(record) for record, _ in pairs],
        hovertemplate=HOVER_TEMPLATE,
    )


def _add_front(figure: go.Figure, snapshot: StudySnapshot) -> None:
    front = ranking.pareto_front(rankable(snapshot.records), OBJECTIVES)
    measured = [record.measurement for record in front if record.measurement is not None]
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


def _add_named(figure: go.Figure, snapshot: StudySnapshot) -> None:
    """Mark the winner and the baseline over the rest."""
    records = rankable(snapshot.records)
    named = (("baseline", "diamond", 13), ("winner", "star", 18))
    found = (ranking.baseline(records), ranking.winner(records))
    for (name, symbol, size), record in zip(named, found, strict=True):
        if record is None or record.measurement is None:
            continue
        figure.add_scatter(
            name=name,
            mode="markers",
            x=[record.measurement.peak_allocated_bytes / GIB],
            y=[record.measurement.tokens_per_second],
            marker={"symbol": symbol, "size": size, "color": WINNER_COLOUR, "line": OUTLINE},
            hovertext=[hover(record)],
            hovertemplate=HOVER_TEMPLATE,
        )


def _add_lane(
    figure: go.Figure, snapshot: StudySnapshot, verdict: Verdict, *, lane: int, unknown: float
) -> None:
    records = [record for record in snapshot.records if record.verdict is verdict]
    budget_bytes = snapshot.definition.target.budget_bytes
    places = [placed_gib(record, budget_bytes=budget_bytes) for record in records]
    figure.add_scatter(
        name=VERDICT_LABELS[verdict],
        yaxis="y2",
        mode="markers+text",
        x=[unknown if place is None else place for place in places],
        y=[lane] * len(records),
        text=["?" if place is None else "" for place in places],
        textposition="middle right",
        marker={"color": MARKS[verdict].colour, "symbol": MARKS[verdict].symbol, "size": 10},
        hovertext=[hover(record) for record in records],
        hovertemplate=HOVER_TEMPLATE,
        showlegend=False,
    )


def _memory_range(snapshot: StudySnapshot) -> tuple[float, float]:
    """Return the ends of the memory axis in GiB: all marks and the budget inside, with some air."""
    budget_bytes = snapshot.definition.target.budget_bytes
    places = [
        placed_gib(r, budget_bytes=budget_bytes) for r in snapshot.records if r.measurement is None
    ]
    known = [place for place in places if place is not None] + [budget_bytes / GIB]
    known += [m.peak_allocated_bytes / GIB for _, m in measured_trials(snapshot.records)]
    air = 0.06 * (max(known) - min(known)) or 0.1 * max(known)
    return max(min(known) - air, 0.0), max(known) + air


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
