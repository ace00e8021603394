from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GIB
from search_spaces.rules import Violation
from storage.records import (
    Crashed,
    DominatedOutOfMemory,
    Invalid,
    Measured,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
    TrialRecord,
)
from sweep.preflight import Calibration, Preflight
from tests.sweep.simulated_device import MODEL, a_measurement, a_record

BUDGET = 20 * GIB


@dataclass(frozen=True)
class Prediction:
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True)
class GibibytePerSequence:
    """Predicts one gibibyte for each sequence of the micro-batch."""

    def predict(self, config: TrialConfig) -> Prediction:
        return Prediction(config.micro_batch_size * GIB, 2 * config.micro_batch_size * GIB)


def allowed(_: TrialConfig) -> Violation | None:
    return None


def a_preflight(**changes: Any) -> Preflight:
    values: dict[str, Any] = {"model": MODEL, "budget_bytes": BUDGET, "violation": allowed}
    return Preflight(**(values | changes))


def batch(size: int, **changes: Any) -> TrialConfig:
    return TrialConfig(micro_batch_size=size, **changes)


def measured_at(share: float, *, compile: bool = False) -> TrialRecord:
    """A trial whose peak was ``share`` of what was predicted."""
    config = batch(4, compile=compile)
    predicted = 10 * GIB
    measurement = a_measurement(config, peak_allocated_bytes=int(share * predicted))
    return a_record(
        config,
        Measured(measurement=measurement),
        prediction=PredictionRecord(peak_allocated_bytes=predicted, peak_reserved_bytes=predicted),
    )


def test_what_a_rule_forbids_is_invalid_under_that_rule() -> None:
    preflight = a_preflight(violation=lambda _: Violation("bf16-needs-ampere", "too old"))
    assert preflight.check(batch(1)) == Invalid(rule="bf16-needs-ampere", detail="too old")


def test_without_any_knowledge_the_device_decides() -> None:
    assert a_preflight().check(batch(1000)) is None


def test_a_configuration_that_ran_out_of_memory_is_never_launched_again() -> None:
    preflight = a_preflight()
    ran_out = OutOfMemory(stage="backward")
    preflight.learn(a_record(batch(8), ran_out, number=7))
    assert preflight.check(batch(8)) == DominatedOutOfMemory(by=7)
    assert preflight.check(batch(9)) == DominatedOutOfMemory(by=7)
    assert preflight.check(batch(7)) is None


@pytest.mark.parametrize(
    "outcome",
    [
        PredictedOutOfMemory(predicted_bytes=1),
        DominatedOutOfMemory(by=1),
        Crashed(phase="measure"),
    ],
)
def test_only_memory_that_really_ran_out_dominates(outcome: Outcome) -> None:
    preflight = a_preflight()
    preflight.learn(a_record(batch(8), outcome))
    assert preflight.check(batch(8)) is None


def test_a_base_that_could_not_be_loaded_rules_out_everything_on_it() -> None:
    preflight = a_preflight()
    preflight.learn(a_record(batch(8, lora_rank=64), OutOfMemory(stage="load"), number=3))
    assert preflight.check(batch(1, lora_rank=1)) == DominatedOutOfMemory(by=3)
    assert preflight.check(batch(1, quantization="none")) is None


def test_what_cannot_fit_is_refused_with_its_prediction() -> None:
    preflight = a_preflight(predictor=GibibytePerSequence())
    assert preflight.check(batch(20)) is None
    match preflight.check(batch(30)):
        case PredictedOutOfMemory(predicted_bytes=predicted, detail=detail):
            assert predicted == 30 * GIB
            assert "5.0%" in detail
        case other:
            pytest.fail(f"{other} is no prediction")


def test_a_prediction_within_the_margin_is_left_to_the_device() -> None:
    preflight = a_preflight(predictor=GibibytePerSequence())
    assert preflight.check(batch(21)) is None
    assert preflight.check(batch(22)) is not None


def test_trials_that_confirm_the_prediction_narrow_the_margin() -> None:
    preflight = a_preflight(predictor=GibibytePerSequence())
    preflight.learn_all([measured_at(1.0)] * 5)
    assert preflight.check(batch(21)) is not None


def test_a_trial_below_its_prediction_widens_the_margin() -> None:
    preflight = a_preflight(predictor=GibibytePerSequence())
    preflight.learn_all([measured_at(1.0)] * 5 + [measured_at(0.7)])
    assert preflight.check(batch(28)) is None
    assert preflight.check(batch(30)) is not None


def test_compiled_and_eager_trials_are_calibrated_apart() -> None:
    preflight = a_preflight(predictor=GibibytePerSequence())
    preflight.learn_all([measured_at(0.6, compile=True)] * 5)
    assert preflight.check(batch(32)) is not None
    assert preflight.check(batch(32, compile=True)) is None


def test_compiled_layers_get_more_room_until_some_were_measured() -> None:
    preflight = a_preflight(predictor=GibibytePerSequence())
    assert preflight.check(batch(28, compile=True)) is None
    preflight.learn_all([measured_at(1.0, compile=True)] * 5)
    assert preflight.check(batch(28, compile=True)) is not None


def test_the_prediction_is_there_for_the_record() -> None:
    expected = PredictionRecord(peak_allocated_bytes=3 * GIB, peak_reserved_bytes=6 * GIB)
    assert a_preflight(predictor=GibibytePerSequence()).prediction(batch(3)) == expected
    assert a_preflight().prediction(batch(3)) is None


class Refusing:
    """Cannot predict this model."""

    def predict(self, config: TrialConfig) -> Prediction:
        raise InputError(f"module 'mamba' cannot be walked at rank {config.lora_rank}")


def test_a_model_that_cannot_be_predicted_is_left_to_the_device_with_one_warning() -> None:
    warnings: list[str] = []
    preflight = a_preflight(predictor=Refusing(), warn=warnings.append)
    assert preflight.check(batch(1000)) is None
    assert preflight.prediction(batch(1000)) is None
    assert len(warnings) == 1
    assert "module 'mamba'" in warnings[0]


class Constant:
    """Expects as many tokens/s as trials were seen."""

    def __init__(self) -> None:
        self.seen = 0

    def predict(self, config: TrialConfig) -> float | None:
        return float(self.seen) if config.kernels == "hf" else None

    def learn(self, record: TrialRecord) -> None:
        self.seen += 1


def test_the_expected_speed_is_in_the_record_too() -> None:
    preflight = a_preflight(predictor=GibibytePerSequence(), speed=Constant())
    preflight.learn_all([measured_at(1.0)] * 3)
    known, unknown = (preflight.prediction(batch(1, kernels=k)) for k in ("hf", "liger"))
    assert known is not None
    assert known.tokens_per_second == 3.0
    assert unknown is not None
    assert unknown.tokens_per_second is None


@given(st.lists(st.floats(0.5, 1.5), min_size=1))
def test_no_trial_seen_so_far_would_have_been_refused_by_the_margin_it_leads_to(
    shares: list[float],
) -> None:
    calibration = Calibration()
    for share in shares:
        calibration.learn(predicted_bytes=10**9, measured_bytes=int(share * 10**9))
    for share in shares:
        budget = int(share * 10**9)
        assert 10**9 * (1 - calibration.margin) <= budget
