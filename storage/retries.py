"""Owns which configurations deserve another try, read from the records alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from search_spaces.config import TrialConfig
from storage.records import RETRYABLE, TrialRecord

MAX_ATTEMPTS = 3
"""The first try and two more."""


def attempts(records: Iterable[TrialRecord], config: TrialConfig) -> int:
    """Return how often ``config`` was tried and came to nothing that says something about it."""
    return sum(record.verdict in RETRYABLE and record.config == config for record in records)


def to_retry(records: Iterable[TrialRecord]) -> tuple[TrialConfig, ...]:
    """Return what was lost, crashed or timed out fewer than three times and never settled.

    In the order in which they were first tried.
    """
    known = tuple(records)
    settled = {record.config.key() for record in known if record.verdict not in RETRYABLE}
    open_configs = {
        record.config.key(): record.config for record in known if record.config.key() not in settled
    }
    return tuple(
        config for config in open_configs.values() if attempts(known, config) < MAX_ATTEMPTS
    )
