"""What is expected of configurations on texts: memory of the largest rows, speed of the mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB, find_gpu
from search_spaces.models import load_model_spec
from storage.records import Measured
from sweep.data.study_epochs import StudyEpochs
from sweep.predict.forecast import Forecaster, SpeedForecast
from sweep.predict.on_texts import ShapesOnTexts
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.simulated_device import a_measurement, a_record

MISTRAL, CARD = load_model_spec("mistral-7b-v0.3"), find_gpu("a10")
LENGTHS = np.clip(np.random.default_rng(0).lognormal(5.0, 0.8, 2_000).astype(int), 8, 700)


@pytest.fixture
def epochs() -> StudyEpochs:
    return StudyEpochs(LENGTHS, LENGTHS - 1, seed=0)


@pytest.fixture
def forecaster(epochs: StudyEpochs) -> Forecaster:
    return Forecaster(
        model=MISTRAL,
        budget_bytes=20 * GIB,
        violation=lambda _: None,
        predictor=ImaginedPredictor(),
        speed=SpeedForecast(model=MISTRAL, gpu=CARD, shapes=ShapesOnTexts(epochs)),
        shapes=ShapesOnTexts(epochs),
    )


def _config(**values: Any) -> TrialConfig:
    return TrialConfig(**{"seq_len": 1024, **values})


@pytest.mark.parametrize(
    ("values", "width"),
    [
        ({}, 700),
        ({"packing": "grouped"}, 700),
        ({"packing": "packed"}, 1024),
        ({"seq_len": 64}, 64),
    ],
)
def test_memory_is_that_of_the_longest_rows(
    forecaster: Forecaster, values: dict[str, Any], width: int
) -> None:
    record = forecaster.expect(_config(**values)).record
    assert record is not None
    full = ImaginedPredictor().predict(TrialConfig(seq_len=width))
    assert record.peak_allocated_bytes == full.peak_allocated_bytes


def test_one_by_one_and_together_are_the_same(forecaster: Forecaster) -> None:
    configs = [_config(packing=p) for p in ("none", "grouped", "packed")]
    whole = forecaster.forecast(configs)
    assert whole.peak_bytes is not None
    for config, peak in zip(configs, whole.peak_bytes, strict=True):
        record = forecaster.expect(config).record
        assert record is not None
        assert record.peak_allocated_bytes == peak


def test_speed_is_of_the_tokens_that_carry_loss(
    forecaster: Forecaster, epochs: StudyEpochs
) -> None:
    none, packed = (_config(packing=packing) for packing in ("none", "packed"))
    full = SpeedForecast(model=MISTRAL, gpu=CARD).predict(none)
    on_texts = {c.packing: forecaster.expect(c).record.tokens_per_second for c in (none, packed)}  # type: ignore[union-attr]
    waste = epochs.epoch(none).waste
    assert on_texts["none"] == pytest.approx(full * (1 - waste), rel=0.1)  # type: ignore[operator]
    assert on_texts["packed"] > on_texts["none"]


def test_physics_and_tokens_of_many_are_the_speeds_of_each(forecaster: Forecaster) -> None:
    configs = [_config(packing=p, effective_batch_size=8) for p in ("none", "grouped", "packed")]
    foreseen = forecaster.forecast(configs)
    assert foreseen.physics is not None
    assert foreseen.tokens_per_step is not None
    zeros = np.zeros(len(foreseen.physics.spread))
    seconds = np.exp(foreseen.physics.log_seconds(zeros, slice(None)))
    each = [forecaster.expect(c).record.tokens_per_second for c in configs]  # type: ignore[union-attr]
    # A mean shape is of whole tokens in width.
    assert foreseen.tokens_per_step / seconds == pytest.approx(each, rel=0.01)


def test_trials_on_texts_calibrate_by_what_they_computed(epochs: StudyEpochs) -> None:
    forecast = SpeedForecast(model=MISTRAL, gpu=CARD, shapes=ShapesOnTexts(epochs))
    configs = [_config(packing=p, lora_rank=r) for p in ("none", "grouped") for r in (8, 16, 32)]
    before = [forecast.predict(config) for config in configs]
    for config, speed in zip(configs, before, strict=True):
        assert speed is not None
        slower = ShapesOnTexts(epochs).loss_tokens_per_step(config) / speed * 1.2
        measured = a_measurement(config, step_seconds=slower)
        forecast.learn(a_record(config, Measured(measurement=measured)))
    after = [forecast.predict(config) for config in configs]
    assert after == pytest.approx([speed / 1.2 for speed in before if speed], rel=0.02)


def test_texts_that_make_no_micro_batch_are_refused_and_not_unpredicted(
    forecaster: Forecaster,
) -> None:
    too_large = _config(micro_batch_size=4096)
    assert forecaster.expect(too_large).is_refused
    assert forecaster.forecast([too_large]).tokens_per_step == pytest.approx([4096 * 1024])
