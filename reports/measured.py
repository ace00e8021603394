"""Owns which trials have numbers that may be drawn. Knows nothing of their use."""

from __future__ import annotations

from collections.abc import Iterable

from storage.ranking import rankable
from storage.records import Measurement, TrialRecord


def measured_trials(records: Iterable[TrialRecord]) -> tuple[tuple[TrialRecord, Measurement], ...]:
    """Return the rankable trials that were measured, also in part, each with its measurement."""
    return tuple((r, r.measurement) for r in rankable(records) if r.measurement is not None)
