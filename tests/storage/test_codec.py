from __future__ import annotations

import json
import math

import pytest
from optuna.trial import TrialState

from search_spaces.gpus import GIB
from search_spaces.space import Objective
from storage.codec import (
    FAULT_VIOLATION,
    LEAST_VIOLATION,
    OptunaResult,
    directions,
    to_optuna,
)
from storage.records import (
    Crashed,
    Diverged,
    DominatedOutOfMemory,
    Ineffective,
    Invalid,
    Lost,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
    PrunedSlow,
    TimedOut,
    TrialRecord,
)
from tests.storage.builders import BUDGET, a_measurement, a_record, fits

ALL: tuple[Objective, ...] = ("tokens_per_second", "peak_memory", "trainable_parameters")
SINGLE: tuple[Objective, ...] = ("tokens_per_second",)
PREDICTION = PredictionRecord(peak_allocated_bytes=30 * GIB, peak_reserved_bytes=31 * GIB)


def optuna_result(record: TrialRecord, *, objectives: tuple[Objective, ...]) -> OptunaResult:
    return to_optuna(record, objectives=objectives, budget_bytes=BUDGET)


UNFIT: list[tuple[Outcome, float, float]] = [
    # outcome, peak in GiB that it is told with, violation
    (OutOfMemory(stage="forward"), 20.0, LEAST_VIOLATION),
    (OutOfMemory(stage="forward", peak_allocated_bytes=19 * GIB), 20.0, LEAST_VIOLATION),
    # The peak and the failed request need not have been there at once: their sum bounds nothing.
    (
        OutOfMemory(stage="forward", peak_allocated_bytes=19 * GIB, requested_bytes=6 * GIB),
        20.0,
        LEAST_VIOLATION,
    ),
    (OutOfMemory(stage="forward", peak_allocated_bytes=25 * GIB), 25.0, 0.25),
    (PredictedOutOfMemory(predicted_bytes=40 * GIB), 40.0, 1.0),
    (DominatedOutOfMemory(by=3), 20.0, LEAST_VIOLATION),
    (Diverged(step=1), 20.0, FAULT_VIOLATION),
    (Invalid(rule="r"), 20.0, FAULT_VIOLATION),
    (Ineffective(knob="compile"), 20.0, FAULT_VIOLATION),
]


def test_a_trial_that_fits_is_told_with_what_was_measured_and_is_feasible() -> None:
    told = optuna_result(a_record(outcome=fits(1234.5, peak=15 * GIB)), objectives=ALL)
    assert told.state is TrialState.COMPLETE
    assert told.values == (1234.5, 15.0, 1000.0)
    assert told.violation == -0.25


@pytest.mark.parametrize(("outcome", "peak", "violation"), UNFIT)
def test_a_trial_that_does_not_count_is_told_with_the_worst_finite_values(
    outcome: Outcome, peak: float, violation: float
) -> None:
    told = optuna_result(a_record(outcome=outcome), objectives=ALL)
    assert told.state is TrialState.COMPLETE
    assert told.values == (0.0, peak, 0.0)
    assert told.violation == violation
    assert told.violation > 0


@pytest.mark.parametrize("outcome", [OutOfMemory(stage="load"), DominatedOutOfMemory(by=1)])
def test_where_memory_was_predicted_the_violation_grows_with_it(outcome: Outcome) -> None:
    told = optuna_result(a_record(outcome=outcome, prediction=PREDICTION), objectives=SINGLE)
    assert told.violation == 0.5


def test_a_slow_trial_is_pruned_where_there_is_one_objective() -> None:
    told = optuna_result(
        a_record(outcome=PrunedSlow(measurement=a_measurement(500.0))), objectives=SINGLE
    )
    assert (told.state, told.values) == (TrialState.PRUNED, None)
    assert told.intermediate == (6, 500.0)
    assert told.violation <= 0


def test_a_slow_trial_is_complete_with_partial_values_where_there_are_several() -> None:
    outcome = PrunedSlow(measurement=a_measurement(500.0))
    told = optuna_result(a_record(outcome=outcome), objectives=ALL)
    assert told.state is TrialState.COMPLETE
    assert told.values == (500.0, 10.0, 1000.0)
    assert told.intermediate is None


@pytest.mark.parametrize("outcome", [TimedOut(phase="build"), Crashed(phase="build"), Lost()])
def test_a_trial_that_may_be_retried_is_failed(outcome: Outcome) -> None:
    told = optuna_result(a_record(outcome=outcome), objectives=ALL)
    assert (told.state, told.values) == (TrialState.FAIL, None)
    assert told.violation > 0


def test_speed_and_capacity_are_maximized_and_memory_minimized() -> None:
    assert directions(ALL) == ["maximize", "minimize", "maximize"]


@pytest.mark.parametrize("outcome", [fits(), *(row[0] for row in UNFIT), Lost()])
def test_what_a_person_sees_in_the_dashboard_is_short_and_the_record_is_whole(
    outcome: Outcome,
) -> None:
    record = a_record(7, outcome, is_baseline=True, prediction=PREDICTION)
    attributes = json.loads(json.dumps(optuna_result(record, objectives=SINGLE).attributes))
    assert TrialRecord.model_validate(attributes["record"]) == record
    assert attributes["verdict"] == record.verdict
    assert attributes.get("peak_gib") == (10.0 if record.measurement else None)
    assert all(math.isfinite(v) for v in attributes.values() if isinstance(v, float))
