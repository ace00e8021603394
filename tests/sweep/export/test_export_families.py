"""What is exported of every architecture that ships is what its trial trained: the same tensors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from search_spaces.config import liger_kernels
from search_spaces.linears import target_sets
from search_spaces.models import ModelSpec
from sweep.export.formats import export
from sweep.training.adapters import attached, with_adapters
from sweep.training.model import BaseModel, build_base
from tests.sweep.export.families import families, saved
from tests.sweep.export.studies import a_study, imported
from tests.sweep.training.tiny import tiny_config

FAMILIES = sorted(families())
ATTENTION = {"gpt_oss": "eager"}
"""Of those that have no other on a CPU."""

# Of experts without a linear layer PEFT says that no adapter goes on them.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelSpec]:
    known: dict[str, ModelSpec] = {}

    def found(name: str) -> ModelSpec:
        if name not in known:
            known[name] = saved(families()[name], tmp_path_factory.mktemp(name))
        return known[name]

    return found


def base_of(spec: ModelSpec, config: Any) -> BaseModel:
    device = torch.device("cpu")
    return build_base(config, spec=spec, weights="pretrained", device=device, seed=0)


def described(model: Any) -> dict[str, Any]:
    """Return what of a model with adapters decides memory, speed and what is learned."""
    base = model.get_base_model()
    return {
        "tensors": {
            name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in base.named_parameters()
        },
        "recomputed": [
            name for name, m in base.named_modules() if getattr(m, "gradient_checkpointing", False)
        ],
        "scaling": sorted(
            (name, m.scaling["default"], m.lora_dropout["default"].__class__.__name__)
            for name, m in base.named_modules()
            if hasattr(m, "scaling") and isinstance(m.scaling, dict)
        ),
    }


KNOBS: tuple[dict[str, Any], ...] = (
    {"checkpoint_fraction": 0.5, "target_modules": "all-linear"},
    # Experts are matrices too where part of the base is in 16 bits.
    {"quantized_fraction": 0.5, "lora_dropout": 0.1, "adapter_dtype": "bf16"},
)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_script_builds_what_was_measured(
    family: str, knobs: dict[str, Any], model_of: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    spec = model_of(family)
    config = tiny_config(lora_rank=4, attention=ATTENTION.get(family, "sdpa"), **knobs)
    text = export(a_study(config, model=spec), format="script")
    script = imported(text, tmp_path / "exported_family.py")
    built = described(script.load_model(str(spec.path)))
    base = base_of(spec, config)
    with attached(base, config) as attachment:
        assert built == described(attachment.model)
    base.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_puts_the_adapters_of_its_file_where_the_trial_had_them(
    family: str, tmp_path: Path
) -> None:
    spec = families()[family]
    # Some have one matrix for queries, keys and values.
    named = [("o_proj",), ("q_proj", "o_proj") if "qv" in target_sets(spec) else ("qkv_proj",)]
    for targets in (*target_sets(spec), *named):
        # PEFT has no dropout for adapters on experts.
        dropout = 0.0 if targets == "all-linear" else 0.1
        config = tiny_config(
            lora_rank=4, lora_alpha=6.0, lora_dropout=dropout, target_modules=targets
        )
        (tmp_path / "adapter_config.json").write_text(
            export(a_study(config, model=spec), format="peft"), encoding="utf-8"
        )
        read = get_peft_model(bare(spec), LoraConfig.from_pretrained(str(tmp_path)))
        base = BaseModel(config.base(), spec, bare(spec), contextlib.ExitStack())
        trained = with_adapters(base, config)
        assert described(read) == described(trained), targets
        assert sum(p.requires_grad for p in read.parameters()) > 0


def bare(spec: ModelSpec) -> Any:
    """Return a model of no weights, in 16 bits."""
    with torch.device("meta"):
        config = AutoConfig.for_model(**spec.config)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_the_script_switches_every_kernel_that_liger_has_for_a_family() -> None:
    patches = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    for family in FAMILIES:
        signature = inspect.signature(patches.MODEL_TYPE_TO_APPLY_LIGER_FN[family])
        # One that is not named is on or off as Liger has it.
        assert set(signature.parameters) - {"model"} <= set(liger_kernels("liger") or {}), family
