"""Each value of a kind has one record, and the records say what was known of the values before."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Any, get_args

import pytest
import torch
from transformers.training_args import OptimizerNames

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.kinds import (
    COMPUTE_DTYPES,
    KERNELS,
    METHODS,
    OPTIMIZERS,
    QUANTIZATIONS,
    SHARDED_OPTIMIZER,
    ComputeDtype,
    Kernels,
    Method,
    OptimizerName,
    Quantization,
)

TABLES: Mapping[str, tuple[Any, Mapping[Any, Any]]] = {
    "optimizer": (OptimizerName, OPTIMIZERS),
    "quantization": (Quantization, QUANTIZATIONS),
    "compute_dtype": (ComputeDtype, COMPUTE_DTYPES),
    "method": (Method, METHODS),
    "kernels": (Kernels, KERNELS),
}


@pytest.mark.parametrize("key", TABLES)
def test_every_value_has_a_record_and_every_record_a_value(key: str) -> None:
    values, records = TABLES[key]
    assert set(get_args(values)) == set(records)
    assert TrialConfig.model_fields[key].annotation == values


def test_optimizers_are_what_libraries_build_and_trainers_call_them() -> None:
    assert set(OPTIMIZERS) <= {name.value for name in OptimizerNames}
    for kind in OPTIMIZERS.values():
        assert issubclass(pkgutil.resolve_name(kind.built_by), torch.optim.Optimizer)
    assert OPTIMIZERS["paged_adamw_8bit"].unpaged == "adamw_8bit"
    assert SHARDED_OPTIMIZER == "adamw_torch_fused"


def test_quantizations_have_the_losses_that_were_measured() -> None:
    nats = {name: kind.nats_over_16_bits for name, kind in QUANTIZATIONS.items()}
    assert nats == {
        "nf4": {"16-bit": 0.046, "fp8": 0.054, "int8": 0.05},
        "fp4": {},
        "fp8": {"16-bit": 0.003, "fp8": 0.009},
        "int8": {"16-bit": 0.001, "int8": 0.005},
        "none": {"16-bit": 0.0},
    }


def test_compute_dtypes_are_torchs_and_have_their_bits() -> None:
    for kind in COMPUTE_DTYPES.values():
        assert getattr(torch, kind.torch_name).itemsize * 8 == kind.bits
    plainest_first = sorted(COMPUTE_DTYPES, key=lambda name: COMPUTE_DTYPES[name].plainness)
    assert plainest_first == ["bf16", "fp16", "fp32", "fp8", "int8"]
