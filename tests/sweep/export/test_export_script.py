"""The exported script trains what was measured: the same tensors, steps and optimizer, for real."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from search_spaces.config import WEIGHT_DECAY, TrialConfig
from storage.records import Measured
from sweep.export.formats import export, exported
from sweep.training import eight_bit
from sweep.training.adapters import attached
from sweep.training.step import TrainingLoop
from tests.sweep.export.studies import a_study, imported
from tests.sweep.training.tiny import TINY, tiny_base, tiny_config, trial_on

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep to one thread: several cost tensors this small more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny model's random weights and a tokenizer of a few words."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY.config)).save_pretrained(directory)
    vocabulary = {word: index for index, word in enumerate(("<unk>", "<s>", "</s>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)
    return directory


def some_texts() -> list[dict[str, str]]:
    """Return forty texts of nine to forty-five words."""
    return [{"text": " ".join(WORDS * (1 + index % 5))} for index in range(40)]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scripts that are imported here find the kernels that `sweep export -o` puts beside them;
    a process has their operators once."""
    monkeypatch.setitem(sys.modules, "eight_bit", eight_bit)


def script_of(config: TrialConfig, directory: Path) -> ModuleType:
    """Return the exported script as a module."""
    text = export(a_study(config, model=TINY), format="script")
    return imported(text, directory / "exported_script.py")


def described(model: PreTrainedModel) -> dict[str, Any]:
    """Return what of a model decides memory and speed."""
    return {
        "tensors": {
            name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()
        },
        "products": {n: m.products for n, m in model.named_modules() if hasattr(m, "products")},
        "recomputed": [layer.gradient_checkpointing for layer in model.model.layers],
        "attention": model.config._attn_implementation,
        "cache": model.config.use_cache,
        "scaling": {
            m.scaling["default"]
            for m in model.modules()
            if hasattr(m, "scaling") and isinstance(m.scaling, dict)
        },
    }


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"upcast_fp32": False, "checkpoint_fraction": 0.0, "target_modules": "all-linear"},
        {"checkpoint_fraction": 0.5, "lora_rank": 4, "lora_alpha": 6.0, "target_modules": "qv"},
        {"checkpoint_fraction": 0.1, "quantization": "fp4", "double_quant": False},
        {"quantization": "none", "target_modules": ("up_proj",), "attention": "eager"},
        {"quantization": "none", "upcast_fp32": False, "compute_dtype": "fp32"},
        {"quantization": "fp8", "compute_dtype": "fp8"},
        {"quantization": "int8", "compute_dtype": "int8", "upcast_fp32": False},
        {"quantization": "nf4", "compute_dtype": "int8", "target_modules": "all-linear"},
        {"quantization": "fp8", "compute_dtype": "bf16"},
        {"quantized_fraction": 0.5},
        {"quantized_fraction": 0.75, "upcast_fp32": False, "target_modules": "all-linear"},
    ],
    ids=str,
)
def test_the_script_builds_what_was_measured(
    knobs: dict[str, Any], weights: Path, tmp_path: Path
) -> None:
    config = tiny_config(**knobs)
    built = script_of(config, tmp_path).load_model(str(weights)).get_base_model()
    with tiny_base(config) as base, attached(base, config):
        assert described(built) == described(base.model)


@pytest.mark.parametrize(
    ("optimizer", "compute"), [("adamw_8bit", "bf16"), ("adamw_torch_fused", "fp8")]
)
def test_the_script_takes_the_steps_that_were_measured(
    optimizer: str, compute: str, tmp_path: Path
) -> None:
    config = tiny_config(
        optimizer=optimizer, effective_batch_size=8, learning_rate=3e-4, compute_dtype=compute
    )
    arguments = script_of(config, tmp_path).training_arguments(str(tmp_path / "out"), 3)
    assert arguments.per_device_train_batch_size == config.micro_batch_size
    assert arguments.gradient_accumulation_steps == config.accumulation_steps
    assert arguments.optim.value == config.optimizer
    assert (arguments.bf16, arguments.fp16) == (True, False)
    with tiny_base(config) as base, attached(base, config) as attachment:
        measured = TrainingLoop(attachment, config, seed=0).optimizer
        group = measured.param_groups[0]
        assert (group["initial_lr"], group["weight_decay"]) == (3e-4, WEIGHT_DECAY)
    assert arguments.learning_rate == 3e-4


