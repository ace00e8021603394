"""The section on how far a study can be trusted: its words, tables and figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reports import units
from reports.document import document_of, memory_unit
from reports.figures.course import course_drawing
from reports.figures.figure import DataTable, PageFigure, trace_of
from reports.figures.style import LIMIT_COLOUR, MARKS, framed
from reports.sections import FactRow, environment_rows
from reports.trust import Accuracy, Course, Steps, Trust, WinnerMemory, trust_of
from reports.words import VERDICT_LABELS
from storage.definition import StudySnapshot
from storage.ranking import measured_of
from storage.records import Measurement, TrialRecord, Verdict

_WORST_SHOWN = 10


@dataclass(frozen=True)
class StepRow:
    """The steps of one trial, as text."""

    number: int
    step: str
    interval: str
    steps: str
    runs: str


@dataclass(frozen=True)
class SpentRow:
    """What the trials of one verdict took, as text."""

    label: str
    trials: int
    device: str


@dataclass(frozen=True)
class PartRow:
    """One part of the winner's peak."""

    name: str
    size: str
    share: float
    """Of all parts, 0 to 1."""


@dataclass(frozen=True)
class TrustSection:
    """What the page says of trust; folded."""

    summary: str
    """In one line, for who does not unfold it."""
    accuracy: tuple[str, ...]
    accuracy_figures: tuple[PageFigure, ...]
    steps: tuple[StepRow, ...]
    spent: tuple[SpentRow, ...]
    savings: tuple[str, ...]
    course: PageFigure | None
    memory: tuple[str, ...]
    """What was measured of the winner's memory."""
    parts: tuple[PartRow, ...]
    changes: tuple[str, ...]
    """Versions that changed between runs, and what else is to be known."""
    facts: tuple[FactRow, ...]

    @property
    def figures(self) -> tuple[PageFigure, ...]:
        """Every figure of the section."""
        return (*self.accuracy_figures, *(() if self.course is None else (self.course,)))


def trust_section(snapshot: StudySnapshot) -> TrustSection:
    """Return the section on trust."""
    known = trust_of(snapshot)
    accuracies = [one for one in (known.memory, known.speed) if one is not None]
    return TrustSection(
        summary=_summary(known),
        accuracy=tuple(map(accuracy_words, accuracies)),
        accuracy_figures=tuple(_accuracy_figure(one, snapshot) for one in accuracies),
        steps=tuple(map(_step_row, known.steps)),
        spent=tuple(_spent_rows(known.course)),
        savings=tuple(_savings(known.course)),
        course=_course_figure(snapshot),
        memory=()
        if known.winner is None
        else tuple(_memory_words(known.winner, memory_unit(snapshot))),
        parts=() if known.winner is None else _part_rows(known.winner),
        changes=snapshot.warnings,
        facts=environment_rows(snapshot),
    )


def _summary(known: Trust) -> str:
    parts = [
        f"{one.quantity} predicted within {units.error(one.median)} (median)"
        for one in (known.memory, known.speed)
        if one is not None
    ]
    spent = known.course.confirming_seconds + sum(s.device_seconds for s in known.course.spent)
    parts.append(f"{units.duration(spent)} of device time")
    return ", ".join(parts)


def accuracy_words(known: Accuracy) -> str:
    """Return how far predictions were off, in a sentence."""
    number, worst = known.worst
    what = {"memory": "Peak memory", "speed": "Speed on the GPU that ran it"}[known.quantity]
    which = (
        {"memory": "too much", "speed": "too fast"},
        {"memory": "too little", "speed": "too slow"},
    )
    sign = which[worst < 0][known.quantity]
    return (
        f"{what} was predicted with a median error of {units.error(known.median)} over "
        f"{units.plural(len(known.errors), 'trial')} that fitted; the worst, trial {number}, was "
        f"predicted {units.error(abs(worst))} {sign}."
    )


def _accuracy_figure(known: Accuracy, snapshot: StudySnapshot) -> PageFigure:
    unit = memory_unit(snapshot)
    predicted, measured, title = {
        "memory": ("predicted_peak", "peak_allocated", f"peak allocated memory ({unit.name})"),
        "speed": ("predicted_tokens_per_second", "tokens_per_second", "tokens/s"),
    }[known.quantity]
    trials = document_of(snapshot)["trials"]
    places = {trial["number"]: row for row, trial in enumerate(trials)}
    rows = [places[number] for number, _ in known.errors]
    ends = [trials[row][column] for row in rows for column in (predicted, measured)]
    mark = MARKS[Verdict.FITS]
    look = {"color": mark.colour, "symbol": mark.symbol, "size": 9}
    name = VERDICT_LABELS[Verdict.FITS]
    trace = trace_of(name, rows, f"@{predicted}", f"@{measured}", marker=look, showlegend=False)
    return PageFigure(
        f"predicted-{known.quantity}",
        f"Predicted against measured {known.quantity}",
        "Each mark is a trial that fitted; on the line, what was predicted before it ran is what "
        "was measured.",
        {"data": [trace], "layout": _square(0.95 * min(ends), 1.05 * max(ends), title)},
        _worst_table(known, snapshot.records, unit),
    )


