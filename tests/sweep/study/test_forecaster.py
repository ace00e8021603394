from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault, InputError, SweepError
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
from sweep.predict.forecast import Forecaster
from sweep.predict.memory.prediction import WholeMemory
from sweep.predict.memory.predictor import Fit, MemoryPrediction, MemoryPredictor, Residuals
from sweep.predict.memory.profiles import Untraceable
from tests.sweep.imagined_memory import imagined, one_by_one
from tests.sweep.simulated_device import MODEL, a_measurement, a_record

BUDGET = 20 * GIB


EAGER, COMPILED = 0.02, 0.1


def predicted(peak_bytes: int, *, uncertainty: float = EAGER) -> MemoryPrediction:
    return imagined(peak_bytes, uncertainty=uncertainty)


class TenthOfAGibibyte(MemoryPredictor):
    """Predicts a tenth of a gibibyte for each sequence of the micro-batch."""

    def __init__(self) -> None:
        self.asked: list[TrialConfig] = []

    def predict_all(self, configs: Sequence[TrialConfig], **_: Any) -> WholeMemory:
        return WholeMemory(configs, one_by_one(self.predict, configs))

    def predict(self, config: TrialConfig) -> MemoryPrediction:
        self.asked.append(config)
        return predicted(
            config.micro_batch_size * GIB // 10, uncertainty=COMPILED if config.compile else EAGER
        )


def allowed(_: TrialConfig) -> Violation | None:
    return None


def a_forecaster(**changes: Any) -> Forecaster:
    values: dict[str, Any] = {"model": MODEL, "budget_bytes": BUDGET, "violation": allowed}
    return Forecaster(**(values | changes))


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


def test_memory_that_nothing_predicts_is_no_configuration_that_cannot_be_built() -> None:
    forecast = a_forecaster().expect(batch(1))
    assert (forecast.broken, forecast.memory, forecast.refusal) == (None, None, None)


def test_what_a_rule_forbids_is_invalid_under_that_rule() -> None:
    forecaster = a_forecaster(violation=lambda _: Violation("bf16-needs-ampere", "too old"))
    assert forecaster.expect(batch(1)).refusal == Invalid(
        rule="bf16-needs-ampere", detail="too old"
    )


def test_nothing_is_predicted_of_what_a_rule_forbids() -> None:
    # To trace a step takes seconds, and this one would never run.
    predictor = TenthOfAGibibyte()
    violation = Violation("bf16-needs-ampere", "too old")
    forecaster = a_forecaster(predictor=predictor, violation=lambda _: violation)
    expected = forecaster.expect(batch(1))
    assert (expected.record, expected.is_refused) == (None, True)
    assert predictor.asked == []


def test_without_any_knowledge_the_device_decides() -> None:
    assert a_forecaster().expect(batch(1000)).refusal is None


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
    forecaster = a_forecaster(predictor=TenthOfAGibibyte())
    assert forecaster.expect(batch(200)).refusal is None
    match forecaster.expect(batch(300)).refusal:
        case PredictedOutOfMemory(predicted_bytes=needed, detail=detail):
            assert needed == 30 * GIB
            assert "within 2 %" in detail
        case other:
            pytest.fail(f"{other} is no prediction")


@pytest.mark.parametrize("size", range(150, 260, 5))
@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_is_refused_is_what_a_plan_says_does_not_fit(size: int, is_compiled: bool) -> None:
    config, predictor = batch(size, compile=is_compiled), TenthOfAGibibyte()
    forecaster = a_forecaster(predictor=predictor)
    fit = predictor.predict(config).fits(BUDGET)
    expected = forecaster.expect(config)
    assert (expected.refusal is not None) is (fit is Fit.NO)
    assert expected.is_refused is (fit is Fit.NO)


def test_what_is_too_close_to_say_is_left_to_the_device() -> None:
    forecaster = a_forecaster(predictor=TenthOfAGibibyte())
    close = batch(204)
    assert TenthOfAGibibyte().predict(close).fits(BUDGET) is Fit.UNCERTAIN
    assert forecaster.expect(close).refusal is None
    assert forecaster.expect(batch(210)).refusal is not None


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
    assert sure[0] is not None
    assert sure[1] is not None
    assert sure[0].uncertainty == sure[1].uncertainty > 0.06


