"""Predicted memory against the GPU's counters, on structures of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from qlora_sweep.search_spaces.gpus import match_product
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.trainers import for_memory
from tests.gpu.rig import Rig, predicting, small_config

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
LEAN = {"kernels": "liger", "upcast_fp32": False}
WIDE = {"target_modules": "all-linear", "lora_rank": 64}
CASES: list[dict[str, Any]] = [
    {"micro_batch_size": 8},
    {"seq_len": 2048, "checkpoint_fraction": 0.5},
    {"checkpoint_fraction": 0.0},
    {**LEAN},
    {**LEAN, "micro_batch_size": 10, "checkpoint_fraction": 0.0},
    {**LEAN, **WIDE, "checkpoint_fraction": 0.25},
    {"kernels": "fused-loss", "lora_dropout": 0.05},
    {"attention": "eager", "checkpoint_fraction": 0.0},
    {"compute_dtype": "fp16", "double_quant": False, "target_modules": "qv"},
    {"quantization": "none", "double_quant": False, "upcast_fp32": False},
    {"quantized_fraction": 0.5},
    {"quantized_fraction": 0.5, **LEAN, "checkpoint_fraction": 0.0},
    {"quantized_fraction": 0.25, **LEAN, **WIDE, "adapter_dtype": "bf16"},
    {"adapter_dtype": "bf16", "optimizer": "adamw_torch_fused", "lora_rank": 64},
    {"adapter_dtype": "bf16", "target_modules": "all-linear", "effective_batch_size": 8},
    {**WIDE, "optimizer": "adamw_torch_fused", "micro_batch_size": 1},
    {"quantization": "fp4", "optimizer": "paged_adamw_8bit", "seq_len": 384},
    {"trainer": "trl", "checkpoint_fraction": 0.0},
    {"trainer": "trl", "kernels": "liger", "quantization": "none", "checkpoint_fraction": 0.5},
    {"trainer": "axolotl", "checkpoint_fraction": 0.0},
]


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracingPredictor]:
    with predicting(tmp_path_factory.mktemp("profiles")) as predictor:
        yield predictor


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_peak_memory_is_within_the_stated_uncertainty(
    rig: Rig, predictor: TracingPredictor, settings: dict[str, Any]
) -> None:
    config = small_config(**settings)
    measured = rig.measure(config).peak_allocated_bytes
    prediction = predictor.predict(for_memory(config))
    assert prediction.peak_allocated_bytes == pytest.approx(measured, rel=prediction.uncertainty)


def test_the_gpu_is_in_the_catalogue_or_is_told_by_its_own_name() -> None:
    spec = match_product(torch.cuda.get_device_name(0))
    assert spec is None or spec.compute_capability == torch.cuda.get_device_capability(0)
