"""Owns the figure of the study's course: when each trial ran, how it ended, the fastest so far.

Pure: a study's snapshot in, a plotly figure out. Long pauses between runs are cut out of the axis.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import plotly.graph_objects as go

from reports import units
from reports.figures.style import (
    FRONT_COLOUR,
    MARKS,
    lanes_of,
    measured_trials,
    panels,
)
from reports.outcomes import VERDICT_LABELS
from storage.definition import StudySnapshot
from storage.ranking import rank_study
from storage.records import TrialRecord, Verdict

PAUSE_SECONDS = 120.0
"""A longer silence between two trials is a pause of the study and is cut out."""
_MINUTE = 60.0
_BARS_ACROSS = 150
"""Bars side by side that can still be told apart; narrower ones lose their pale edge."""
_PALE = "rgba(255,255,255,0.75)"


@dataclass(frozen=True)
class Span:
    """One trial on the study's own clock, in seconds from its first trial, pauses cut out."""

    record: TrialRecord
    row: int
    """Its index among the page's trials, which explain their marks."""
    start: float
    end: float
    pause_before: float
    """Seconds cut out just before it; 0 where it followed on."""


def spans_of(snapshot: StudySnapshot) -> tuple[Span, ...]:
    """Return the trials in the order they ran; without a start time, after the one before."""
    spans: list[Span] = []
    rows = {record.number: row for row, record in enumerate(snapshot.records)}
    clock, previous_end = 0.0, None
    for record, started in _in_order(snapshot.records):
        silence = 0.0 if started is None or previous_end is None else started - previous_end
        pause = silence if silence > PAUSE_SECONDS else 0.0
        start = clock + max(silence - pause, 0.0)
        wall = max(record.wall_seconds, 0.0) if units.is_known(record.wall_seconds) else 0.0
        spans.append(Span(record, rows[record.number], start, start + wall, pause))
        clock = start + wall
        began = previous_end if started is None else started
        previous_end = None if began is None else began + wall
    return tuple(spans)


def _in_order(records: Sequence[TrialRecord]) -> list[tuple[TrialRecord, float | None]]:
    """Return trials with their start in epoch seconds; one without keeps its place by number."""
    placed: list[tuple[float, int, TrialRecord, float | None]] = []
    latest = 0.0
    for record in sorted(records, key=lambda record: record.number):
        started = _seconds(record.started_at)
        latest = latest if started is None else started
        placed.append((latest, record.number, record, started))
    return [(record, started) for *_, record, started in sorted(placed, key=lambda p: p[:2])]


def timeline_figure(snapshot: StudySnapshot) -> go.Figure:
    """Draw the measured speeds as they came, the fastest so far, and each trial's lane."""
    figure = go.Figure()
    spans = spans_of(snapshot)
    _add_fastest_so_far(figure, spans, {r.number for r in rank_study(snapshot).of_space})
    _add_speeds(figure, spans)
    lanes = lanes_of(snapshot.records)
    for lane, verdict in enumerate(lanes):
        here = [span for span in spans if span.record.verdict is verdict]
        _add_lane(figure, here, lane=lane, seen_seconds=spans[-1].end / _BARS_ACROSS)
    figure.update_layout(panels(lanes=[MARKS[verdict].lane for verdict in lanes]))
    figure.update_xaxes(title={"text": "minutes"}, rangemode="tozero")
    _add_pauses(figure, spans)
    return figure


def fastest_so_far(
    spans: Sequence[Span], *, of_space: Collection[int]
) -> list[tuple[float, float]]:
    """Return (seconds, tokens/s) at every trial that fitted and was faster than all before it.

    Args:
        spans: the trials in the order they ran.
        of_space: numbers of those that count; a baseline outside the space does not.
    """
    steps: list[tuple[float, float]] = []
    for span in spans:
        for _, measured in measured_trials([span.record] if span.record.number in of_space else ()):
            is_better = not steps or measured.tokens_per_second > steps[-1][1]
            if span.record.verdict is Verdict.FITS and is_better:
                steps.append((span.end, measured.tokens_per_second))
    return steps


def _add_fastest_so_far(
    figure: go.Figure, spans: Sequence[Span], of_space: Collection[int]
) -> None:
    steps = fastest_so_far(spans, of_space=of_space)
    if not steps:
        return
    # The line goes on to the end of the study: the last of them stayed the fastest.
    steps.append((max(span.end for span in spans), steps[-1][1]))
    figure.add_scatter(
        name="fastest so far",
        mode="lines",
        x=[seconds / _MINUTE for seconds, _ in steps],
        y=[rate for _, rate in steps],
        line={"color": FRONT_COLOUR, "width": 2, "shape": "hv"},
        hoverinfo="skip",
    )


def _add_speeds(figure: go.Figure, spans: Sequence[Span]) -> None:
    for verdict in (Verdict.FITS, Verdict.PRUNED_SLOW):
        points = [
            (span, measured)
            for span in spans
            if span.record.verdict is verdict
            for _, measured in measured_trials([span.record])
        ]
        if points:
            figure.add_scatter(
                name=VERDICT_LABELS[verdict],
                mode="markers",
                x=[span.end / _MINUTE for span, _ in points],
                y=[measured.tokens_per_second for _, measured in points],
                marker={"color": MARKS[verdict].colour, "symbol": MARKS[verdict].symbol, "size": 8},
                customdata=[span.row for span, _ in points],
                hoverinfo="none",
            )


def _add_lane(figure: go.Figure, spans: Sequence[Span], *, lane: int, seen_seconds: float) -> None:
    colour = MARKS[spans[0].record.verdict].colour
    # A pale edge parts neighbours; what is too narrow to be seen through it is edged in its colour.
    edges = [_PALE if span.end - span.start > seen_seconds else colour for span in spans]
    figure.add_bar(
        name=VERDICT_LABELS[spans[0].record.verdict],
        yaxis="y2",
        orientation="h",
        base=[span.start / _MINUTE for span in spans],
        x=[(span.end - span.start) / _MINUTE for span in spans],
        y=[lane] * len(spans),
        width=0.6,
        marker={"color": colour, "line": {"color": edges, "width": 1}},
        customdata=[span.row for span in spans],
        hoverinfo="none",
        showlegend=False,
    )


def _add_pauses(figure: go.Figure, spans: Sequence[Span]) -> None:
    for span in spans:
        if span.pause_before:
            figure.add_vline(
                x=span.start / _MINUTE, line={"dash": "dot", "width": 1, "color": "#8a8f98"}
            )
            figure.add_annotation(
                x=span.start / _MINUTE,
                y=0,
                yref="paper",
                yanchor="bottom",
                xanchor="left",
                textangle=-90,
                showarrow=False,
                text=f"paused {units.duration(span.pause_before)}",
            )


def _seconds(started_at: str | None) -> float | None:
    """Return ISO 8601 text as seconds since the epoch, UTC where no zone is named, else None."""
    if started_at is None:
        return None
    try:
        moment = datetime.fromisoformat(started_at)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
