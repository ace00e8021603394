"""The timeline of a study: when each trial ran and how it ended, with long pauses cut out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from reports import units
from reports.figures.style import MARGIN, MARKS, lanes_of, panels
from reports.words import VERDICT_LABELS
from storage.definition import StudySnapshot
from storage.records import TrialRecord, Verdict

PAUSE_SECONDS = 120.0
"""A longer silence between two trials is a pause of the study and is cut out."""
_MINUTE = 60.0
_EMPTY_PIXELS = 10
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
    """Draw each trial on the study's clock, in the lane of how it ended."""
    spans = spans_of(snapshot)
    rows = {record.number: row for row, record in enumerate(snapshot.records)}
    lanes = lanes_of(snapshot.records)
    data = [
        _lane(spans, rows, verdict, lane=lane, seen_seconds=spans[-1].end / _BARS_ACROSS)
        for lane, verdict in enumerate(lanes)
    ]
    layout = panels(lanes=[MARKS[verdict].lane for verdict in lanes], tall=_EMPTY_PIXELS)
    layout["xaxis"] |= {"title": {"text": "minutes"}, "rangemode": "tozero"}
    layout["yaxis"]["visible"] = False
    layout["margin"]["t"] = _EMPTY_PIXELS
    layout["height"] += _EMPTY_PIXELS - MARGIN["t"]
    return {"data": data, "layout": layout | _pauses(spans)}


def _minutes(seconds: float) -> float:
    return round(seconds / _MINUTE, 4)


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
