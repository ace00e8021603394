"""What a study resumes from after a crash: how trials ended whose driver did not see it, and how
often a configuration was tried in vain."""

from __future__ import annotations

from collections.abc import Iterable

from search_spaces.config import TrialConfig
from storage.definition import RunningTrial, StudyDefinition
from storage.outcome_file import OutcomeFile
from storage.records import (
    NEIGHBOUR,
    RETRYABLE,
    Errand,
    Lost,
    Outcome,
    OutOfMemory,
    TrialRecord,
    Verdict,
    held_to_budget,
)

MAX_ATTEMPTS = 3
"""The first try and two more."""


def ended_unseen(
    trial: RunningTrial,
    config: TrialConfig,
    outcome: Outcome,
    *,
    definition: StudyDefinition,
    known: Iterable[TrialRecord],
) -> TrialRecord:
    """Return the record of a trial that its driver did not see the end of.

    Its seconds are those that the worker measured; none where it came to no measurement.
    """
    errand = Errand(purpose=trial.purpose, series=trial.series, confirms=trial.confirms)
    before = [
        record
        for record in known
        if record.number < trial.number
        and (record.purpose, record.series) == (errand.purpose, errand.series)
    ]
    record = TrialRecord(
        number=trial.number,
        config=config,
        outcome=outcome,
        is_baseline=config == definition.space.baseline_config(),
        attempt=attempts(before, config) + 1,
        attempt_id=trial.attempt_id,
        started_at=trial.started_at,
        **errand.model_dump(),
    )
    measured = record.measurement
    if measured is None:
        return record
    seconds = measured.setup_seconds + measured.measured_seconds
    return record.model_copy(update={"device_seconds": seconds, "wall_seconds": seconds})


def record_left(
    file: OutcomeFile, *, definition: StudyDefinition, study: str, known: Iterable[TrialRecord]
) -> TrialRecord | None:
    """Return what a worker left on disk as the record of its attempt, whatever became of its trial.

    None where nothing was left, where it is another study's, or where memory ran out as another
    process had it.

    Args:
        file: of the study's directory.
        definition: of the study.
        study: its identity.
        known: every finished trial of it.
    """
    left = file.read()
    if left is None or left.attempt.study != study:
        return None
    if isinstance(left.outcome, OutOfMemory) and NEIGHBOUR in left.outcome.flags:
        return None
    of = left.attempt
    trial = RunningTrial(
        of.number, left.config, of.started_at, of.purpose, of.confirms, of.series, of.id
    )
    outcome = held_to_budget(left.outcome, budget_bytes=definition.target.budget_bytes)
    return ended_unseen(trial, left.config, outcome, definition=definition, known=known)


def attempts(records: Iterable[TrialRecord], config: TrialConfig, *, since: int = 0) -> int:
    """Return how often ``config`` was tried and came to nothing that says something about it.

    What somebody interrupted is no attempt, however often that happens.

    Args:
        records: of one study.
        config: what was tried.
        since: number of the first trial that counts. A crash before it may have had a cause that
            is gone by now; a trial that its driver did not outlive counts for ever, or a
            configuration that brings the machine down would be the first thing every time.
    """
    return sum(
        record.verdict in RETRYABLE
        and not record.is_interrupted
        and record.config == config
        and (record.number >= since or _took_its_driver_along(record))
        for record in records
    )


def _took_its_driver_along(record: TrialRecord) -> bool:
    """Whether nobody was left to say how long a trial had run."""
    return record.verdict is Verdict.LOST and record.device_seconds == 0.0


def is_kept(record: TrialRecord) -> bool:
    """Whether its result is known and on disk, so that running it again would be in vain."""
    return isinstance(record.outcome, Lost) and record.outcome.is_kept


def next_number(records: Iterable[TrialRecord]) -> int:
    """Return the least number that the next trial can have: where a run of the driver begins."""
    return max((record.number + 1 for record in records), default=0)