def _square(low: float, high: float, title: str) -> dict[str, Any]:
    """Return axes that are alike, with the line on which both are the same."""
    axis = {"range": [low, high], "tickformat": ",~r"}
    line = {"color": LIMIT_COLOUR, "width": 1, "dash": "dash"}
    return framed(380) | {
        "xaxis": {**axis, "title": {"text": f"predicted {title}"}},
        "yaxis": {**axis, "title": {"text": f"measured {title}"}},
        "shapes": [{"type": "line", "x0": low, "y0": low, "x1": high, "y1": high, "line": line}],
    }


def _worst_table(
    known: Accuracy, records: Sequence[TrialRecord], unit: units.MemoryUnit
) -> DataTable:
    """Return the trials that were furthest off; all of them are in the table of trials."""
    by_number = {record.number: measured_of(record) for record in records if record.measurement}
    worst = sorted(known.errors, key=lambda pair: -abs(pair[1]))[:_WORST_SHOWN]
    rows = []
    for number, error in worst:
        measured = by_number[number]
        if known.quantity == "memory":
            peak = measured.peak_allocated_bytes
            shown = [units.gib(size, unit) for size in (peak * (1 + error), peak)]
        else:
            speed = measured.tokens_per_second
            shown = [units.rate(rate) for rate in (speed * (1 + error), speed)]
        rows.append((str(number), *shown, f"{100 * error:+.2g} %"))
    return DataTable(
        ("trial, the furthest off first", "predicted", "measured", "error"), tuple(rows)
    )


def _step_row(known: Steps) -> StepRow:
    runs = ", ".join(units.step_time(run.step_seconds) for run in known.runs)
    return StepRow(
        number=known.record.number,
        step=units.step_time(known.searched.step_seconds),
        interval=_step_interval(known.searched),
        steps=f"{known.searched.steps_measured} after {known.searched.steps_warmup} to warm up",
        runs=runs or "not measured again",
    )


def _step_interval(measured: Measurement) -> str:
    if measured.step_seconds_ci95 is None:
        return "too few steps for one"
    low, high = measured.step_seconds_ci95
    return f"{units.step_time(low)} to {units.step_time(high)}"


def _spent_rows(course: Course) -> Iterator[SpentRow]:
    for spent in course.spent:
        device = units.duration(spent.device_seconds) if spent.device_seconds else units.DASH
        yield SpentRow(VERDICT_LABELS[spent.verdict], spent.trials, device)


def _savings(course: Course) -> Iterator[str]:
    if course.confirming_seconds:
        yield f"Measuring winners again took {units.duration(course.confirming_seconds)} more."
    if course.pruned is not None:
        saved = course.pruned
        yield (
            f"Stopping {units.plural(saved.trials, 'trial')} early saved about "
            f"{units.duration(saved.seconds)}: each up to {saved.each:g} steps at its own pace, "
            f"the median of the {saved.basis} that were measured to the end."
        )
    if course.refused is not None:
        saved = course.refused
        what = "setting up took" if course.refused_by_setup else "those that did run out took"
        yield (
            f"Not launching {units.plural(saved.trials, 'trial')} that could not fit saved about "
            f"{units.duration(saved.seconds)}: each {units.duration(saved.each)}, the median of "
            f"what {what} ({units.plural(saved.basis, 'trial')})."
        )


def _course_figure(snapshot: StudySnapshot) -> PageFigure | None:
    if not snapshot.records:
        return None
    return PageFigure(
        "timeline",
        "Timeline",
        "When each trial ran, in the lane of how it ended. Pauses of the study are cut out and "
        "marked.",
        course_drawing(snapshot),
    )


def _memory_words(winner: WinnerMemory, unit: units.MemoryUnit) -> Iterator[str]:
    measured = winner.measured
    seen = [
        f"{units.gib(measured.peak_allocated_bytes, unit)} allocated",
        f"{units.gib(measured.peak_reserved_bytes, unit)} reserved by the allocator",
        f"{units.gib(measured.peak_device_bytes, unit)} in use on the device",
    ]
    yield f"Measured peaks of trial {winner.number}: {', '.join(seen)}."
    if winner.parts:
        predicted = sum(size for _, size in winner.parts)
        yield (
            f"What the peak is made of is predicted, and adds up to {units.gib(predicted, unit)}: "
            "a running GPU tells only how much there is of all."
        )
    else:
        yield (
            "What the peak is made of is not known here: its structure was not traced on this "
            "machine. sweep plan traces it."
        )


def _part_rows(winner: WinnerMemory) -> tuple[PartRow, ...]:
    total = sum(size for _, size in winner.parts)
    return tuple(
        PartRow(name, units.gib(size), size / total) for name, size in winner.parts if size > 0
    )
