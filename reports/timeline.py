"""When each trial of a study ran, in the lane of how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from itertools import pairwise
from typing import NamedTuple

import plotly.graph_objects as go

from qlora_sweep.reports.figures import MARKS, PageFigure, digits, framed
from qlora_sweep.reports.words import VERDICT_LABELS
from qlora_sweep.storage.records import TrialRecord, Verdict

PAUSE_SECONDS = 120.0
"""A longer time between two trials is a pause of the study and is cut out."""


class _Span(NamedTuple):
    """When a trial ran."""

    start: datetime
    end: datetime
    number: int
    verdict: Verdict


def timeline_of(records: Iterable[TrialRecord]) -> PageFigure:
    """Return when each trial ran, in the lane of how it ended."""
    spans = _spans(records)
    pauses = []
    for before, after in pairwise(spans):
        if (after.start - before.end).total_seconds() > PAUSE_SECONDS:
            pauses.append({"bounds": [before.end.isoformat(), after.start.isoformat()]})
    lanes: dict[Verdict, list[_Span]] = {verdict: [] for verdict in Verdict}
    for span in spans:
        lanes[span.verdict].append(span)
    figure = go.Figure()
    for verdict, lane in lanes.items():
        if lane:
            figure.add_trace(_lane(verdict, lane))
    figure.update_layout(framed(110 + 40 * len(figure.data)), barmode="overlay", showlegend=False)
    figure.update_xaxes(type="date", rangebreaks=pauses)
    figure.update_yaxes(autorange="reversed")
    caption = "When each trial ran, by how it ended. Pauses of the study are cut out."
    return PageFigure("timeline", "Timeline", caption, figure)


def _spans(records: Iterable[TrialRecord]) -> list[_Span]:
    """Return when each trial ran whose start is known, in that order."""
    spans = []
    for record in records:
        try:
            start = datetime.fromisoformat(record.started_at or "")
        except ValueError:
            continue
        if start.tzinfo:
            start = start.astimezone(UTC).replace(tzinfo=None)
        end = start + timedelta(seconds=max(record.wall_seconds, 0.0))
        spans.append(_Span(start, end, record.number, record.verdict))
    spans.sort(key=lambda span: span.start)
    return spans


def _lane(verdict: Verdict, spans: Sequence[_Span]) -> go.Bar:
    colour = MARKS[verdict].colour
    milliseconds = []
    numbers = []
    label = escape(VERDICT_LABELS[verdict])
    for span in spans:
        numbers.append(span.number)
        milliseconds.append(1000 * (span.end - span.start).total_seconds())
    return go.Bar(
        orientation="h",
        base=[span.start.isoformat(timespec="milliseconds") for span in spans],
        x=digits(milliseconds),
        y=[label] * len(spans),
        customdata=numbers,
        width=0.6,
        marker={"color": colour, "line": {"color": colour, "width": 1}},
        hovertemplate="trial %{customdata}<extra></extra>",
    )
