"""Predicted steps of a few configurations."""

from __future__ import annotations

from collections.abc import Sequence

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import GpuSpec
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.sweep.predict.speed.predictor import Calibration, SpeedPrediction, StepTimes


def predict_steps(
    configs: Sequence[TrialConfig],
    *,
    model: ModelSpec,
    gpu: GpuSpec,
    calibration: Calibration | None = None,
) -> list[SpeedPrediction | InputError]:
    times = StepTimes(configs, model=model, gpu=gpu, calibration=calibration)
    return [times.prediction(row) for row in range(len(configs))]


def predict_step(
    config: TrialConfig,
    *,
    model: ModelSpec,
    gpu: GpuSpec,
    calibration: Calibration | None = None,
) -> SpeedPrediction:
    (prediction,) = predict_steps([config], model=model, gpu=gpu, calibration=calibration)
    if isinstance(prediction, InputError):
        raise prediction
    return prediction
