"""A script of a model whose experts are packed trains them so; other trainers get no file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage.definition import StudySnapshot
from tests import families
from tests.sweep.export.studies import a_study, export, some_dataset
from tests.sweep.export.test_export_script import described
from tests.sweep.export.weights import prepared_by_sweep, with_tokenizer, written_dataset
from tests.sweep.finetuning.trainings import job, run

pytestmark = pytest.mark.filterwarnings("default")
CONFIG = families.config_of("qwen3_moe", "all-linear", "nf4").changed(
    seq_len=64, micro_batch_size=2, upcast_fp32=False
)


@pytest.fixture
def mixture(tmp_path: Path) -> ModelSpec:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    directory = tmp_path / "mixture"
    spec = families.spec_of("qwen3_moe")
    config = {**spec.config, "vocab_size": 1024}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(directory)
    with_tokenizer(directory)
    return dataclasses.replace(spec, config=config, source="directory", path=directory)


def test_a_script_trains_what_sweep_train_trains_and_its_adapter_loads_elsewhere(
    mixture: ModelSpec,
    script_of: Callable[[StudySnapshot], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    source = written_dataset(tmp_path / "data.jsonl", "text", rows=20)
    only = {"tokenizer": str(mixture.path), "completions_only": False}
    prepared = prepared_by_sweep(source, "text", **only)
    ours = job(
        tmp_path / "ours",
        prepared,
        config=CONFIG,
        model=mixture.to_json(),
        weights="pretrained",
        max_steps=2,
    )
    run(ours)
    study = a_study(CONFIG, model=mixture, dataset=some_dataset("text", source=str(source)))
    theirs = tmp_path / "theirs"
    monkeypatch.setattr("sys.argv", ["train.py", "--output", str(theirs), "--max-steps", "2"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script_of(study).main()
    name = "adapter_model.safetensors"
    found = load_file(theirs / name)
    assert set(found) == set(load_file(next((tmp_path / "ours").rglob(name))))
    assert any(".experts." in key for key in found)
    model = AutoModelForCausalLM.from_pretrained(mixture.path)
    loaded = PeftModel.from_pretrained(model, theirs).state_dict()
    wide = [key for key in loaded if ".experts." in key and "lora_B" in key]
    assert any(bool(loaded[key].any()) for key in wide)


@pytest.mark.parametrize(
    "settings",
    [{"offload_fraction": 0.5}, {"quantization": "int8"}, {"quantization": "fp8"}],
    ids=str,
)
def test_a_script_has_experts_on_the_host_and_in_8_bits_as_the_trial_had(
    mixture: ModelSpec,
    script_of: Callable[[StudySnapshot], ModuleType],
    settings: dict[str, Any],
) -> None:
    from qlora_sweep.sweep.training.experts import expert_modules

    config = CONFIG.changed(target_modules="attention", **settings)
    script = script_of(a_study(config, model=mixture))
    model = script.load_model(str(mixture.path)).get_base_model()
    held = [experts for _, experts in expert_modules(model)]
    on_host = {index for index, experts in enumerate(held) if experts.is_on_host}
    assert on_host == config.offloaded_layers(len(held))
    kinds = {getattr(experts, "kind", "nf4") for experts in held}
    assert kinds == {config.quantization}
    tokens = torch.arange(30)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()


@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_adapters_on_named_experts_are_in_the_script_as_in_the_trial(
    quantization: str, mixture: ModelSpec, script_of: Callable[[StudySnapshot], ModuleType]
) -> None:
    import torch

    from qlora_sweep.sweep.training.adapters import attached
    from qlora_sweep.sweep.training.model import build_base

    config = CONFIG.changed(
        target_modules=("q_proj", "gate_up_proj", "down_proj"), quantization=quantization
    )
    built = script_of(a_study(config, model=mixture)).load_model(str(mixture.path))
    device = torch.device("cpu")
    base = build_base(config, spec=mixture, weights="pretrained", device=device, seed=0)
    with attached(base, config) as attachment:
        measured = described(attachment.model.get_base_model())
    assert described(built.get_base_model()) == measured
    base.close()


def test_an_adapter_file_names_the_weights_of_experts(mixture: ModelSpec) -> None:
    config = CONFIG.changed(target_modules=("q_proj", "gate_up_proj"))
    values = json.loads(export(a_study(config, model=mixture), format="peft"))
    assert values["target_modules"] == ["q_proj"]
    assert values["target_parameters"] == ["experts.gate_up_proj"]


@pytest.mark.parametrize("trainer", ["trl", "axolotl", "llama-factory", "unsloth"])
def test_a_trainer_that_would_keep_experts_in_16_bits_gets_no_file(
    trainer: str, mixture: ModelSpec
) -> None:
    with pytest.raises(InputError, match="experts in 4 bits"):
        export(a_study(CONFIG, model=mixture), format=trainer)
    named = CONFIG.changed(quantization="none", target_modules=("q_proj", "gate_up_proj"))
    with pytest.raises(InputError, match="use format script"):
        export(a_study(named, model=mixture), format=trainer)
