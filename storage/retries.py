"""Owns which configurations deserve another try, read from the records alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from search_spaces.config import TrialConfig
from storage.records import RETRYABLE, TrialRecord, Verdict

MAX_ATTEMPTS = 3
"""The first try and two more."""


def attempts(records: Iterable[TrialRecord], config: TrialConfig, *, since: int = 0) -> int:
    """Return how often ``config`` was tried and came to nothing that says something about it.

    Args:
        records: of one study.
        config: what was tried.
        since: number of the first trial that counts. A crash before it may have had a cause that
            is gone by now; a trial that its driver did not outlive counts for ever, or a
            configuration that brings the machine down would be the first thing every time.
    """
    return sum(
        record.verdict in RETRYABLE
        and record.config == config
        and (record.number >= since or _took_its_driver_along(record))
        for record in records
    )


def _took_its_driver_along(record: TrialRecord) -> bool:
    """Whether nobody was left to say how long a trial had run; an interrupted one's driver was."""
    return record.verdict is Verdict.LOST and record.device_seconds == 0.0


def to_retry(records: Iterable[TrialRecord], *, since: int = 0) -> tuple[TrialConfig, ...]:
    """Return what was lost, crashed or timed out fewer than three times and never settled.

    In the order in which they were first tried.

    Args:
        records: of one study.
        since: number of the first trial of this run: an earlier run's failures are tried anew.
    """
    known = tuple(records)
    settled = {record.config.key() for record in known if record.verdict not in RETRYABLE}
    open_configs = {
        record.config.key(): record.config for record in known if record.config.key() not in settled
    }
    return tuple(
        config
        for config in open_configs.values()
        if attempts(known, config, since=since) < MAX_ATTEMPTS
    )


def next_number(records: Iterable[TrialRecord]) -> int:
    """Return the least number that the next trial can have: where a run of the driver begins."""
    return max((record.number + 1 for record in records), default=0)
