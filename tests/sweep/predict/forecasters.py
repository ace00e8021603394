"""Forecasters of a plan on a GPU of the catalogue."""

from __future__ import annotations

from typing import Any

from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage.definition import Target
from qlora_sweep.sweep.predict.building import build_forecaster
from qlora_sweep.sweep.predict.forecast import Forecaster


def forecaster_on(
    gpu: str, model: ModelSpec, *, budget_bytes: int | None = None, **known: Any
) -> Forecaster:
    """Return the forecaster of a plan; ``known`` is what the builder takes beside its target."""
    budget_bytes = find_gpu(gpu).budget_bytes if budget_bytes is None else budget_bytes
    target = Target(gpu=gpu, device="cuda", budget_bytes=budget_bytes)
    return build_forecaster(model, target, **({"shapes": None, "predictor": None} | known))
