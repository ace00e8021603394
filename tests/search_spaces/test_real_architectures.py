"""What configs tell of architectures agrees with what transformers and PEFT really build."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from search_spaces.config import parse_config
from search_spaces.knobs import TARGET_SETS
from search_spaces.linears import linear_shapes, lora_parameters, parameters, resolve_targets
from search_spaces.model_files import load_model_spec, model_names

BUILD = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

asked, found = json.load(sys.stdin), {}
for name, (values, targets) in asked.items():
    config = AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        total = sum(p.numel() for p in model.parameters())
        linears = {
            path.rsplit(".", 1)[-1]: (layer.in_features, layer.out_features)
            for path, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear) and path != "lm_head"
        }
        model = get_peft_model(model, LoraConfig(r=16, target_modules=targets))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found[name] = {"total": total, "linears": linears, "trained": trained}
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    """Every shipped architecture as the real libraries build it, without memory, in a child."""
    asked = {}
    for index, name in enumerate(model.name for model in model_names()):
        spec, config = (
            load_model_spec(name),
            parse_config({"target_modules": TARGET_SETS[index % 3]}),
        )
        asked[name] = (spec.config, list(resolve_targets(config, spec)))
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("index", "name"), list(enumerate(model.name for model in model_names())))
def test_counts_and_modules_agree_with_the_real_model(
    built: dict[str, Any], index: int, name: str
) -> None:
    spec = load_model_spec(name)
    config = parse_config({"target_modules": TARGET_SETS[index % 3]})
    shapes = linear_shapes(spec)
    assert shapes is not None
    assert {key: list(shape) for key, shape in shapes.items()} == built[name]["linears"]
    assert parameters(spec) == built[name]["total"]
    assert lora_parameters(config, spec) == built[name]["trained"]
