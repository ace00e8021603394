from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, SweepError
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.rules import Violation
from qlora_sweep.storage.records import (
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
from qlora_sweep.sweep.predict.forecast import Forecaster
from qlora_sweep.sweep.predict.memory.prediction import WholeMemory
from qlora_sweep.sweep.predict.memory.predictor import (
    Fit,
    MemoryPrediction,
    MemoryPredictor,
    Residuals,
)
from qlora_sweep.sweep.predict.memory.profiles import Untraceable
from tests.sweep.imagined_memory import imagined, one_by_one
from tests.sweep.simulated_device import a_measurement, a_record
from tests.sweep.study import driven

BUDGET = 20 * GIB
EAGER, COMPILED = 0.02, 0.1


class TenthOfAGibibyte(MemoryPredictor):
    """Predicts a tenth of a gibibyte for each sequence of the micro-batch."""

    def __init__(self) -> None:
        self.asked: list[TrialConfig] = []

    def predict_all(self, configs: Sequence[TrialConfig], **_: Any) -> WholeMemory:
        return WholeMemory(configs, one_by_one(self.predict, configs))

    def predict(self, config: TrialConfig) -> MemoryPrediction:
        self.asked.append(config)
        uncertainty = COMPILED if config.compile else EAGER
        return imagined(config.micro_batch_size * GIB // 10, uncertainty=uncertainty)


def a_forecaster(**changes: Any) -> Forecaster:
    return driven.a_forecaster(**({"budget_bytes": BUDGET} | changes))


def batch(size: int, **changes: Any) -> TrialConfig:
    return TrialConfig(micro_batch_size=size, **changes)


def measured_at(share: float, *, compile: bool = False) -> TrialRecord:
    """A trial whose peak was ``share`` of what was predicted."""
    config, peak = batch(4, compile=compile), 10 * GIB
    measurement = a_measurement(config, peak_allocated_bytes=int(share * peak))
    known = PredictionRecord(peak_allocated_bytes=peak, peak_reserved_bytes=peak)
    return a_record(config, Measured(measurement=measurement), prediction=known)


def test_memory_that_nothing_predicts_is_left_to_the_device() -> None:
    forecast = a_forecaster().expect(batch(1000))
    assert (forecast.violation, forecast.memory, forecast.record) == (None, None, None)
    assert forecast.refusal is None


def test_what_a_rule_forbids_is_invalid_and_nothing_is_predicted_of_it() -> None:
    # To trace a step takes seconds, and this one would never run.
    predictor, old = TenthOfAGibibyte(), Violation("bf16-needs-ampere", "too old")
    expected = a_forecaster(predictor=predictor, violation=lambda _: old).expect(batch(1))
    assert expected.refusal == Invalid(rule="bf16-needs-ampere", detail="too old")
    assert (expected.record, expected.is_refused) == (None, True)
    assert predictor.asked == []


def test_a_configuration_that_ran_out_of_memory_is_never_launched_again() -> None:
    forecaster = a_forecaster()
    ran_out = OutOfMemory(stage="backward")
    forecaster.learn(a_record(batch(8), ran_out, number=7))
    assert forecaster.expect(batch(8)).refusal == DominatedOutOfMemory(by=7)
    assert forecaster.expect(batch(9)).refusal == DominatedOutOfMemory(by=7)
    assert forecaster.expect(batch(7)).refusal is None


@pytest.mark.parametrize(
    "outcome",
    [
        PredictedOutOfMemory(predicted_bytes=1),
        DominatedOutOfMemory(by=1),
        Crashed(phase="measure"),
    ],
)
def test_only_memory_that_really_ran_out_dominates(outcome: Outcome) -> None:
    forecaster = a_forecaster()
    forecaster.learn(a_record(batch(8), outcome))
    assert forecaster.expect(batch(8)).refusal is None


def test_a_base_that_could_not_be_loaded_rules_out_everything_on_it() -> None:
    forecaster = a_forecaster()
    forecaster.learn(a_record(batch(8, lora_rank=64), OutOfMemory(stage="load"), number=3))
    assert forecaster.expect(batch(1, lora_rank=1)).refusal == DominatedOutOfMemory(by=3)
    assert forecaster.expect(batch(1, quantization="none")).refusal is None


def test_what_cannot_fit_is_refused_with_its_prediction_and_how_sure_that_is() -> None:
    refusal = a_forecaster(predictor=TenthOfAGibibyte()).expect(batch(300)).refusal
    assert isinstance(refusal, PredictedOutOfMemory)
    assert refusal.predicted_bytes == 30 * GIB
    assert "within 2 %" in refusal.detail


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_is_refused_is_what_a_plan_says_does_not_fit(is_compiled: bool) -> None:
    """What is too close to say is left to the device."""
    predictor, found = TenthOfAGibibyte(), set[Fit]()
    forecaster = a_forecaster(predictor=predictor)
    for size in range(150, 260, 2):
        config = batch(size, compile=is_compiled)
        fit, expected = predictor.predict(config).fits(BUDGET), forecaster.expect(config)
        found.add(fit)
        assert expected.is_refused is (expected.refusal is not None) is (fit is Fit.NO)
    assert found == set(Fit)


def test_trials_that_confirm_the_prediction_do_not_make_it_surer_than_it_says() -> None:
    forecaster = a_forecaster(predictor=TenthOfAGibibyte())
    forecaster.learn_all([measured_at(1.0)] * 50)
    assert forecaster.expect(batch(204)).refusal is None


@pytest.mark.parametrize("share", [0.7, 1.3])
def test_a_trial_off_its_prediction_makes_the_others_less_sure(share: float) -> None:
    forecaster = a_forecaster(predictor=TenthOfAGibibyte())
    assert forecaster.expect(batch(280)).refusal is not None
    forecaster.learn_all([measured_at(1.0)] * 5 + [measured_at(share)])
    assert forecaster.expect(batch(280)).refusal is None
    assert forecaster.expect(batch(300)).refusal is not None


def test_how_sure_a_prediction_is_does_not_depend_on_when_it_was_asked_for() -> None:
    forecaster = a_forecaster(predictor=TenthOfAGibibyte())
    early, late = batch(100), batch(101)
    for share in (1.05, 1.0599):
        forecaster.expect(early).refusal  # noqa: B018 - asked for before the next trial is learned
        forecaster.learn(measured_at(share))
    sure = [forecaster.expect(config).memory for config in (early, late)]
    assert sure[0].uncertainty == sure[1].uncertainty > 0.06


def test_compiled_and_eager_trials_are_calibrated_apart() -> None:
    forecaster = a_forecaster(predictor=TenthOfAGibibyte())
    forecaster.learn_all([measured_at(0.6, compile=True)] * 5)
    assert forecaster.expect(batch(320)).refusal is not None
    assert forecaster.expect(batch(320, compile=True)).refusal is None


class Faulty(TenthOfAGibibyte):
    """Fails as it is told to, by the configuration's kernels."""

    def __init__(self, **faults: list[Exception]) -> None:
        super().__init__()
        self._faults = faults

    def predict(self, config: TrialConfig) -> MemoryPrediction:
        prediction = super().predict(config)
        faults = self._faults.get(config.kernels, [])
        if faults:
            raise faults.pop(0) if len(faults) > 1 else faults[0]
        return prediction


@pytest.mark.parametrize("kind", [InputError, Untraceable, EnvironmentFault])
def test_what_cannot_be_predicted_is_told_once(kind: type[SweepError]) -> None:
    warnings: list[str] = []
    reasons = {"liger": [kind("module 'mamba'")], "fused-loss": [Untraceable("data decides")]}
    forecaster = a_forecaster(predictor=Faulty(**reasons), warn=warnings.append)
    for size in (300, 400, 500):
        for kernels in reasons:
            expected = forecaster.expect(batch(size, kernels=kernels))
            assert (expected.refusal, expected.is_refused, expected.record) == (None, False, None)
        assert forecaster.expect(batch(size)).refusal is not None
    assert [warning.rpartition(": ")[2] for warning in warnings] == [
        "module 'mamba'",
        "data decides",
    ]


class Constant:
    """Expects as many tokens/s as trials were seen."""

    def __init__(self) -> None:
        self.seen = 0

    def predict(self, config: TrialConfig) -> float | None:
        return float(self.seen) if config.kernels == "hf" else None

    def learn(self, record: TrialRecord) -> None:
        self.seen += 1


def test_what_is_expected_is_in_the_record() -> None:
    forecaster = a_forecaster(predictor=TenthOfAGibibyte(), speed=Constant())
    forecaster.learn_all([measured_at(1.0)] * 3)
    known, unknown = (forecaster.expect(batch(30, kernels=k)).record for k in ("hf", "liger"))
    assert known.peak_allocated_bytes == 3 * GIB
    assert known.peak_reserved_bytes > known.peak_allocated_bytes
    assert (known.tokens_per_second, unknown.tokens_per_second) == (3.0, None)


def widened(prediction: MemoryPrediction, residuals: Residuals) -> MemoryPrediction:
    (error,) = residuals.widest(np.array([prediction.uncertainty]), [batch(4)])
    return prediction.widened(float(error))


@given(st.lists(st.floats(0.1, 5.0), min_size=1))
def test_no_trial_that_was_seen_would_be_called_impossible(shares: list[float]) -> None:
    residuals = Residuals(measured_at(share) for share in shares)
    prediction = widened(imagined(10 * GIB, uncertainty=EAGER), residuals)
    for share in shares:
        assert prediction.fits(int(share * 10 * GIB)) is not Fit.NO
