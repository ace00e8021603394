"""What configs tell of architectures agrees with what transformers and PEFT really build."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TARGET_SETS, TrialConfig, parse_config
from qlora_sweep.search_spaces.linears import (
    linear_shapes,
    lora_parameters,
    parameters,
    resolve_targets,
    target_sets,
    unquantized,
)
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec, shipped_models


def _config(spec: ModelSpec, index: int) -> TrialConfig:
    """Target sets in turn, of those that the architecture can have."""
    sets = [name for name in TARGET_SETS if name in target_sets(spec)]
    if unquantized(spec) is not None:
        # All linear layers of a mixture of experts are PEFT's to find, experts among them.
        sets.remove("all-linear")
    return parse_config({"target_modules": sets[index % len(sets)]})


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    """Every shipped architecture as the real libraries build it, without memory."""
    found = {}
    for index, spec in enumerate(shipped_models()):
        found[spec.name] = _built(spec, resolve_targets(_config(spec, index), spec))
    return found


def _built(spec: ModelSpec, targets: Sequence[str]) -> dict[str, Any]:
    # Imported here: collecting the tests of this directory needs none of it.
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**deepcopy(spec.config)))
        total = sum(p.numel() for p in model.parameters())
        linears = {
            path.rsplit(".", 1)[-1]: (layer.in_features, layer.out_features)
            for path, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear) and path != "lm_head"
        }
        adapted = get_peft_model(model, LoraConfig(r=16, target_modules=list(targets)))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    return {"total": total, "linears": linears, "trained": trained}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "name"), list(enumerate(model.name for model in shipped_models()))
)
def test_counts_and_modules_agree_with_the_real_model(
    built: dict[str, Any], index: int, name: str
) -> None:
    spec = load_model_spec(name)
    config, real = _config(spec, index), built[name]
    assert parameters(spec) == real["total"]
    if unquantized(spec) is None:
        assert linear_shapes(spec) == real["linears"]
        assert lora_parameters(config, spec) == real["trained"]
    else:
        # Experts are no linear layers; what takes an adapter is known by name alone.
        assert linear_shapes(spec) is None
        assert set(resolve_targets(config, spec)) <= set(real["linears"])
