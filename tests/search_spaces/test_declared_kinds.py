"""Each value of a kind has one record, and the records say what was known of the values before."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Any, get_args

import pytest
import torch
from transformers.training_args import OptimizerNames, TrainingArguments

from qlora_sweep.search_spaces.config import WEIGHT_DECAY, TrialConfig
from qlora_sweep.search_spaces.kinds import (
    COMPUTE_DTYPES,
    KERNELS,
    METHODS,
    OPTIMIZERS,
    QUANTIZATIONS,
    TRAINER_LABELS,
    ComputeDtype,
    Kernels,
    Method,
    OptimizerName,
    Quantization,
    TrainerName,
)
from qlora_sweep.search_spaces.trainers import TRAINERS
from qlora_sweep.sweep.export.formats import format_names
from qlora_sweep.sweep.export.record import Trainer as ExportedFor

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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_as_exported_files_say(name: OptimizerName) -> None:
    from qlora_sweep.sweep.training.step import make_optimizer

    weight = torch.nn.Parameter(torch.zeros(8))
    made = make_optimizer(TrialConfig(optimizer=name), [weight], rate=0.001)
    as_transformers = TrainingArguments(use_cpu=True, weight_decay=WEIGHT_DECAY)
    for group in made.param_groups:
        assert group["weight_decay"] == as_transformers.weight_decay
        betas = (as_transformers.adam_beta1, as_transformers.adam_beta2)
        assert group.get("betas", betas) == betas


def test_trainers_are_told_apart_alike_wherever_they_are_listed() -> None:
    assert set(TRAINER_LABELS) == set(get_args(TrainerName)) == set(TRAINERS)
    others = set(TRAINERS) - {"sweep"}
    assert set(get_args(ExportedFor)) - {"script"} == others
    assert others <= set(format_names())


def test_compute_dtypes_are_torchs_and_have_their_bits() -> None:
    for kind in COMPUTE_DTYPES.values():
        assert getattr(torch, kind.torch_name).itemsize * 8 == kind.bits
