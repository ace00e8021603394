"""Step times of many configurations at once: each is what it is alone, under any calibration."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import find_gpu
from search_spaces.models import ModelSpec, load_model_spec
from sweep.predict.speed.predictor import FACTORS, Calibration, StepTimes, calibrate, in_order
from tests.sweep.predict.mixed_space import mixed_configs
from tests.sweep.predict.predicted_steps import predict_step

MISTRAL = load_model_spec("mistral-7b-v0.3")
CALIBRATION = Calibration("a10", 7, {f: 0.7 + 0.1 * i for i, f in enumerate(FACTORS)}, 0.02)


@pytest.mark.parametrize(
    ("gpu", "model", "calibration"),
    [
        ("a10", "mistral-7b-v0.3", None),
        ("t4", "qwen3-8b", CALIBRATION),
        ("rtx-4090", "mistral-7b-v0.3", CALIBRATION),
    ],
)
def test_each_of_many_configurations_takes_as_long_as_it_does_alone(
    gpu: str, model: str, calibration: Calibration | None
) -> None:
    narrow = {"compute_dtype": "int8", "quantization": "int8"}
    configs = [*mixed_configs(60), *mixed_configs(20, **narrow)]
    spec, card = load_model_spec(model), find_gpu(gpu)
    times = StepTimes(configs, model=spec, gpu=card, calibration=calibration)
    seconds, uncertainty = times.seconds, times.uncertainty
    for row, config in enumerate(configs):
        try:
            alone = predict_step(config, model=spec, gpu=card, calibration=calibration)
        except InputError:
            assert math.isnan(seconds[row])
            assert math.isnan(uncertainty[row])
            continue
        assert seconds[row] == pytest.approx(alone.step_seconds, rel=1e-9)
        assert uncertainty[row] == pytest.approx(alone.uncertainty, rel=1e-9)
        assert sum(alone.terms.values()) == pytest.approx(alone.step_seconds, rel=1e-9)


def test_slopes_are_the_derivatives_of_the_seconds() -> None:
    def under(known: Calibration) -> StepTimes:
        return StepTimes(mixed_configs(60), model=MISTRAL, gpu=find_gpu("h200"), calibration=known)

    times = under(CALIBRATION)
    slopes = times.phases.slopes(in_order(CALIBRATION))
    assert slopes @ np.array(list(CALIBRATION.factors.values())) == pytest.approx(
        times.seconds, rel=1e-9
    )
    for column, factor in enumerate(FACTORS):
        step = 1e-5
        low, high = (
            under(replace(CALIBRATION, factors=CALIBRATION.factors | {factor: value})).seconds
            for value in (CALIBRATION.factors[factor] - step, CALIBRATION.factors[factor] + step)
        )
        derivative = (high - low) / (2 * step)
        assert derivative == pytest.approx(slopes[:, column], rel=1e-4, abs=1e-9)


def test_what_is_not_known_has_no_step_time() -> None:
    unknown = ModelSpec("new", "directory", {**MISTRAL.config, "model_type": "new"})
    times = StepTimes(mixed_configs(3), model=unknown, gpu=find_gpu("a10"))
    assert np.isnan(times.seconds).all()
    assert np.isnan(times.phases.slopes(in_order(None))).all()
    assert np.isnan(times.uncertainty).all()
    # Nor has a compute type that the GPU has no rate for.
    configs = [TrialConfig(compute_dtype=dtype) for dtype in ("bf16", "fp16")]
    times = StepTimes(configs, model=MISTRAL, gpu=find_gpu("t4"))
    assert np.isnan(times.seconds).tolist() == [True, False]
    assert np.isnan(times.phases.slopes(in_order(None))).all(axis=1).tolist() == [True, False]
    assert StepTimes([], model=MISTRAL, gpu=find_gpu("a10")).seconds.shape == (0,)


def test_a_calibration_finds_the_card_that_trials_were_made_with() -> None:
    gpu, draw = find_gpu("a10"), random.Random(1)
    configs = mixed_configs(40, compute_dtype="bf16")
    truth = Calibration("a10", 1, {f: draw.uniform(0.9, 1.3) for f in FACTORS}, 0.0)
    seconds = StepTimes(configs, model=MISTRAL, gpu=gpu, calibration=truth).seconds
    found = calibrate(list(zip(configs, seconds.tolist(), strict=True)), model=MISTRAL, gpu=gpu)
    assert found.relative_error < 0.005
    others = mixed_configs(40, seed=1, compute_dtype="bf16")
    by_found, by_truth = (
        StepTimes(others, model=MISTRAL, gpu=gpu, calibration=known).seconds
        for known in (found, truth)
    )
    assert by_found == pytest.approx(by_truth, rel=0.03)
