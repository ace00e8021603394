"""What was measured again, as the rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from qlora_sweep.reports import format as units
from qlora_sweep.reports import words
from qlora_sweep.reports.view import StudyView
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.ranking import RankedTrial, measured_of
from qlora_sweep.storage.records import TrialRecord


class ConfirmedRow(NamedTuple):
    """One configuration that was measured again, as text."""

    number: str
    """Of the trial; a dash for the baseline in the winner's class, which no search tried."""
    changes: str
    """Where it differs from the baseline, in words."""
    runs: str
    """Tokens/s of each run, in order."""
    tokens_per_second: str
    interval: str
    peak_allocated: str
    result: str


def confirmed_rows(view: StudyView) -> Iterator[ConfirmedRow]:
    """Yield what was measured again, in the order of the answer; what gains are over among it."""
    results: dict[int, str] = {}
    references = [view.measured_baseline]
    if view.measured_baseline is not None:
        results[view.measured_baseline.number] = "baseline"
    results |= dict.fromkeys(view.tied, "as fast")
    if view.winner is not None:
        references.insert(0, view.reference_for(view.winner.config))
        results[view.winner.number] = "recommended"
    shown = {trial.number: trial for trial in view.ranked if view.is_measured_again(trial)}
    for reference in references:
        if reference is None:
            continue
        if reference.record.purpose == "confirm" or view.is_measured_again(reference):
            shown.setdefault(reference.number, reference)
    for trial in shown.values():
        yield _confirmed_row(view, trial, results.get(trial.number, "slower"))
    for record in view.records:
        if record.number in view.fallen:
            yield _fallen_row(view, record, view.fallen[record.number])


def _confirmed_row(view: StudyView, trial: RankedTrial, result: str) -> ConfirmedRow:
    number = str(trial.number)
    if trial.record.purpose != "search":
        number = units.DASH
        result = view.reference_name(trial.config).removeprefix("the ")
    return ConfirmedRow(
        number=number,
        changes=view.changes(trial.config),
        runs=_runs(view, trial.config),
        tokens_per_second=units.rate(trial.measurement.tokens_per_second),
        interval=words.interval(trial.measurement),
        peak_allocated=units.gib(trial.measurement.peak_allocated_bytes),
        result=result,
    )


def _fallen_row(view: StudyView, record: TrialRecord, run: TrialRecord) -> ConfirmedRow:
    """Return the row of a trial that fitted in the search and did not hold in a run."""
    return ConfirmedRow(
        number=str(record.number),
        changes=view.changes(record.config),
        runs=_runs(view, record.config),
        tokens_per_second=units.DASH,
        interval=units.DASH,
        peak_allocated=units.gib(measured_of(record).peak_allocated_bytes),
        result=words.fell(run),
    )


def _runs(view: StudyView, config: TrialConfig) -> str:
    """Return the speed of each run that measured a configuration again."""
    rates = [units.rate(run.tokens_per_second) for run in view.runs_of(config)]
    return ", ".join(rates) or units.DASH
