"""The exported script trains what was measured: the same tensors, every example, for real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from qlora_sweep.search_spaces.kinds import KERNELS
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.records import Measured
from qlora_sweep.sweep.export.formats import exported
from tests.sweep.export.studies import a_study, some_dataset
from tests.sweep.export.weights import written_dataset
from tests.sweep.training.tiny import LAYERS, TINY, UNSUITED, tiny_base, tiny_config, trial_on
from tests.tables import column

Script = Callable[[StudySnapshot], ModuleType]


def described(model: Any) -> dict[str, Any]:
    """Return what of a model decides memory and speed, and what is learned."""
    modules = dict(model.named_modules())
    return {
        "tensors": {
            name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()
        },
        "products": {name: m.products for name, m in modules.items() if hasattr(m, "products")},
        "recomputed": [
            n for n, m in modules.items() if getattr(m, "gradient_checkpointing", False)
        ],
        "attention": model.config._attn_implementation,
        "cache": model.config.use_cache,
        "adapters": {
            name: (m.scaling["default"], type(m.lora_dropout["default"]))
            for name, m in modules.items()
            if isinstance(getattr(m, "scaling", None), dict)
        },
    }


@pytest.mark.parametrize(
    "settings",
    column(
        """
        {upcast_fp32: false, checkpoint_fraction: 0.0, target_modules: all-linear}
        {checkpoint_fraction: 0.5, lora_alpha: 6.0, target_modules: qv}
        {quantization: fp4, double_quant: false, adapter_dtype: bf16}
        {quantization: none, compute_dtype: fp32, attention: eager}
        {quantization: fp8, compute_dtype: fp8}
        {quantization: nf4, compute_dtype: int8, target_modules: all-linear}
        {quantization: int8, lora_dropout: 0.1, quantized_fraction: 0.5}
        """
    ),
    ids=str,
)
def test_the_script_builds_what_was_measured(
    settings: dict[str, Any], model: ModelSpec, script_of: Script
) -> None:
    from qlora_sweep.sweep.training.adapters import attached

    config = tiny_config(**settings)
    built = script_of(a_study(config, model=TINY)).load_model(str(model.path)).get_base_model()
    with tiny_base(config) as base, attached(base, config):
        assert described(built) == described(base.model)


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({"checkpoint_offload": True, "checkpoint_fraction": 1.0}, LAYERS),
        ({"compile": True, "checkpoint_fraction": 1.0}, None),
    ],
)
def test_the_script_recomputes_layers_as_was_measured(
    settings: dict[str, Any], copies: int | None, model: ModelSpec, script_of: Script
) -> None:
    import torch

    config = tiny_config(**settings)
    built = script_of(a_study(config, model=TINY)).load_model(str(model.path)).train()
    tokens = torch.arange(64).view(2, 32)
    built(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in built.parameters() if p.requires_grad)
    for layer in built.get_base_model().model.layers:
        how = layer._gradient_checkpointing_func
        assert type(how).__name__ == "Recomputing"
        assert (how.host and how.host.copies) == copies


def test_the_script_takes_a_stored_base_as_it_is(
    model: ModelSpec, script_of: Script, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from qlora_sweep.sweep.training.adapters import attached

    options = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float16,
        llm_int8_skip_modules=["lm_head", "model.layers.1.mlp"],
    )
    AutoModelForCausalLM.from_pretrained(
        model.path, quantization_config=options, dtype=torch.bfloat16, device_map={"": "cpu"}
    ).save_pretrained(tmp_path / "stored")
    spec = load_model_spec(str(tmp_path / "stored"))
    config = tiny_config(double_quant=False)
    script = script_of(a_study(config, model=spec))
    built = script.load_model(str(spec.path)).get_base_model()
    with (
        tiny_base(config, spec=spec, weights="pretrained") as base,
        attached(base, config),
    ):
        assert described(built) == described(base.model)
        kinds = [getattr(m, "compute_dtype", None) for m in base.model.modules()]
        assert [getattr(m, "compute_dtype", None) for m in built.modules()] == kinds
        assert {*kinds} == {None, torch.bfloat16}


def test_trainer_is_told_what_was_measured(script_of: Script, tmp_path: Path) -> None:
    config = tiny_config(kernels="liger", effective_batch_size=8, learning_rate=3e-4)
    typed = SimpleNamespace(output=str(tmp_path), max_steps=3, epochs=1.0, learning_rate=3e-4)
    told = script_of(a_study(config, model=TINY)).training_arguments(typed)
    # A kernel that is not named is on by default: Gemma's GEGLU would be patched.
    assert told.liger_kernel_config == KERNELS["liger"].in_liger
    assert (told.gradient_accumulation_steps, told.optim.value) == (4, config.optimizer)
    assert (told.bf16, told.fp16, told.weight_decay) == (True, False, 0.01)


def adapter(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(directory / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", [None, "messages"])
def test_an_epoch_trains_on_every_example_up_to_the_last(
    kind: Any, script_of: Script, run: Callable[..., Any], tmp_path: Path
) -> None:
    # Seven full rows, or seven examples beside one that is held out: micro-batches of 2 leave one.
    written_dataset(tmp_path / "data.jsonl", kind or "text", rows=8)
    if kind is None:
        (tmp_path / "data.jsonl").write_text(json.dumps({"text": "a" * (7 * 32 - 2)}))
    dataset = kind and some_dataset(kind)
    script = script_of(a_study(tiny_config(effective_batch_size=4), model=TINY, dataset=dataset))
    trained: list[int] = []

    def counted(collate: Callable[..., Any]) -> Callable[..., Any]:
        return lambda rows: trained.append(len(rows)) or collate(rows)  # type: ignore[func-returns-value]

    if kind is None:
        script.collate = counted(script.collate)  # type: ignore[attr-defined]
    else:
        made = script.Collator
        script.Collator = lambda settings: counted(made(settings))  # type: ignore[attr-defined]
    reached = run(script, "--epochs", "2")
    assert trained[:8] == [2, 2, 2, 1] * 2
    assert reached["steps"] == 4
    assert ("eval_loss" in reached) is (kind is not None)


def test_what_is_typed_wins_over_what_was_measured(
    script_of: Script, run: Callable[..., Any], tmp_path: Path
) -> None:
    written_dataset(tmp_path / "data.jsonl", "text")
    script = script_of(a_study(tiny_config(), model=TINY))
    assert run(script, "--learning-rate", "0", "--max-steps", "2")["steps"] == 2
    assert all(not t.any() for name, t in adapter(tmp_path / "out").items() if "lora_B" in name)


def test_a_finished_adapter_is_not_trained_over_and_what_cannot_be_is_refused(
    script_of: Script, run: Callable[..., Any], tmp_path: Path
) -> None:
    script = script_of(a_study(tiny_config(), model=TINY))
    for wrong in (("--epochs", "0"), ("--max-steps", "0"), ("--learning-rate", "-1")):
        with pytest.raises(SystemExit):
            run(script, *wrong)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_model.safetensors").write_bytes(b"kept")
    with pytest.raises(SystemExit):
        run(script)
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == b"kept"


def test_a_resumed_training_ends_as_one_that_was_not_interrupted(
    script_of: Script, run: Callable[..., Any], tmp_path: Path
) -> None:
    written_dataset(tmp_path / "data.jsonl", "text")
    script = script_of(a_study(tiny_config(lora_dropout=0.1), model=TINY))
    output = tmp_path / "out"
    script.SAVE_STEPS = 2  # type: ignore[attr-defined]
    reached = run(script, "--max-steps", "4", "--resume")
    assert reached["steps"] == 4, "there is nothing to resume"
    whole = adapter(output)
    shutil.rmtree(output / "checkpoint-4")
    (output / "adapter_model.safetensors").unlink()
    again = run(script, "--max-steps", "4", "--resume")
    assert again["steps"] == 2
    assert again["train_loss"] == pytest.approx(reached["train_loss"], rel=0.2), "of two steps"
    (output / "adapter_model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    assert run(script, "--max-steps", "4", "--resume")["steps"] == 0, "it is at its end"
    for resumed in (adapter(tmp_path), adapter(output)):
        assert all(resumed[name].equal(tensor) for name, tensor in whole.items())


def test_a_script_measured_on_a_cpu_computes_on_one_thread_as_workers_do(
    script_of: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    study = a_study(tiny_config(), model=TINY, emulated_on=None)
    script_of(study)
    assert "OMP_NUM_THREADS" not in os.environ
    target = study.definition.target.model_copy(update={"gpu": "cpu", "device": "cpu"})
    definition = study.definition.model_copy(update={"target": target})
    script_of(replace(study, definition=definition))
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("row", "words"), [({"prompt": "x"}, "text"), ({"text": "a"}, "3 tokens, less")]
)
def test_data_that_cannot_be_trained_on_is_refused(
    row: dict[str, str], words: str, script_of: Script, run: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    with pytest.raises(SystemExit, match=words):
        run(script_of(a_study(tiny_config(), model=TINY)))


@pytest.mark.slow
def test_the_script_runs_as_it_is_written_and_its_numbers_are_the_measured_ones(
    outliers: ModelSpec, tmp_path: Path
) -> None:
    config = tiny_config(effective_batch_size=4, quantization="int8", compute_dtype="int8")
    with tiny_base(config) as base:
        outcome = trial_on(base, config).run()
    assert isinstance(outcome, Measured)
    study = a_study(config, measurement=outcome.measurement, model=outliers)
    for path, text in exported(study, format="script").files(tmp_path / "train.py").items():
        path.write_text(text, encoding="utf-8")
    written_dataset(tmp_path / "texts.jsonl", "text")
    command = [sys.executable, "train.py", "--data", "texts.jsonl", "--output", "adapter"]
    done = subprocess.run(
        [*command, "--max-steps", "5", "--metrics", "metrics.json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    count = outcome.measurement.trainable_parameters
    assert f"trainable parameters: {count:,} (measured: {count:,})" in done.stdout
    reached = json.loads((tmp_path / "metrics.json").read_text())
    assert (reached["steps"], reached["peak_allocated_bytes"]) == (5, None)
    assert reached["train_loss"] == pytest.approx(6.2, abs=1.0), "of random weights: ln 512"
    tokens = reached["tokens_per_second"] * reached["step_seconds"]
    assert tokens == pytest.approx(config.tokens_per_step)
    assert sum(tensor.numel() for tensor in adapter(tmp_path / "adapter").values()) == count
    about = json.loads((tmp_path / "adapter" / "training.json").read_text())
    assert about["config"]["quantization"] == config.quantization
    assert about["eight_bit"]["kept_in_16_bits"] == [UNSUITED]
    assert UNSUITED in done.stdout
