"""Unsloth's script runs as it is: a stand-in for its two functions, and TRL for the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from search_spaces.models import ModelSpec
from sweep.export.formats import export
from tests.sweep.export.studies import a_study, some_texts
from tests.sweep.export.weights import saved_model, written_texts
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (None, {"quantization": "fp8", "compute_dtype": "fp8", "checkpoint_fraction": 0.0}),
        ("messages", {"packing": "packed", "quantization": "nf4"}),
        ("prompt-completion", {"packing": "grouped", "quantization": "int8"}),
    ],
)
def test_the_script_trains(
    kind: Any, settings: dict[str, Any], model: ModelSpec, tmp_path: Path
) -> None:
    source = written_texts(tmp_path / "texts.jsonl", kind or "text")
    texts = None if kind is None else some_texts(kind, source=str(source))
    config = tiny_config(optimizer="adamw_torch_fused", **settings)
    (tmp_path / "unsloth.py").write_text(UNSLOTH, encoding="utf-8")
    script = tmp_path / "train.py"
    text = export(a_study(config, model=model, texts=texts), format="unsloth")
    # Trainer refuses bf16 where there is no GPU, unless it is told so.
    script.write_text(text.replace("args=SFTConfig(", "args=SFTConfig(use_cpu=True,"))
    done = subprocess.run(
        [sys.executable, str(script), "--data", str(source), "--max-steps", "2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "train_loss" in done.stdout
    assert list(tmp_path.glob("outputs/*-unsloth/adapter_model.safetensors"))
