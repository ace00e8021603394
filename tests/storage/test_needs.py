"""What ran out of memory needs more than the budget: one number for each trial, a lower bound."""

from __future__ import annotations

import pytest

from search_spaces.gpus import GIB
from storage.records import (
    Crashed,
    DominatedOutOfMemory,
    Need,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
    need_of,
    predicted_need,
)
from tests.storage.builders import BUDGET, a_record, fits


def predicted(gib: float | None) -> PredictionRecord | None:
    if gib is None:
        return None
    return PredictionRecord(peak_allocated_bytes=int(gib * GIB), peak_reserved_bytes=0)


@pytest.mark.parametrize(
    ("outcome", "prediction", "expected"),
    [
        (OutOfMemory(stage="load"), None, (20, False)),
        (OutOfMemory(stage="load", requested_bytes=GIB), None, (20, False)),
        # Below the budget is where it was, not what it needs.
        (
            OutOfMemory(stage="forward", peak_allocated_bytes=15 * GIB, requested_bytes=GIB),
            None,
            (20, False),
        ),
        (OutOfMemory(stage="forward", peak_allocated_bytes=22 * GIB), None, (22, False)),
        (OutOfMemory(stage="forward", peak_allocated_bytes=19 * GIB), 23, (23, True)),
        (OutOfMemory(stage="forward", peak_allocated_bytes=19 * GIB), 18, (20, False)),
        (OutOfMemory(stage="forward", peak_allocated_bytes=24 * GIB), 23, (24, False)),
        (DominatedOutOfMemory(by=0), None, (20, False)),
        (DominatedOutOfMemory(by=0), 30, (30, True)),
        (DominatedOutOfMemory(by=0), 19, (20, False)),
    ],
)
def test_what_ran_out_needs_at_least_the_budget_what_was_seen_and_what_was_predicted(
    outcome: Outcome, prediction: float | None, expected: tuple[int, bool]
) -> None:
    gib, is_predicted = expected
    record = a_record(0, outcome, prediction=predicted(prediction))
    assert need_of(record, budget_bytes=BUDGET) == Need(
        gib * GIB, is_lower_bound=True, is_predicted=is_predicted
    )


def test_what_was_never_launched_has_a_prediction_and_no_bound() -> None:
    record = a_record(0, PredictedOutOfMemory(predicted_bytes=25 * GIB))
    expected = Need(25 * GIB, is_lower_bound=False, is_predicted=True)
    assert need_of(record, budget_bytes=BUDGET) == expected
    assert predicted_need(record) == 25 * GIB


@pytest.mark.parametrize("outcome", [fits(), Crashed(phase="build")])
def test_what_did_not_run_out_has_no_need(outcome: Outcome) -> None:
    record = a_record(0, outcome, prediction=predicted(30))
    assert need_of(record, budget_bytes=BUDGET) is None
