"""What configs tell of architectures agrees with what transformers and PEFT really build.

Of each type one model; what all of them count is compared with what was published elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.linears import (
    expert_weights,
    linear_shapes,
    lora_parameters,
    parameters,
    resolve_targets,
    target_sets,
)
from qlora_sweep.search_spaces.models import ModelSpec
from tests.search_spaces.shipped_types import one_of_each_type


def _config(spec: ModelSpec, index: int) -> TrialConfig:
    """Target sets in turn, of those whose layers are known by name."""
    found = target_sets(spec)
    sets = [name for name in found if found[name] != ("all-linear",)]
    return parse_config({"target_modules": sets[index % len(sets)]})


def _built(spec: ModelSpec, targets: Sequence[str]) -> dict[str, Any]:
    """What the real libraries build, without memory."""
    # Imported here: collecting the tests of this directory needs none of it.
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**deepcopy(spec.config)))
        total = sum(p.numel() for p in model.parameters())
        # All experts of a layer are one tensor.
        stacked = [p for name, p in model.named_parameters() if "experts." in name and p.dim() == 3]
        experts = sum(p.numel() for p in stacked)
        linears = {
            path.rsplit(".", 1)[-1]: (layer.in_features, layer.out_features)
            for path, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear) and path != "lm_head"
        }
        adapted = get_peft_model(model, LoraConfig(r=16, target_modules=list(targets)))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    return {"total": total, "experts": experts, "linears": linears, "trained": trained}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "spec"),
    [pytest.param(i, spec, id=spec.name) for i, spec in enumerate(one_of_each_type())],
)
def test_counts_and_modules_agree_with_the_real_model(index: int, spec: ModelSpec) -> None:
    config = _config(spec, index)
    real = _built(spec, resolve_targets(config, spec))
    assert parameters(spec) == real["total"]
    assert expert_weights(spec) in (None, real["experts"])
    if linear_shapes(spec) is not None:
        assert linear_shapes(spec) == real["linears"]
        assert lora_parameters(config, spec) == real["trained"]
    else:
        # What takes an adapter is known by name alone, or by the end of its path.
        ends = {target.rpartition(".")[2] for target in resolve_targets(config, spec)}
        assert ends <= set(real["linears"])
