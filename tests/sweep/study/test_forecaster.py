from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, SweepError
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.storage.records import (
    Measured,
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
    predictor_here,
)
from qlora_sweep.sweep.predict.memory.profiles import Untraceable
from tests.families import spec_of
from tests.sweep.imagined_memory import imagined, one_by_one
from tests.sweep.planning.imagined import Picky
from tests.sweep.predict.forecasters import forecaster_on
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


@pytest.mark.parametrize("share", [0.7, 1.3])
def test_a_trial_off_its_prediction_makes_the_others_less_sure(share: float) -> None:
    forecaster = a_forecaster(predictor=TenthOfAGibibyte())
    assert forecaster.expect(batch(280)).refusal is not None
    forecaster.learn_all([measured_at(1.0)] * 5 + [measured_at(share)])
    assert forecaster.expect(batch(280)).refusal is None
    assert forecaster.expect(batch(300)).refusal is not None


def test_compiled_and_eager_trials_are_calibrated_apart() -> None:
    forecaster = a_forecaster(predictor=TenthOfAGibibyte())
    forecaster.learn_all([measured_at(0.6, compile=True)] * 5)
    assert forecaster.expect(batch(320)).refusal is not None
    assert forecaster.expect(batch(320, compile=True)).refusal is None


@pytest.mark.parametrize("kind", [InputError, Untraceable, EnvironmentFault])
def test_what_cannot_be_predicted_is_told_once(kind: type[SweepError]) -> None:
    warnings: list[str] = []
    predictor = Picky(liger=kind("module 'mamba'"))
    forecaster = a_forecaster(predictor=predictor, warn=warnings.append)
    for size in (300, 400):
        expected = forecaster.expect(batch(size, kernels="liger"))
        assert (expected.refusal, expected.is_refused, expected.record) == (None, False, None)
        assert forecaster.expect(batch(size)).refusal is not None
    (warning,) = warnings
    assert "module 'mamba'" in warning


def test_where_kernels_are_missing_neither_memory_nor_speed_is_predicted(tmp_path: Path) -> None:
    """A study's machine without the kernels of linear attention loops instead."""
    model = spec_of("qwen3_5_text")
    warnings: list[str] = []
    forecaster = forecaster_on(
        "h200",
        model,
        predictor=predictor_here(model, is_on_gpu=False, cache_dir=tmp_path),
        warn=warnings.append,
    )
    forecast = forecaster.expect(TrialConfig(seq_len=64))
    assert forecast.memory is None
    assert forecast.tokens_per_second is None
    assert "loop in plain PyTorch" in " ".join(warnings)
