"""Owns the figure of a study's course: when each trial ran, how it ended, the fastest so far.

Pure: a study's snapshot in, a drawing out, whose marks are the page's trials. Long pauses between
runs are cut out of the axis.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from reports import units
from reports.figures.style import FRONT_COLOUR, MARKS, lanes_of, measured_trials, panels
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
    start: float
    end: float
    pause_before: float
    """Seconds cut out just before it; 0 where it followed on."""


def spans_of(snapshot: StudySnapshot) -> tuple[Span, ...]:
    """Return the trials in the order they ran; without a start time, after the one before."""
    spans: list[Span] = []
    clock, previous_end = 0.0, None
    for record, started in _in_order(snapshot.records):
        silence = 0.0 if started is None or previous_end is None else started - previous_end
        pause = silence if silence > PAUSE_SECONDS else 0.0
        start = clock + max(silence - pause, 0.0)
        wall = max(record.wall_seconds, 0.0) if units.is_known(record.wall_seconds) else 0.0
        spans.append(Span(record, start, start + wall, pause))
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


def course_drawing(snapshot: StudySnapshot) -> dict[str, Any]:
    """Draw the measured speeds as they came, the fastest so far, and each trial's lane."""
    spans = spans_of(snapshot)
    rows = {record.number: row for row, record in enumerate(snapshot.records)}
    lanes = lanes_of(snapshot.records)
    data = [
        *_fastest_line(spans, {record.number for record in rank_study(snapshot).of_space}),
        *_speeds(spans, rows),
        *(
            _lane(spans, rows, verdict, lane=lane, seen_seconds=spans[-1].end / _BARS_ACROSS)
            for lane, verdict in enumerate(lanes)
        ),
    ]
    layout = panels(lanes=[MARKS[verdict].lane for verdict in lanes])
    layout["xaxis"] |= {"title": {"text": "minutes"}, "rangemode": "tozero"}
    return {"data": data, "layout": layout | _pauses(spans)}


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


def _fastest_line(spans: Sequence[Span], of_space: Collection[int]) -> Iterator[dict[str, Any]]:
    steps = fastest_so_far(spans, of_space=of_space)
    if not steps:
        return
    # The line goes on to the end of the study: the last of them stayed the fastest.
    steps.append((max(span.end for span in spans), steps[-1][1]))
    yield {
        "type": "scatter",
        "mode": "lines",
        "name": "fastest so far",
        "x": [_minutes(seconds) for seconds, _ in steps],
        "y": [rate for _, rate in steps],
        "line": {"color": FRONT_COLOUR, "width": 2, "shape": "hv"},
        "hoverinfo": "skip",
    }


def _minutes(seconds: float) -> float:
    return round(seconds / _MINUTE, 4)


def _speeds(spans: Sequence[Span], rows: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """Yield the speeds of the search: what was measured again later is not what drove it."""
    for verdict in (Verdict.FITS, Verdict.PRUNED_SLOW):
        points = [
            (span, measured)
            for span in spans
            if span.record.verdict is verdict
            for _, measured in measured_trials([span.record])
        ]
        if points:
            mark = MARKS[verdict]
            yield {
                "type": "scatter",
                "mode": "markers",
                "name": VERDICT_LABELS[verdict],
                "rows": [rows[span.record.number] for span, _ in points],
                "x": [_minutes(span.end) for span, _ in points],
                "y": [round(measured.tokens_per_second, 1) for _, measured in points],
                "marker": {"color": mark.colour, "symbol": mark.symbol, "size": 8},
                "hoverinfo": "none",
            }


def _lane(
    spans: Sequence[Span],
    rows: Mapping[int, int],
    verdict: Verdict,
    *,
    lane: int,
    seen_seconds: float,
) -> dict[str, Any]:
    here, colour = [span for span in spans if span.record.verdict is verdict], MARKS[verdict].colour
    # A pale edge parts neighbours; what is too narrow to be seen through it is edged in its colour.
    edges = [_PALE if span.end - span.start > seen_seconds else colour for span in here]
    return {
        "type": "bar",
        "name": VERDICT_LABELS[verdict],
        "yaxis": "y2",
        "orientation": "h",
        "rows": [rows[span.record.number] for span in here],
        "base": [_minutes(span.start) for span in here],
        "x": [_minutes(span.end - span.start) for span in here],
        "y": [lane] * len(here),
        "width": 0.6,
        "marker": {"color": colour, "line": {"color": edges, "width": 1}},
        "hoverinfo": "none",
        "showlegend": False,
    }


def _pauses(spans: Sequence[Span]) -> dict[str, Any]:
    """Return a dotted line for each pause that was cut out, with how long it was."""
    paused = [span for span in spans if span.pause_before]
    line = {"dash": "dot", "width": 1, "color": MARKS[Verdict.LOST].colour}
    return {
        "shapes": [
            {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}
            for x in (_minutes(span.start) for span in paused)
        ],
        "annotations": [
            {
                "x": _minutes(span.start),
                "y": 0,
                "yref": "paper",
                "yanchor": "bottom",
                "xanchor": "left",
                "textangle": -90,
                "showarrow": False,
                "text": f"paused {units.duration(span.pause_before)}",
            }
            for span in paused
        ],
    }


def _seconds(started_at: str | None) -> float | None:
    """Return ISO 8601 text as seconds since the epoch, UTC where no zone is named, else None."""
    if started_at is None:
        return None
    try:
        moment = datetime.fromisoformat(started_at)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
