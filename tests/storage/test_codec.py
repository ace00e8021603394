from __future__ import annotations

import json
import math
import platform
from importlib import metadata

import pytest
from optuna.trial import TrialState

from search_spaces.config import CONFIG_KEYS, TrialConfig
from search_spaces.gpus import GIB
from search_spaces.space import Objective
from storage.codec import (
    FAULT_VIOLATION,
    LEAST_VIOLATION,
    OptunaResult,
    directions,
    to_optuna,
)
from storage.definition import differences
from storage.environment import PACKAGES, fingerprint
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
from tests.storage.builders import BUDGET, a_definition, a_measurement, a_record, fits

ALL: tuple[Objective, ...] = ("tokens_per_second", "peak_memory", "trainable_parameters")
SINGLE: tuple[Objective, ...] = ("tokens_per_second",)
PREDICTION = PredictionRecord(peak_allocated_bytes=30 * GIB, peak_reserved_bytes=31 * GIB)


def optuna_result(record: TrialRecord, *, objectives: tuple[Objective, ...]) -> OptunaResult:
    return to_optuna(record, objectives=objectives, budget_bytes=BUDGET)


def ran_out(peak_gib: int | None = None) -> OutOfMemory:
    peak = None if peak_gib is None else peak_gib * GIB
    # The peak and the failed request need not have been there at once: their sum bounds nothing.
    return OutOfMemory(stage="forward", peak_allocated_bytes=peak, requested_bytes=6 * GIB)


UNFIT: list[tuple[Outcome, float, float]] = [
    # outcome, peak in GiB that it is told with, violation
    (ran_out(), 20.0, LEAST_VIOLATION),
    (ran_out(19), 20.0, LEAST_VIOLATION),
    (ran_out(25), 25.0, 0.25),
    (PredictedOutOfMemory(predicted_bytes=40 * GIB), 40.0, 1.0),
    (DominatedOutOfMemory(by=3), 20.0, LEAST_VIOLATION),
    (Diverged(step=1), 20.0, FAULT_VIOLATION),
    (Invalid(rule="r"), 20.0, FAULT_VIOLATION),
    (Ineffective(knob="compile"), 20.0, FAULT_VIOLATION),
]


@pytest.mark.parametrize(
    ("outcome", "values", "violation"),
    [
        (fits(1234.5, peak=15 * GIB), (1234.5, 15.0, 1000.0), -0.25),
        (PrunedSlow(measurement=a_measurement(500.0)), (500.0, 10.0, 1000.0), -0.5),
        # What does not count is told with the worst finite values.
        *((outcome, (0.0, peak, 0.0), violation) for outcome, peak, violation in UNFIT),
    ],
)
def test_a_trial_of_several_objectives_is_told_with_all_of_them(
    outcome: Outcome, values: tuple[float, ...], violation: float
) -> None:
    told = optuna_result(a_record(outcome=outcome), objectives=ALL)
    assert (told.state, told.values, told.violation) == (TrialState.COMPLETE, values, violation)
    assert told.intermediate is None
    assert directions(ALL) == ["maximize", "minimize", "maximize"]
    if isinstance(outcome, OutOfMemory | DominatedOutOfMemory):
        # Where memory was predicted the violation grows with it.
        predicted = a_record(outcome=outcome, prediction=PREDICTION)
        assert optuna_result(predicted, objectives=SINGLE).violation == 0.5


def test_a_slow_trial_is_pruned_where_there_is_one_objective() -> None:
    told = optuna_result(
        a_record(outcome=PrunedSlow(measurement=a_measurement(500.0))), objectives=SINGLE
    )
    assert (told.state, told.values) == (TrialState.PRUNED, None)
    assert told.intermediate == (6, 500.0)
    assert told.violation <= 0


@pytest.mark.parametrize("outcome", [TimedOut(phase="build"), Crashed(phase="build"), Lost()])
def test_a_trial_that_may_be_retried_is_failed(outcome: Outcome) -> None:
    told = optuna_result(a_record(outcome=outcome), objectives=ALL)
    assert (told.state, told.values) == (TrialState.FAIL, None)
    assert told.violation > 0


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


# What a study is about, and where it ran


@pytest.mark.parametrize("key", sorted(set(CONFIG_KEYS) - {"micro_batch_size"}))
def test_a_setting_that_is_written_out_with_the_recipes_value_is_no_difference(key: str) -> None:
    recipe = TrialConfig().model_dump(mode="json")
    left_out, written = a_definition(), a_definition(fixed={key: recipe[key]})
    assert differences(left_out, written) == differences(written, left_out) == ()
    other = a_definition(fixed={"adapter_dtype": "bf16"})
    assert differences(left_out, other) == ('fixed.adapter_dtype: "fp32" -> "bf16"',)


def test_a_fingerprint_is_plain_json_with_a_version_for_every_package() -> None:
    found = fingerprint(device="cpu")
    assert json.loads(json.dumps(found)) == found
    assert set(found["versions"]) == set(PACKAGES)
    assert found["versions"]["optuna"] == metadata.version("optuna")
    assert found["python"] == platform.python_version()
    assert (found["cores"] >= 1, bool(found["cpu"])) == (True, True)
    assert (found["gpu"], found["driver"], found["cuda_driver"]) == (None, None, None)
    known = fingerprint(device="cuda", gpu="NVIDIA GB10", driver="580.1")
    assert (known["gpu"], known["driver"], known["cuda_driver"]) == ("NVIDIA GB10", "580.1", None)
