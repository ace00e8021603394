"""What configs tell of architectures agrees with what transformers and PEFT really build."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from search_spaces.config import parse_config
from search_spaces.knobs import TARGET_SETS
from search_spaces.linears import linear_shapes, lora_parameters, parameters, resolve_targets
from search_spaces.models import ModelSpec, load_model_spec, shipped_models


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    """Every shipped architecture as the real libraries build it, without memory."""
    found = {}
    for index, name in enumerate(model.name for model in shipped_models()):
        spec = load_model_spec(name)
        config = parse_config({"target_modules": TARGET_SETS[index % 3]})
        found[name] = _built(spec, resolve_targets(config, spec))
    return found


def _built(spec: ModelSpec, targets: Sequence[str]) -> dict[str, Any]:
    # Imported here: collecting the tests of this directory needs none of it.
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.config))
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
    config = parse_config({"target_modules": TARGET_SETS[index % 3]})
    shapes = linear_shapes(spec)
    assert shapes is not None
    assert shapes == built[name]["linears"]
    assert parameters(spec) == built[name]["total"]
    assert lora_parameters(config, spec) == built[name]["trained"]
