"""Unsloth's script runs as it is: a stand-in for its two functions, and TRL for the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from search_spaces.models import ModelSpec
from tests.sweep.export.studies import a_study, export, imported, some_texts
from tests.sweep.export.weights import written_texts
from tests.sweep.training.tiny import tiny_config

UNSLOTH = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer


class FastLanguageModel:
    @staticmethod
    def from_pretrained(
        name, *, max_seq_length, dtype, load_in_4bit=True, load_in_8bit=False,
        load_in_16bit=False, load_in_fp8=False, use_exact_model_name=False,
    ):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(name)

    @staticmethod
    def get_peft_model(model, *, use_gradient_checkpointing, **options):
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(None, {"quantization": "fp8"}), ("messages", {"packing": "packed", "quantization": "nf4"})],
)
def test_the_script_trains(
    kind: Any,
    settings: dict[str, Any],
    model: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = written_texts(tmp_path / "texts.jsonl", kind or "text")
    texts = None if kind is None else some_texts(kind, source=str(source))
    config = tiny_config(optimizer="adamw_torch_fused", **settings)
    text = export(a_study(config, model=model, texts=texts), format="unsloth")
    unsloth = ModuleType("unsloth")
    exec(UNSLOTH, vars(unsloth))
    monkeypatch.setitem(sys.modules, "unsloth", unsloth)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    # Trainer refuses bf16 where there is no GPU, unless it is told so.
    script = imported(
        text.replace("args=SFTConfig(", "args=SFTConfig(use_cpu=True,"), tmp_path / "train.py"
    )
    typed = ["--data", str(source), "--output", str(tmp_path / "out"), "--max-steps", "2"]
    monkeypatch.setattr("sys.argv", ["train.py", *typed])
    script.main()
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
