"""Owns how much memory a trial that did not fit is known or predicted to need. Pure.

One number for each trial, wherever it is shown. Knows nothing of words or of figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.records import (
    DominatedOutOfMemory,
    OutOfMemory,
    PredictedOutOfMemory,
    TrialRecord,
)


@dataclass(frozen=True)
class Need:
    """What a configuration that did not fit needs."""

    allocated_bytes: int
    is_lower_bound: bool
    """Whether it may need more: it ran out before its peak was seen, or is larger than one that
    did. Else it is a prediction, which may be off either way.
    """
    is_predicted: bool
    """Whether the number is the prediction's and not the budget's or the observed peak's."""


def need_of(record: TrialRecord, *, budget_bytes: int) -> Need | None:
    """Return what a trial that did not fit needs; None for every other.

    What ran out of memory needs more than the budget, whatever the allocation that happened to
    fail: the peak until then is a bound from below, and so is a prediction that is larger. The
    failed request is not added to the peak: the two need not have been there at once.
    """
    predicted = predicted_need(record)
    match record.outcome:
        case PredictedOutOfMemory(predicted_bytes=predicted_bytes):
            return Need(predicted_bytes, is_lower_bound=False, is_predicted=True)
        case OutOfMemory(peak_allocated_bytes=peak):
            seen = max(budget_bytes, peak or 0)
        case DominatedOutOfMemory():
            seen = budget_bytes
        case _:
            return None
    is_predicted = predicted is not None and predicted > seen
    return Need(max(seen, predicted or 0), is_lower_bound=True, is_predicted=is_predicted)


def predicted_need(record: TrialRecord) -> int | None:
    """Return the predicted peak of a trial; None where nothing predicted it."""
    if isinstance(record.outcome, PredictedOutOfMemory):
        return record.outcome.predicted_bytes
    return None if record.prediction is None else record.prediction.peak_allocated_bytes
