"""What Optuna is told of a trial, what a study is about, and what its ledger says of all."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

import pytest
from optuna.trial import TrialState

from qlora_sweep.search_spaces.config import CONFIG_KEYS, TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.space import Objective
from qlora_sweep.storage.codec import (
    FAULT_VIOLATION,
    LEAST_VIOLATION,
    OptunaResult,
    to_optuna,
)
from qlora_sweep.storage.definition import differences
from qlora_sweep.storage.environment import PACKAGES, fingerprint
from qlora_sweep.storage.ledger import TrialLedger
from qlora_sweep.storage.records import (
    Crashed,
    Diverged,
    DominatedOutOfMemory,
    Lost,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
    PrunedSlow,
    RunKind,
    TimedOut,
)
from tests.storage.builders import BUDGET, a_definition, a_measurement, a_record, changed, fits

ALL: tuple[Objective, ...] = ("tokens_per_second", "peak_memory", "trainable_parameters")
SPEED = ALL[:1]
PREDICTION = PredictionRecord(peak_allocated_bytes=30 * GIB, peak_reserved_bytes=31 * GIB)


def told(outcome: Outcome, objectives: tuple[Objective, ...], **changes: Any) -> OptunaResult:
    record = a_record(outcome=outcome, **changes)
    return to_optuna(record, objectives=objectives, budget_bytes=BUDGET)


def ran_out(peak_gib: int) -> OutOfMemory:
    # The peak and the failed request need not have been there at once: their sum bounds nothing.
    return OutOfMemory(
        stage="forward", peak_allocated_bytes=peak_gib * GIB, requested_bytes=6 * GIB
    )


@pytest.mark.parametrize(
    ("outcome", "values", "violation"),
    [
        (fits(1234.5, peak=15 * GIB), (1234.5, 15.0, 1000.0), -0.25),
        (PrunedSlow(measurement=a_measurement(500.0)), (500.0, 10.0, 1000.0), -0.5),
        # A trial that does not count is told with the worst finite values.
        (ran_out(19), (0.0, 20.0, 0.0), LEAST_VIOLATION),
        (ran_out(25), (0.0, 25.0, 0.0), 0.25),
        (PredictedOutOfMemory(predicted_bytes=40 * GIB), (0.0, 40.0, 0.0), 1.0),
        (DominatedOutOfMemory(by=3), (0.0, 20.0, 0.0), LEAST_VIOLATION),
        (Diverged(step=1), (0.0, 20.0, 0.0), FAULT_VIOLATION),
    ],
)
def test_a_trial_is_told_with_every_objective_and_how_far_it_is_from_fitting(
    outcome: Outcome, values: tuple[float, ...], violation: float
) -> None:
    found = told(outcome, ALL)
    assert found.state is TrialState.COMPLETE
    assert found.values == values
    assert found.violation == violation


def test_the_violation_of_a_trial_out_of_memory_grows_with_its_predicted_memory() -> None:
    for outcome in (ran_out(19), DominatedOutOfMemory(by=3)):
        assert told(outcome, SPEED, prediction=PREDICTION).violation == 0.5


def test_a_slow_trial_is_pruned_where_there_is_one_objective() -> None:
    found = told(PrunedSlow(measurement=a_measurement(500.0)), SPEED)
    assert found.state is TrialState.PRUNED
    assert found.values is None
    assert found.intermediate == (6, 500.0)
    assert found.violation <= 0


def test_a_trial_that_may_be_retried_is_failed() -> None:
    for outcome in (TimedOut(phase="build"), Crashed(phase="build"), Lost()):
        found = told(outcome, ALL)
        assert found.state is TrialState.FAIL
        assert found.values is None
        assert found.violation > 0


# What a study is about, and where it ran


def test_a_setting_that_is_written_out_with_the_baselines_value_is_no_difference() -> None:
    baseline = TrialConfig().model_dump(mode="json")
    left_out = a_definition()
    for key in set(CONFIG_KEYS) - {"micro_batch_size"}:
        written = a_definition(fixed={key: baseline[key]})
        assert differences(left_out, written) == differences(written, left_out) == (), key
    other = a_definition(fixed={"adapter_dtype": "bf16"})
    assert differences(left_out, other) == ('fixed.adapter_dtype: "fp32" -> "bf16"',)


def test_a_fingerprint_is_plain_json_with_a_version_for_every_package() -> None:
    found = fingerprint(device="cuda", gpu="NVIDIA GB10", driver="580.1")
    assert json.loads(json.dumps(found)) == found
    assert set(found["versions"]) == set(PACKAGES)
    assert found["versions"]["optuna"] == metadata.version("optuna")
    assert (found["gpu"], found["driver"], found["cuda_driver"]) == ("NVIDIA GB10", "580.1", None)


# The ledger


CRASH: Outcome = Crashed(phase="build")
INTERRUPTED: Outcome = Lost(detail="somebody asked", is_interrupted=True)


def test_a_ledger_counts_a_late_or_repeated_record_once() -> None:
    late = a_record(0, fits(), batch=1)
    again = a_record(2, batch=1, purpose="confirm", series=1)
    ledger = TrialLedger([changed(late, outcome=CRASH), a_record(1, CRASH, batch=2)])
    assert len(ledger.to_retry()) == 2
    for record in (late, again, again):
        ledger.add(record)
    assert ledger.records == (late, a_record(1, CRASH, batch=2))
    assert ledger.confirmations == (again,)
    assert [config.micro_batch_size for config in ledger.to_retry()] == [2]
    assert ledger.trials_spent() == 1
    assert ledger.next_number == 2
    assert late.config in ledger
    assert ledger.attempts(late.config, RunKind(purpose="confirm", series=1)) == 0


@pytest.mark.parametrize(
    ("outcomes", "is_retried", "spent"),
    [
        ([CRASH, TimedOut(phase="warmup")], True, 0),
        # One that fails to the last counts once.
        ([CRASH, CRASH, CRASH], False, 1),
        ([CRASH, fits()], False, 1),
        ([INTERRUPTED] * 20, True, 0),
        ([CRASH, INTERRUPTED, CRASH, INTERRUPTED, CRASH], False, 1),
    ],
)
def test_a_failed_configuration_is_tried_three_times_at_most(
    outcomes: list[Outcome], is_retried: bool, spent: int
) -> None:
    ledger = TrialLedger([a_record(number, outcome) for number, outcome in enumerate(outcomes)])
    assert bool(ledger.to_retry()) is is_retried
    assert ledger.trials_spent() == spent


@pytest.mark.parametrize(
    ("outcome", "seconds", "is_retried"),
    [(CRASH, 1.0, True), (Lost(), 1.0, True), (Lost(), 0.0, False), (fits(), 1.0, False)],
    ids=["crashed", "lost", "took its driver along", "settled"],
)
def test_a_new_run_retries_what_failed_in_the_last(
    outcome: Outcome, seconds: float, is_retried: bool
) -> None:
    ledger = TrialLedger([a_record(n, outcome, device_seconds=seconds) for n in range(3)])
    assert bool(ledger.to_retry(since=ledger.next_number)) is is_retried
    assert not ledger.to_retry()
