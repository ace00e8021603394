"""Unsloth's script runs as it is: a stand-in for its two functions, and TRL for the rest."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qlora_sweep.search_spaces.models import ModelSpec
from tests.sweep.export.studies import a_study, export, imported, some_dataset
from tests.sweep.export.weights import written_dataset
from tests.sweep.training.tiny import tiny_config


class FastLanguageModel:
    """What Unsloth's has of these names, without its kernels."""

    @staticmethod
    def from_pretrained(name: str, *, dtype: Any, max_seq_length: int, **switches: bool) -> Any:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        assert set(switches) <= {"load_in_4bit", "load_in_fp8", "use_exact_model_name"}
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(name)

    @staticmethod
    def get_peft_model(model: Any, *, use_gradient_checkpointing: bool, **options: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(None, {"quantization": "fp8"}), ("messages", {"packing": "packed"})],
)
def test_the_script_trains(
    kind: Any,
    settings: dict[str, Any],
    model: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = written_dataset(tmp_path / "texts.jsonl", kind or "text")
    dataset = None if kind is None else some_dataset(kind, source=str(source))
    config = tiny_config(optimizer="adamw_torch_fused", **settings)
    text = export(a_study(config, model=model, dataset=dataset), format="unsloth")
    unsloth = SimpleNamespace(FastLanguageModel=FastLanguageModel)
    monkeypatch.setitem(sys.modules, "unsloth", unsloth)  # type: ignore[arg-type]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    # Trainer refuses bf16 where there is no GPU, unless it is told so.
    on_cpu = text.replace("args=SFTConfig(", "args=SFTConfig(use_cpu=True,")
    typed = ["--data", str(source), "--output", str(tmp_path / "out"), "--max-steps", "2"]
    monkeypatch.setattr("sys.argv", ["train.py", *typed])
    imported(on_cpu, tmp_path / "train.py").main()
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("source", ["org/texts", "/a/directory"])
def test_a_dataset_that_is_no_file_is_the_default_too(source: str) -> None:
    text = export(a_study(dataset=some_dataset("text", source=source)), format="unsloth")
    assert source in [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)]
