"""TRL's own command takes the exported file: its trainer is built from it and trains two steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.sweep.data.marking import marked
from qlora_sweep.sweep.export.formats import exported
from tests.sweep.export.studies import PAIR, a_study, export, some_dataset
from tests.sweep.export.test_export_formats import studies
from tests.sweep.export.weights import written_dataset
from tests.sweep.training.tiny import tiny_config
from tests.tables import cases

pytestmark = [
    # TRL deprecates Liger, and pins nothing in a loader that never has a GPU.
    pytest.mark.filterwarnings("ignore"),
]


def built(
    trainer: Any, script: Any, study: StudySnapshot, home: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Return the trainer that a command of TRL's makes of a study's file."""
    file = home / "trl.yaml"
    for path, text in exported(study, format="trl").files(file).items():
        path.write_text(text, encoding="utf-8")
    typed = ["--config", str(file), "--output_dir", str(home / "out")]
    typed += ["--use_cpu", "true", "--max_steps", "2"]
    made: list[Any] = []
    with monkeypatch.context() as patch:
        patch.chdir(home)
        patch.setattr(trainer, "train", lambda self, **_: made.append(self))
        patch.setattr(trainer, "save_model", lambda *_: None)
        told = script.make_parser().parse_args_and_config(typed, fail_with_unknown_args=True)
        script.main(*told)
    (found,) = made
    return found


def test_trl_knows_every_key_and_reads_what_was_measured(tmp_path: Path) -> None:
    from trl.scripts import sft
    from trl.trainer.utils import get_peft_config

    for study in studies():
        options = yaml.safe_load(export(study, format="trl"))
        file = tmp_path / "trl.yaml"
        file.write_text(yaml.safe_dump(options | {"use_cpu": True}), encoding="utf-8")
        # A key that no class of TRL's has is refused, also one of a dataset.
        _, training, model, data = sft.make_parser().parse_args_and_config(
            ["--config", str(file)], fail_with_unknown_args=True
        )
        assert training.accelerator_config.non_blocking is True
        assert len(data.datasets) == 1
        (config,) = (record.config for record in study.records)
        adapters, asked = get_peft_config(model), json.loads(export(study, format="peft"))
        assert (adapters.r, adapters.lora_alpha) == (asked["r"], round(asked["lora_alpha"]))
        assert (training.max_length, training.optim) == (config.seq_len, config.optimizer)
        assert (model.load_in_4bit, model.load_in_8bit) == (
            config.is_4bit,
            config.is_quantized and not config.is_4bit,
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "ipo", "dpo_beta": 0.3, "lora_dropout": 0.1},
        {"reference": "precomputed", "packing": "grouped"},
    ],
    ids=str,
)
def test_trl_trains_on_pairs_by_a_file(
    settings: dict[str, Any],
    model: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from trl import DPOTrainer
    from trl.scripts import dpo

    source = written_dataset(tmp_path / "data.jsonl", "preference")
    dataset = some_dataset("preference", source=str(source), columns=PAIR)
    config = tiny_config(method="dpo", seq_len=64, **settings)
    study = a_study(config, model=model, dataset=dataset)
    assert "trl dpo --config" in export(study, format="trl")
    trainer = built(DPOTrainer, dpo, study, tmp_path, monkeypatch)
    modules = trainer.model.named_modules()
    drops = {getattr(m, "p", 0.0) for n, m in modules if n.endswith("lora_dropout.default")}
    assert drops == {config.lora_dropout}
    assert (trainer.loss_types, trainer.beta) == ([config.loss_type], config.dpo_beta)
    assert trainer.precompute_ref_logps == (config.reference == "precomputed")
    assert len(trainer.eval_dataset) == 3, "5 % of the pairs are held out"
    assert trainer.train().global_step == 2


@pytest.mark.parametrize(
    ("format", "loss_type", "words"),
    [("unsloth", "sigmoid", "no test has tried"), ("llama-factory", "ipo", "trains the sigmoid")],
)
def test_what_would_train_on_pairs_otherwise_is_refused(
    format: str, loss_type: Any, words: str
) -> None:
    with pytest.raises(InputError, match=f"--format {format}: .*{words}.*use format script"):
        export(a_study(TrialConfig(method="dpo", loss_type=loss_type)), format=format)


def test_trl_learns_the_assistants_turns_of_a_model_whose_template_marks_none(
    model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl import SFTTrainer
    from trl.scripts import sft

    source = written_dataset(tmp_path / "data.jsonl", "messages")
    template = marked(
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    dataset = some_dataset(
        "messages", completions_only=True, source=str(source), marked_template=template
    )
    study = a_study(tiny_config(seq_len=128), model=model, dataset=dataset)
    trainer = built(SFTTrainer, sft, study, tmp_path, monkeypatch)
    for row in trainer.train_dataset:
        learned = [token for token in row["labels"] if token != -100]
        said = trainer.processing_class.decode(row["input_ids"]).partition("<|assistant|>")[2]
        assert trainer.processing_class.decode(learned) == said
    # A study of an older version does not know the template: its file is as it was.
    known = export(
        a_study(tiny_config(), model=model, dataset=some_dataset("messages")), format="trl"
    )
    assert "chat_template_path" not in yaml.safe_load(known)


@pytest.mark.parametrize("targets", [("up_proj",), ("c.proj",), "qv"])
def test_trl_puts_adapters_on_the_layers_that_are_named(targets: Any) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from trl import ModelConfig

    study = a_study(TrialConfig(target_modules=targets))
    names = yaml.safe_load(export(study, format="trl"))["lora_target_modules"]
    # Of a list of one it makes a text.
    taken = ModelConfig(lora_target_modules=names).lora_target_modules
    asked = json.loads(export(study, format="peft"))["target_modules"]
    paths = ("up_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.xup_proj", "a.c.proj")
    for path in (*paths, "a.cxproj", "model.q_proj", "model.v_proj.x"):
        found = check_target_module_exists(LoraConfig(target_modules=taken), path)
        wanted = check_target_module_exists(LoraConfig(target_modules=asked), path)
        assert bool(found) is bool(wanted), path


@pytest.mark.parametrize(
    ("kind", "settings", "completions_only"),
    cases(
        """
        null | {kernels: fused-loss} | false
        null | {kernels: liger} | false
        prompt-completion | {packing: grouped} | true
        messages | {packing: packed} | true
        """
    ),
)
def test_trl_trains_two_steps_of_a_file(
    kind: Any,
    settings: dict[str, Any],
    completions_only: bool,
    model: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from trl import SFTTrainer
    from trl.scripts import sft

    source = written_dataset(tmp_path / "data.jsonl", kind or "text")
    dataset = kind and some_dataset(kind, completions_only=completions_only, source=str(source))
    config = tiny_config(seq_len=128, **settings)
    study = a_study(config, model=model, dataset=dataset)
    trainer = built(SFTTrainer, sft, study, tmp_path, monkeypatch)
    adapters = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    assert adapters == {torch.bfloat16}, "as the file says at its top"
    if kind is None:
        lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
        assert set(lengths[:-1]) == {128}, "joined and cut; the last is what is left over"
    else:
        assert len(trainer.eval_dataset) == 3, "5 % of the examples are held out"
    batch = next(iter(trainer.get_train_dataloader()))
    assert ((batch["labels"] != -100).float().mean() < 0.95) or not completions_only
    # Liger's layers need a GPU.
    if config.kernels != "liger":
        assert trainer.train().global_step == 2
        assert 5.0 < trainer.state.log_history[-1]["train_loss"] < 7.0, "of random weights: ln 512"
