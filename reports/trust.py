"""How far a study can be trusted: what was predicted against what was measured, how steady the best
are, where the device's time went, what the winner's memory is."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Literal

from qlora_sweep.reports import format as units
from qlora_sweep.reports.accuracy import accuracy_figure, accuracy_of
from qlora_sweep.reports.document import TrialTable
from qlora_sweep.reports.figures import Section
from qlora_sweep.reports.sections import environment_rows
from qlora_sweep.reports.timeline import timeline_of
from qlora_sweep.reports.words import VERDICT_LABELS
from qlora_sweep.storage.ranking import RankedTrial

TOP_SHOWN = 5
_QUANTITIES: tuple[Literal["memory", "speed"], ...] = ("memory", "speed")


def trust_of(document: TrialTable) -> Section:
    """Return what there is to judge a study's numbers by."""
    view = document.view
    accuracies = []
    summary = []
    figures = []
    for quantity in _QUANTITIES:
        accuracy = accuracy_of(document, quantity)
        if accuracy is not None:
            accuracies.append(accuracy)
            within = units.error(accuracy.median)
            summary.append(f"{quantity} predicted within {within} (median)")
            figures.append(accuracy_figure(document, accuracy))
    summary.append(f"{units.duration(view.seconds['device'])} of device time")
    if document.records:
        figures.append(timeline_of(document.records))
    return Section(
        summary=", ".join(summary),
        accuracy=accuracies,
        steps=[_steps(document, record) for record in view.ranked[:TOP_SHOWN]],
        spent=list(_spent(document)),
        memory=_memory(document),
        parts=list(_memory_parts(document)),
        changes=view.warnings,
        facts=environment_rows(view),
        figures=figures,
    )


def _memory(document: TrialTable) -> str:
    """Return the peaks of the winner; empty without one."""
    winner = document.view.winner
    if winner is None:
        return ""
    measured = winner.measurement
    allocated = units.gib(measured.peak_allocated_bytes, document.unit)
    reserved = units.gib(measured.peak_reserved_bytes, document.unit)
    in_use = units.gib(measured.peak_device_bytes, document.unit)
    return (
        f"Measured peaks of trial {winner.number}: {allocated} allocated, {reserved} reserved "
        f"by the allocator, {in_use} in use on the device."
    )


def _memory_parts(document: TrialTable) -> Iterator[tuple[str, str, float]]:
    """Yield what the winner's peak is predicted to be made of, the largest first: name, size and
    share."""
    winner = document.view.winner
    if winner is None:
        return
    forecast = document.view.memory_forecast(winner.config)
    if forecast is None:
        return
    total = sum(forecast.parts.values())
    for name, count in sorted(forecast.parts.items(), key=lambda part: -part[1]):
        if count:
            yield name, units.gib(count), count / total


def _steps(document: TrialTable, trial: RankedTrial) -> tuple[str, ...]:
    """Return a trial's number, median step, interval, steps, and what each later run had."""
    searched = document.records[document.rows[trial.number]].measurement
    assert searched is not None, "only measured trials are ranked"
    interval = "too few steps for one"
    if searched.step_seconds_ci95:
        interval = " to ".join(map(units.step_time, searched.step_seconds_ci95))
    runs = document.view.runs_of(trial.config)
    return (
        str(trial.number),
        units.step_time(searched.step_seconds),
        interval,
        f"{searched.steps_measured} after {searched.steps_warmup} to warm up",
        ", ".join(units.step_time(run.step_seconds) for run in runs) or "not measured again",
    )


def _spent(document: TrialTable) -> Iterator[tuple[str, ...]]:
    """Yield how trials ended, how many, and their device time."""
    for verdict, label in VERDICT_LABELS.items():
        seconds = [r.device_seconds for r in document.records if r.verdict is verdict]
        if not seconds:
            continue
        duration = units.DASH
        if sum(seconds):
            duration = units.duration(sum(seconds))
        yield label, str(len(seconds)), duration
    confirmations = document.view.confirmation_runs
    if confirmations:
        total = sum(map(attrgetter("device_seconds"), confirmations))
        yield "measured winners again", str(len(confirmations)), units.duration(total)
