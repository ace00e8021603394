"""Owns which trials have numbers that may be ranked and drawn. Knows nothing of their use."""

from __future__ import annotations

import math
from collections.abc import Iterable

from storage.records import Measurement, TrialRecord


def rankable(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the trials less those whose measured speed or interval is not finite and positive.

    Such numbers come from a broken clock or a damaged record; nothing can be ranked by them.
    """
    return tuple(r for r in records if r.measurement is None or _is_sound(r.measurement))


def measured_trials(records: Iterable[TrialRecord]) -> tuple[tuple[TrialRecord, Measurement], ...]:
    """Return the rankable trials that were measured, also in part, each with its measurement."""
    return tuple((r, r.measurement) for r in rankable(records) if r.measurement is not None)


def _is_sound(measured: Measurement) -> bool:
    numbers = (measured.tokens_per_second, measured.step_seconds, *measured.step_seconds_ci95)
    return all(math.isfinite(number) and number > 0 for number in numbers)