def test_texts_are_joined_into_full_rows_and_every_token_is_kept(
    weights: Path, tmp_path: Path
) -> None:
    script = script_of(tiny_config(seq_len=32), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(weights)
    source = tmp_path / "texts.jsonl"
    source.write_text("\n".join(map(json.dumps, some_texts())))
    rows = script.packed(script.read(str(source), tokenizer))
    tokens = sum(9 * (1 + index % 5) + 1 for index in range(40))
    assert len(rows) == tokens // 32
    assert {len(row) for row in rows} == {32}
    joined = torch.cat(rows).tolist()
    assert joined[:10] == [*range(3, 12), tokenizer.eos_token_id]
    batch = script.collate(rows[:2])
    assert set(batch) == {"input_ids", "labels"}
    assert torch.equal(batch["input_ids"], batch["labels"])


@pytest.mark.parametrize(
    ("line", "complaint"),
    [({"prompt": "x"}, "no column 'text'"), ({"text": "a"}, "2 tokens")],
)
def test_data_that_cannot_be_trained_on_is_refused(
    line: dict[str, str], complaint: str, weights: Path, tmp_path: Path
) -> None:
    script, tokenizer = script_of(tiny_config(), tmp_path), AutoTokenizer.from_pretrained(weights)
    (tmp_path / "one.jsonl").write_text(json.dumps(line))
    with pytest.raises(SystemExit, match=complaint):
        script.packed(script.read(str(tmp_path / "one.jsonl"), tokenizer))


OWN_OPTIONS = {
    "trl": {
        *("model_name_or_path", "dtype", "attn_implementation", "load_in_4bit", "use_peft"),
        *("bnb_4bit_quant_type", "use_bnb_nested_quant", "lora_r", "lora_alpha", "lora_dropout"),
        *("lora_target_modules", "datasets", "packing", "packing_strategy", "max_length"),
        "loss_type",
    },
    "llama-factory": {
        *("model_name_or_path", "quantization_method", "quantization_bit", "quantization_type"),
        *("double_quantization", "stage", "finetuning_type", "lora_rank", "lora_alpha"),
        *("lora_dropout", "lora_target", "dataset", "dataset_dir", "cutoff_len", "flash_attn"),
        *("upcast_layernorm", "disable_gradient_checkpointing", "use_reentrant_gc"),
        "enable_liger_kernel",
    },
}
"""Options that these trainers add to transformers' own."""


@pytest.mark.parametrize("format", OWN_OPTIONS)
def test_every_other_option_is_one_of_transformers(format: str) -> None:
    config = TrialConfig(kernels="liger", checkpoint_fraction=0.5)
    options = yaml.safe_load(export(a_study(config, model=TINY), format=format))
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set(options) - OWN_OPTIONS[format] - known == set()


def test_the_first_steps_of_a_run_are_not_its_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = script_of(tiny_config(seq_len=32), tmp_path)
    moments = iter((10.0, 17.0, 19.0, 20.5, 21.5, 22.5, 23.5))
    monkeypatch.setattr(script.time, "perf_counter", lambda: next(moments))
    clock = script.StepClock()
    clock.on_train_begin()
    for _ in range(6):
        with monkeypatch.context() as later:
            if clock.begun:
                later.setattr(clock, "mark", pytest.fail)
            clock.on_step_begin()
        clock.on_step_end()
    assert clock.seconds() == [7.0, 2.0, 1.5, 1.0, 1.0, 1.0]
    reached = script.reached_by(clock, train_loss=1.0)
    assert (reached["steps"], reached["step_seconds"]) == (6, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quantization": "fp8", "compute_dtype": "fp8", "upcast_fp32": False},
        {"quantization": "nf4", "compute_dtype": "int8"},
    ],
    ids=str,
)
def test_the_script_trains_and_its_numbers_are_the_measured_ones(
    settings: dict[str, Any], weights: Path, tmp_path: Path
) -> None:
    config = tiny_config(
        lora_rank=4, effective_batch_size=4, checkpoint_fraction=0.5, lora_dropout=0.1, **settings
    )
    with tiny_base(config) as base:
        outcome = trial_on(base, config).run()
    assert isinstance(outcome, Measured)
    study = a_study(config, measurement=outcome.measurement, model=TINY)
    names = ("train.py", "adapter", "texts.jsonl", "metrics.json")
    script, output, texts, metrics = (tmp_path / name for name in names)
    texts.write_text("\n".join(map(json.dumps, some_texts())))
    found = exported(study, format="script")
    for name, text in {"train.py": found.text, **found.beside}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, str(script), "--model", str(weights), "--data", str(texts)),
            *("--output", str(output), "--max-steps", "5", "--metrics", str(metrics)),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ
        | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    count = outcome.measurement.trainable_parameters
    assert f"trainable parameters: {count:,} (measured: {count:,})" in done.stdout
    assert "not the model that was measured" not in done.stdout
    loss = float(done.stdout.partition("loss: ")[2].partition(",")[0])
    assert loss == pytest.approx(6.2, abs=1.0), "of random weights over 512 words: ln 512"
    reached = json.loads(metrics.read_text())
    assert reached["steps"] == 5
    assert reached["train_loss"] == pytest.approx(loss, abs=1e-4)
    assert reached["tokens_per_second"] * reached["step_seconds"] == pytest.approx(
        config.tokens_per_step
    )
    assert reached["peak_allocated_bytes"] is None, "on a CPU nothing counts it"
    assert f"tokens/s: {reached['tokens_per_second']:,.0f} at the median of 5 steps" in done.stdout
    adapter = json.loads((output / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], adapter["lora_dropout"]) == (4, 8, 0.1)
    assert set(adapter["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert (output / "adapter_model.safetensors").stat().st_size > 4 * count
    trained_on = json.loads((output / "training.json").read_text())["config"]
    assert trained_on["quantization"] == config.quantization