def test_compiled_and_eager_trials_are_calibrated_apart() -> None:
    forecaster = a_forecaster(predictor=TenthOfAGibibyte())
    forecaster.learn_all([measured_at(0.6, compile=True)] * 5)
    assert forecaster.expect(batch(320)).refusal is not None
    assert forecaster.expect(batch(320, compile=True)).refusal is None


def test_a_configuration_is_predicted_once_however_often_it_is_asked_about() -> None:
    predictor = TenthOfAGibibyte()
    forecaster = a_forecaster(predictor=predictor)
    for _ in range(3):
        expected = forecaster.expect(batch(204))
        assert (expected.is_refused, expected.refusal) == (False, None)
        assert expected.record is not None
    assert predictor.asked == [batch(204)]


def test_the_prediction_is_there_for_the_record() -> None:
    expected = PredictionRecord(
        peak_allocated_bytes=3 * GIB, peak_reserved_bytes=predicted(3 * GIB).peak_reserved_bytes
    )
    assert a_forecaster(predictor=TenthOfAGibibyte()).expect(batch(30)).record == expected
    assert a_forecaster().expect(batch(30)).record is None


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
def test_what_cannot_be_predicted_is_left_to_the_device_and_the_rest_is_predicted(
    kind: type[SweepError],
) -> None:
    warnings: list[str] = []
    predictor = Faulty(liger=[kind("module 'mamba' cannot be walked")])
    forecaster = a_forecaster(predictor=predictor, warn=warnings.append)
    for size in (300, 400, 500):
        assert forecaster.expect(batch(size, kernels="liger")).refusal is None
        assert not forecaster.expect(batch(size, kernels="liger")).is_refused
        assert forecaster.expect(batch(size, kernels="liger")).record is None
        assert forecaster.expect(batch(size)).refusal is not None
    assert len(warnings) == 1
    assert "module 'mamba'" in warnings[0]


def test_each_reason_why_something_is_not_predicted_is_told_once() -> None:
    warnings: list[str] = []
    faults = {"liger": [InputError("no module 'w'")], "hf": [Untraceable("data decides")]}
    forecaster = a_forecaster(predictor=Faulty(**faults), warn=warnings.append)
    for size in (1, 2, 3):
        for kernels in faults:
            assert forecaster.expect(batch(size, kernels=kernels)).refusal is None
    assert [warning.rpartition(": ")[2] for warning in warnings] == [
        "no module 'w'",
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


def test_the_expected_speed_is_in_the_record_too() -> None:
    forecaster = a_forecaster(predictor=TenthOfAGibibyte(), speed=Constant())
    forecaster.learn_all([measured_at(1.0)] * 3)
    known, unknown = (forecaster.expect(batch(1, kernels=k)).record for k in ("hf", "liger"))
    assert known is not None
    assert known.tokens_per_second == 3.0
    assert unknown is not None
    assert unknown.tokens_per_second is None


def widened(prediction: MemoryPrediction, residuals: Residuals) -> MemoryPrediction:
    (error,) = residuals.widest(np.array([prediction.uncertainty]), [batch(4)])
    return prediction.widened(float(error))


@given(st.lists(st.floats(0.1, 5.0), min_size=1))
def test_no_trial_seen_so_far_would_have_been_called_impossible_by_what_it_leads_to(
    shares: list[float],
) -> None:
    residuals = Residuals(measured_at(share) for share in shares)
    prediction = widened(predicted(10 * GIB), residuals)
    for share in shares:
        assert prediction.fits(int(share * 10 * GIB)) is not Fit.NO


def test_a_residual_within_what_is_stated_changes_nothing() -> None:
    prediction = predicted(10 * GIB)
    assert widened(prediction, Residuals([measured_at(0.985)])) is prediction
    wider = widened(prediction, Residuals([measured_at(0.9)]))
    assert wider == replace(prediction, uncertainty=pytest.approx(0.11))
