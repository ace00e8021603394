"""How far a study can be trusted: what was predicted against what was measured, how steady the best
are, where the device's time went, what the winner's memory is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape
from itertools import pairwise
from statistics import median
from typing import Literal

import plotly.graph_objects as go

from qlora_sweep.reports import units
from qlora_sweep.reports.document import Document
from qlora_sweep.reports.figures import BLUE, MARKS, ORANGE, PageFigure, Section, digits, framed
from qlora_sweep.reports.sections import environment_rows
from qlora_sweep.reports.words import VERDICT_LABELS
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.ranking import measured_of
from qlora_sweep.storage.records import TrialRecord, Verdict

TOP_SHOWN = 5
PAUSE_SECONDS = 120.0
"""A longer silence between two trials is a pause of the study and is cut out."""


@dataclass(frozen=True)
class Accuracy:
    """How far predictions of what fitted were off; each was made before its trial ran."""

    quantity: Literal["memory", "speed"]
    trials: tuple[tuple[int, float, float], ...]
    """Numbers with what was predicted and what was measured."""

    @property
    def errors(self) -> dict[int, float]:
        """Relative to what was measured; positive where too much was predicted."""
        return {number: predicted / measured - 1 for number, predicted, measured in self.trials}

    @property
    def median(self) -> float:
        """The error that half of the trials are within, without its sign."""
        return median(map(abs, self.errors.values()))

    def __str__(self) -> str:
        number, worst = max(self.errors.items(), key=lambda pair: abs(pair[1]))
        what, more, less = {
            "memory": ("Peak memory", "too much", "too little"),
            "speed": ("Speed on the GPU that ran it", "too fast", "too slow"),
        }[self.quantity]
        return (
            f"{what} was predicted with a median error of {units.error(self.median)} over "
            f"{units.plural(len(self.trials), 'trial')} that fitted; the worst, trial {number}, "
            f"was predicted {units.error(abs(worst))} {more if worst > 0 else less}."
        )


def trust_of(document: Document) -> Section:
    """Return what there is to judge a study's numbers by."""
    snapshot, ranking = document.snapshot, document.ranking
    accuracy = [*filter(None, (accuracy_of(snapshot, q) for q in ("memory", "speed")))]
    devices = sum(r.device_seconds for r in (*snapshot.records, *snapshot.confirmations))
    summary = [
        f"{one.quantity} predicted within {units.error(one.median)} (median)" for one in accuracy
    ]
    winner, memory, parts = ranking.winner, "", []
    if winner is not None:
        known, unit = measured_of(winner), document.unit
        peaks = known.peak_allocated_bytes, known.peak_reserved_bytes, known.peak_device_bytes
        allocated, reserved, used = (units.gib(peak, unit) for peak in peaks)
        memory = (
            f"Measured peaks of trial {winner.number}: {allocated} allocated, {reserved} reserved "
            f"by the allocator, {used} in use on the device."
        )
        forecast = snapshot.memory_forecasts.get(winner.config)
        sizes = {} if forecast is None else forecast.parts
        parts = sorted((pair for pair in sizes.items() if pair[1]), key=lambda pair: -pair[1])
    figures = [_scatter(document, one) for one in accuracy]
    figures += [_timeline(snapshot)] if snapshot.records else []
    return Section(
        summary=", ".join([*summary, f"{units.duration(devices)} of device time"]),
        accuracy=accuracy,
        steps=[_steps(document, record) for record in ranking.ranked[:TOP_SHOWN]],
        spent=list(_spent(snapshot)),
        memory=memory,
        # What the winner's peak is predicted to be made of.
        parts=[(name, units.gib(n), n / sum(dict(parts).values())) for name, n in parts],
        changes=snapshot.warnings,
        facts=environment_rows(snapshot),
        figures=figures,
    )


def accuracy_of(snapshot: StudySnapshot, quantity: Literal["memory", "speed"]) -> Accuracy | None:
    """Return how far predictions were off; None where none was made.

    What was stopped early has no speed to hold one against, and what ran out has no peak.
    """
    key = {"memory": "peak_allocated_bytes", "speed": "tokens_per_second"}[quantity]
    fitted = [record for record in snapshot.records if record.verdict is Verdict.FITS]
    trials = tuple(
        (record.number, float(predicted), float(getattr(record.measurement, key)))
        for record in fitted
        if (predicted := getattr(record.prediction, key, None)) is not None
    )
    return Accuracy(quantity, trials) if trials else None


