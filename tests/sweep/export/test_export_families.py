"""What is exported of every architecture that ships is what its trial trained: the same tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qlora_sweep.search_spaces.kinds import KERNELS
from qlora_sweep.search_spaces.linears import target_sets
from qlora_sweep.search_spaces.models import ModelSpec, shipped_models
from qlora_sweep.search_spaces.rules import LIGER_MODEL_TYPES
from qlora_sweep.storage.definition import StudySnapshot
from tests.families import config_of, spec_of
from tests.sweep.export.studies import a_study, export
from tests.sweep.export.test_export_script import described
from tests.sweep.training.tiny import tiny_config

# Of experts without a linear layer PEFT says that no adapter goes on them.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")


FAMILIES = sorted({spec.model_type for spec in shipped_models()})
FEW: list[Any] = ["gpt_oss", "qwen3_moe"]
"""Of experts. What is not of them test_export_script.py builds of Llama's architecture."""
FEW += [
    pytest.param(family, marks=pytest.mark.integration)
    # Gemma 3n does not ship; it has layers that are never quantized.
    for family in [*FAMILIES, "gemma3n_text"]
    if family not in FEW
]


@pytest.mark.parametrize("family", FEW)
def test_the_script_builds_what_was_measured(
    family: str, script_of: Callable[[StudySnapshot], ModuleType], tmp_path: Path
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from qlora_sweep.sweep.training.adapters import attached
    from qlora_sweep.sweep.training.model import build_base

    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**spec_of(family).config)
    ).save_pretrained(tmp_path)
    spec = dataclasses.replace(spec_of(family), source="directory", path=tmp_path)
    for settings in (
        {"checkpoint_fraction": 0.5, "target_modules": "all-linear"},
        # Experts are matrices too where part of the base is in 16 bits.
        {"quantized_fraction": 0.5, "lora_dropout": 0.1, "adapter_dtype": "bf16"},
    ):
        config = config_of(family, "attention").model_copy(update=settings)
        built = script_of(a_study(config, model=spec)).load_model(str(tmp_path))
        device = torch.device("cpu")
        base = build_base(config, spec=spec, weights="pretrained", device=device, seed=0)
        with attached(base, config) as attachment:
            measured = described(attachment.model.get_base_model())
        assert described(built.get_base_model()) == measured
        base.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_puts_the_adapters_of_its_file_where_the_trial_had_them(
    family: str, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    from qlora_sweep.sweep.training.adapters import with_adapters
    from qlora_sweep.sweep.training.model import BaseModel

    spec = dataclasses.replace(spec_of(family), source="shipped")
    # Some have one matrix for queries, keys and values, or several for queries.
    attention = target_sets(spec)["attention"]
    named = [attention[-1:], attention[:1]]
    for targets in (*target_sets(spec), *named):
        config = tiny_config(lora_rank=4, lora_alpha=6.0, target_modules=targets)
        (tmp_path / "adapter_config.json").write_text(
            export(a_study(config, model=spec), format="peft"), encoding="utf-8"
        )
        read = get_peft_model(bare(spec), LoraConfig.from_pretrained(str(tmp_path)))
        base = BaseModel(config.base(), spec, bare(spec), contextlib.ExitStack())
        trained = with_adapters(base, config)
        assert described(read.get_base_model()) == described(trained.get_base_model()), targets
        assert sum(p.requires_grad for p in read.parameters()) > 0


def bare(spec: ModelSpec) -> Any:
    """Return a model of no weights, in 16 bits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.for_model(**spec.config)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_the_script_switches_every_kernel_that_liger_has_for_a_family() -> None:
    patches = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    for family in LIGER_MODEL_TYPES.intersection(FAMILIES):
        signature = inspect.signature(patches.MODEL_TYPE_TO_APPLY_LIGER_FN[family])
        # One that is not named is on or off as Liger has it.
        assert set(signature.parameters) - {"model"} <= set(KERNELS["liger"].in_liger or {}), family
