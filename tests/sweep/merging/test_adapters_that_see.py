"""Adapters that PEFT trained on whole vision-language models, stored as the hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.merging.test_adapters import apart
from tests.sweep.vision_language import CONFIGS, make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS: dict[str, dict[str, Any]] = {
    "by name": {"target_modules": ["q_proj", "v_proj"]},
    "all linear": {"target_modules": "all-linear"},
    "language alone": {"target_modules": r".*language_model.*\.(q_proj|up_proj)"},
    "whole embedding": {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens"]},
}


def whole(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


def adapted(base: Path, adapter: Path, **options: Any) -> None:
    """Write an adapter of a whole model."""
    import torch
    from peft import LoraConfig, get_peft_model

    peft = get_peft_model(whole(base), LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    peft.save_pretrained(adapter)


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.arange(20, 60).reshape(1, -1)).logits.float()


def of_peft(base: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return logits(PeftModel.from_pretrained(whole(base), adapter).eval())


def check(base: Path, adapter: Path, merged: Path, expected: Any) -> None:
    from qlora_sweep.sweep.merging.merged import Merge

    merged.mkdir()
    Merge(adapter, base).write(merged)
    effect = apart(logits(whole(base)), expected)
    assert effect > 0.01
    assert apart(logits(whole(merged)), expected) < 0.01 + 0.05 * effect


CASES = [pytest.param(kind, OPTIONS["by name"], id=f"{kind}") for kind in CONFIGS]
for name in ("all linear", "language alone", "whole embedding"):
    CASES.append(pytest.param("gemma3", OPTIONS[name], id=name))


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_whole_models_logits_are_pefts(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    base = tmp_path / "base"
    make_checkpoint(base, kind)
    adapted(base, tmp_path / "adapter", **options)
    expected = of_peft(base, tmp_path / "adapter")
    check(base, tmp_path / "adapter", tmp_path / "merged", expected)
    names = [set(load_file(tmp_path / at / "model.safetensors")) for at in ("base", "merged")]
    assert names[0] <= names[1] <= names[0] | {"lm_head.weight"}
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["model_type"] == kind


LANGUAGE = OPTIONS["language alone"]
LLAVA = ("model.language_model.", "language_model.model.")
QWEN = ("model.language_model.", "model.")
OLD = [
    pytest.param(kind, LANGUAGE, [names], id=kind, marks=pytest.mark.integration)
    for kind, names in (("gemma3", LLAVA), ("mistral3", LLAVA), ("qwen2_5_vl", QWEN))
]
OLD += [
    pytest.param("llava", LANGUAGE, [LLAVA], id="llava"),
    pytest.param("qwen2_vl", LANGUAGE, [QWEN], id="qwen2_vl"),
    pytest.param(
        "qwen2_5_vl",
        {"target_modules": ["q_proj", "up_proj", "qkv"]},
        [QWEN, ("model.visual.", "visual.")],
        id="vision tower too",
    ),
    pytest.param(
        "llava",
        LANGUAGE | {"modules_to_save": ["multi_modal_projector", "lm_head"]},
        [
            LLAVA,
            ("model.multi_modal_projector.", "multi_modal_projector."),
            ("base_model.model.lm_head.", "base_model.model.language_model.lm_head."),
        ],
        id="whole modules",
    ),
]


@pytest.mark.parametrize(("kind", "options", "renamed"), OLD)
def test_an_adapter_of_the_names_that_transformers_4_had_is_read(
    kind: str, options: dict[str, Any], renamed: list[tuple[str, str]], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_checkpoint(base, kind)
    adapted(base, adapter, **options)
    expected = of_peft(base, adapter)
    file = adapter / "adapter_model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        for own, old in renamed:
            name = name.replace(own, old)
        tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    if options == LANGUAGE:
        config = json.loads((adapter / "adapter_config.json").read_text())
        config["target_modules"] = ["q_proj", "up_proj"]
        (adapter / "adapter_config.json").write_text(json.dumps(config))
    check(base, adapter, tmp_path / "merged", expected)
