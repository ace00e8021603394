"""TRL's own command takes the exported file: its trainer is built from it and trains two steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from search_spaces.config import EIGHT_BIT, TrialConfig
from search_spaces.models import ModelSpec
from sweep.export.formats import export
from tests.sweep.export.studies import a_study, some_texts
from tests.sweep.export.test_export_formats import CONFIGS
from tests.sweep.export.test_export_keys import KINDS
from tests.sweep.export.weights import saved_model, written_texts
from tests.sweep.training.tiny import tiny_config

pytestmark = [
    # TRL deprecates Liger, and pins nothing in a loader that never has a GPU.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return saved_model(tmp_path_factory.mktemp("model"))


def trainer_of(text: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the trainer that `trl sft` builds of a file, and what its configuration said."""
    from trl import SFTTrainer
    from trl.scripts import sft

    options = {**yaml.safe_load(text), "use_cpu": True, "max_steps": 2}
    file = directory / "trl.yaml"
    file.write_text(yaml.safe_dump({**options, "output_dir": str(directory / "out")}))
    monkeypatch.chdir(directory)
    monkeypatch.setattr("sys.argv", ["trl", "--config", str(file)])
    built: list[Any] = []
    monkeypatch.setattr(SFTTrainer, "train", lambda self, **_: built.append(self))
    monkeypatch.setattr(SFTTrainer, "save_model", lambda *_: None)
    # A file with a key that no class of TRL's has is refused here.
    parsed = sft.make_parser().parse_args_and_config(fail_with_unknown_args=True)
    sft.main(*parsed)
    monkeypatch.undo()
    return built[0]


def trained(trainer: Any) -> None:
    from trl.trainer import utils

    if utils._ChunkedLogProbFunction is None:
        return  # TRL 1.15's head needs Triton, so there it is built and takes no step.
    assert trainer.train().global_step == 2
    assert 5.0 < trainer.state.log_history[-1]["train_loss"] < 7.0, "of random weights: ln 512"


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_trl_knows_every_key_and_reads_what_was_measured(number: int, tmp_path: Path) -> None:
    from trl.scripts import sft
    from trl.trainer.utils import get_peft_config

    config, kind = CONFIGS[number], (None, *KINDS)[number % 6]
    study = a_study(config, texts=None if kind is None else some_texts(kind))
    options = yaml.safe_load(export(study, format="trl"))
    file = tmp_path / "trl.yaml"
    file.write_text(yaml.safe_dump(options | {"use_cpu": True}), encoding="utf-8")
    # A key that no class of TRL's has is refused, also one of a dataset.
    _, training, model, data = sft.make_parser().parse_args_and_config(
        ["--config", str(file)], fail_with_unknown_args=True
    )
    assert training.accelerator_config.non_blocking is True
    assert len(data.datasets) == 1
    adapters = get_peft_config(model)
    asked = json.loads(export(study, format="peft"))
    assert (adapters.r, adapters.lora_dropout) == (asked["r"], asked["lora_dropout"])
    assert adapters.lora_alpha == round(asked["lora_alpha"])
    assert training.max_length == config.seq_len
    assert training.per_device_train_batch_size == config.micro_batch_size
    assert training.gradient_accumulation_steps == config.accumulation_steps
    assert (training.bf16, training.fp16) == (
        config.compute_dtype == "bf16" or config.is_8bit_compute,
        config.compute_dtype == "fp16",
    )
    assert (training.optim, training.learning_rate) == (config.optimizer, config.learning_rate)
    assert model.attn_implementation == config.attention
    assert model.load_in_4bit is config.is_4bit
    assert model.load_in_8bit is (config.quantization in EIGHT_BIT)
    if config.is_4bit:
        assert model.bnb_4bit_quant_type == config.quantization
        assert model.use_bnb_nested_quant is config.double_quant


@pytest.mark.parametrize("targets", [("up_proj",), ("c.proj",), "qv"])
def test_trl_puts_adapters_on_the_layers_that_are_named(targets: Any) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from trl import ModelConfig

    config = TrialConfig(target_modules=targets)
    names = yaml.safe_load(export(a_study(config), format="trl"))["lora_target_modules"]
    # Of a list of one it makes a text.
    taken = ModelConfig(lora_target_modules=names).lora_target_modules
    asked = json.loads(export(a_study(config), format="peft"))["target_modules"]
    paths = ("up_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.xup_proj", "a.c.proj")
    for path in (*paths, "a.cxproj", "model.q_proj", "model.v_proj.x"):
        found = check_target_module_exists(LoraConfig(target_modules=taken), path)
        wanted = check_target_module_exists(LoraConfig(target_modules=asked), path)
        assert bool(found) is bool(wanted), path


@pytest.mark.parametrize("kernels", ["hf", "fused-loss", "liger"])
def test_trl_builds_its_trainer_of_every_kernels_file(
    kernels: str, model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_texts(tmp_path / "data.jsonl", "text")
    config = tiny_config(kernels=kernels, checkpoint_fraction=0.0, upcast_fp32=False)
    trainer = trainer_of(export(a_study(config, model=model), format="trl"), tmp_path, monkeypatch)
    assert trainer.args.use_liger_kernel is (kernels == "liger")
    assert not (trainer.args.liger_kernel_config or {}).get("fused_linear_cross_entropy")
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    assert set(lengths[:-1]) == {config.seq_len}, "joined and cut; the last is what is left over"
    adapters = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    assert adapters == {torch.bfloat16}, "as the file says at its top"
    if kernels != "liger":
        trained(trainer)


@pytest.mark.parametrize(
    ("kind", "packing", "completions_only"),
    [
        ("text", "packed", False),
        ("prompt-completion", "grouped", True),
        ("instruction", "none", False),
        ("messages", "packed", True),
        ("conversations", "none", False),
    ],
)
def test_trl_trains_on_the_texts_of_a_study(
    kind: Any,
    packing: str,
    completions_only: bool,
    model: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It reads no instructions: the file says to write them as prompts and completions.
    written = "prompt-completion" if kind == "instruction" else kind
    source = str(written_texts(tmp_path / "texts.jsonl", written))
    texts = some_texts(kind, completions_only=completions_only, source=source)
    config = tiny_config(packing=packing, seq_len=128)
    text = export(a_study(config, model=model, texts=texts), format="trl")
    trainer = trainer_of(text, tmp_path, monkeypatch)
    assert len(trainer.eval_dataset) == 3, "5 % of the rows are held out"
    sampling = getattr(trainer.args.train_sampling_strategy, "value", None)
    sampling = sampling or trainer.args.train_sampling_strategy
    assert (sampling == "group_by_length") is (packing == "grouped")
    assert trainer.args.packing is (packing == "packed")
    batch = next(iter(trainer.get_train_dataloader()))
    learned = (batch["labels"] != -100).sum() / batch["labels"].numel()
    if completions_only:
        assert 0 < learned < 0.95, "a prompt carries no loss"
    trained(trainer)