def _scatter(document: Document, known: Accuracy) -> PageFigure:
    is_memory = known.quantity == "memory"
    unit = document.unit.bytes if is_memory else 1
    title = f"peak allocated memory ({document.unit.name})" if is_memory else "tokens/s"
    x, y = (digits(one[at] / unit for one in known.trials) for at in (1, 2))
    ends = [0.95 * min(x + y), 1.05 * max(x + y)]
    figure = go.Figure(layout=framed(380))
    figure.add_scatter(
        x=x,
        y=y,
        customdata=[number for number, *_ in known.trials],
        mode="markers",
        marker={"color": BLUE, "size": 9},
        hovertemplate="trial %{customdata}: %{y:,.4~r}, predicted %{x:,.4~r}<extra></extra>",
    )
    line = {"type": "line", "line": {"color": ORANGE, "width": 1, "dash": "dash"}}
    figure.add_shape(line | {"x0": ends[0], "y0": ends[0], "x1": ends[1], "y1": ends[1]})
    figure.update_xaxes(range=ends, tickformat=",~r", title=f"predicted {title}")
    figure.update_yaxes(range=ends, tickformat=",~r", title=f"measured {title}")
    return PageFigure(
        f"predicted-{known.quantity}",
        f"Predicted against measured {known.quantity}",
        "Each mark is a trial that fitted; on the line it measured what was predicted before.",
        figure,
    )


def _steps(document: Document, record: TrialRecord) -> tuple[str, ...]:
    """Return a trial's number, median step, interval, steps, and what each later run had."""
    searched = next(r for r in document.snapshot.records if r.number == record.number).measurement
    assert searched is not None, "only measured trials are ranked"
    known = document.ranking.confirmations
    runs = known.runs(record.config, series=known.series)
    ends = searched.step_seconds_ci95
    return (
        str(record.number),
        units.step_time(searched.step_seconds),
        " to ".join(map(units.step_time, ends)) if ends else "too few steps for one",
        f"{searched.steps_measured} after {searched.steps_warmup} to warm up",
        ", ".join(units.step_time(run.step_seconds) for run in runs) or "not measured again",
    )


def _spent(snapshot: StudySnapshot) -> Iterator[tuple[str, ...]]:
    """Yield how trials ended, how many, and their device time."""
    for verdict in Verdict:
        took = [r.device_seconds for r in snapshot.records if r.verdict is verdict]
        if took:
            time = units.duration(sum(took)) if sum(took) else units.DASH
            yield VERDICT_LABELS[verdict], str(len(took)), time
    if snapshot.confirmations:
        took = [record.device_seconds for record in snapshot.confirmations]
        yield "measured winners again", str(len(took)), units.duration(sum(took))


def _timeline(snapshot: StudySnapshot) -> PageFigure:
    """Return when each trial ran, in the lane of how it ended."""
    spans = []
    for record in snapshot.records:
        try:
            start = datetime.fromisoformat(record.started_at or "")
        except ValueError:
            continue
        start = start.astimezone(UTC).replace(tzinfo=None) if start.tzinfo else start
        spans.append((start, start + timedelta(seconds=max(record.wall_seconds, 0.0)), record))
    spans.sort(key=lambda span: span[0])
    pauses = [
        {"bounds": [before.isoformat(), after.isoformat()]}
        for (_, before, _), (after, *_) in pairwise(spans)
        if (after - before).total_seconds() > PAUSE_SECONDS
    ]
    ended = [v for v in Verdict if any(record.verdict is v for *_, record in spans)]
    figure = go.Figure(layout=framed(110 + 40 * len(ended)))
    for verdict in ended:
        here = [span for span in spans if span[2].verdict is verdict]
        colour = MARKS[verdict].colour
        figure.add_bar(
            orientation="h",
            base=[start.isoformat(timespec="milliseconds") for start, *_ in here],
            x=digits(1000 * (end - start).total_seconds() for start, end, _ in here),
            y=[escape(VERDICT_LABELS[verdict])] * len(here),
            customdata=[record.number for *_, record in here],
            width=0.6,
            marker={"color": colour, "line": {"color": colour, "width": 1}},
            hovertemplate="trial %{customdata}<extra></extra>",
        )
    figure.update_layout(barmode="overlay", showlegend=False)
    figure.update_xaxes(type="date", rangebreaks=pauses)
    figure.update_yaxes(autorange="reversed")
    caption = "When each trial ran, by how it ended. Pauses of the study are cut out."
    return PageFigure("timeline", "Timeline", caption, figure)
