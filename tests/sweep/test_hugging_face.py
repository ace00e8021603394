"""What goes into transformers, PEFT and TRL trains what was measured, and says what it cannot."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.models import load_model_spec
from sweep.export.record import Record, RecordedModel, record_of
from sweep.hugging_face import (
    ThroughputCallback,
    load_model,
    model_kwargs,
    peft_config,
    training_arguments,
    trl_args,
)
from sweep.training.adapters import attached
from tests.sweep.export.studies import a_study, export
from tests.sweep.export.test_export_script import described
from tests.sweep.export.weights import saved_model
from tests.sweep.training.tiny import TINY, tiny_base, tiny_config


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    saved_model(directory)
    return str(directory)


def a_recipe(config: TrialConfig) -> Record:
    return record_of(a_study(config, model=TINY))


def rows(recipe: Record, count: int = 16) -> list[dict[str, Any]]:
    tokens = torch.randint(0, 400, (count, recipe.config.seq_len)).tolist()
    return [{"input_ids": row, "labels": row} for row in tokens]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"upcast_fp32": False, "checkpoint_fraction": 0.0, "target_modules": "all-linear"},
        {"checkpoint_fraction": 0.5, "lora_rank": 4, "lora_alpha": 6.0, "adapter_dtype": "bf16"},
        {"quantization": "none", "target_modules": ("up_proj",), "attention": "eager"},
        {"quantized_fraction": 0.5, "quantization": "fp4", "double_quant": False},
        {"quantization": "fp8", "compute_dtype": "fp8"},
        {"quantization": "nf4", "compute_dtype": "int8", "upcast_fp32": False},
    ],
    ids=str,
)
def test_a_loaded_model_is_the_one_of_the_trial_and_stays_so_in_trainer(
    settings: dict[str, Any], weights: str, tmp_path: Path
) -> None:
    config = tiny_config(**settings)
    recipe = a_recipe(config)
    model = load_model(recipe, weights, seed=0)
    arguments = training_arguments(recipe, output_dir=str(tmp_path), max_steps=2)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows(recipe))
    assert trainer.train().global_step == 2
    with tiny_base(config) as base, attached(base, config):
        assert described(model.get_base_model()) == described(base.model)


def test_the_libraries_own_way_says_what_it_leaves_out(weights: str, tmp_path: Path) -> None:
    recipe = a_recipe(tiny_config(compile=True, expandable_segments=True))
    with pytest.warns(UserWarning, match="Not done by from_pretrained") as warned:
        kwargs = model_kwargs(recipe)
    said = str(warned[0].message)
    assert all(key in said for key in ("upcast_fp32", "compile true", "expandable_segments"))
    model = AutoModelForCausalLM.from_pretrained(weights, **kwargs)
    model = get_peft_model(model, peft_config(recipe))
    arguments = training_arguments(recipe, output_dir=str(tmp_path), max_steps=2)
    assert Trainer(model=model, args=arguments, train_dataset=rows(recipe)).train().global_step == 2
    assert all(layer.gradient_checkpointing for layer in model.get_base_model().model.layers)


def test_the_libraries_own_way_is_silent_where_nothing_is_left_out(weights: str) -> None:
    config = tiny_config(upcast_fp32=False, checkpoint_fraction=0.0, quantized_fraction=0.5)
    kwargs = model_kwargs(a_recipe(config))
    model = AutoModelForCausalLM.from_pretrained(weights, **kwargs)
    model = get_peft_model(model, peft_config(a_recipe(config)))
    with tiny_base(config) as base, attached(base, config):
        tensors = described(model.get_base_model())["tensors"]
        assert tensors == described(base.model)["tensors"]


@pytest.mark.filterwarnings("ignore")
def test_trl_is_told_what_its_file_says_and_trains(weights: str, tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer
    from trl.trainer import utils

    config = tiny_config(optimizer="adamw_torch_fused", effective_batch_size=4)
    recipe = a_recipe(config)
    with pytest.warns(UserWarning, match="(?s)Not done by SFTTrainer:.*kernels hf: TRL") as warned:
        arguments = trl_args(recipe, output_dir=str(tmp_path), max_steps=2)
    assert "upcast_fp32" in str(warned[0].message)
    assert type(arguments) is SFTConfig
    written = yaml.safe_load(export(a_study(config, model=TINY), format="trl"))
    known = {field.name for field in dataclasses.fields(SFTConfig)} & written.keys()
    here = {"output_dir", "report_to", "accelerator_config"}
    assert {key: getattr(arguments, key) for key in known - here} == {
        key: written[key] for key in known - here
    }
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(weights, **model_kwargs(recipe)),
        args=arguments,
        peft_config=peft_config(recipe),
        train_dataset=Dataset.from_list([{"text": "the quick brown fox " * 9}] * 20),
        processing_class=AutoTokenizer.from_pretrained(weights),
        callbacks=[said := ThroughputCallback(recipe, lambda _: None)],
    )
    if utils._ChunkedLogProbFunction is None:
        return  # TRL 1.15's head needs Triton, so there it is built and takes no step.
    assert trainer.train().global_step == 2
    assert said.tokens_per_second


def test_what_cannot_be_loaded_as_measured_is_refused_or_said(weights: str) -> None:
    sharded = tiny_config(data_parallel=2, sharding="fsdp")
    with pytest.raises(InputError, match="sharding fsdp"):
        load_model(a_recipe(sharded), weights, seed=0)
    with pytest.raises(InputError, match="no base in fp8 as measured: use load_model"):
        model_kwargs(a_recipe(tiny_config(quantization="fp8")))
    recipe = a_recipe(tiny_config())
    demo = RecordedModel(**load_model_spec("demo").to_json())
    recipe = recipe.model_copy(update={"model": demo})
    with pytest.warns(UserWarning, match="is no demo, which was measured"):
        load_model(recipe, weights, seed=0)


class Marks:
    """A device whose steps take as long as is said."""

    def __init__(self, seconds: list[float]) -> None:
        self._moments = itertools.accumulate(seconds, initial=0.0)

    def mark(self) -> Any:
        mark = dataclasses.make_dataclass("Mark", ["at"])(next(self._moments))
        mark.wait = lambda: None
        mark.seconds_since = lambda earlier: mark.at - earlier.at
        return mark


STEPS = [9.0] * 5 + [2.0] * 4
"""Seconds of each; the first five are slow, as they warm up."""


@pytest.mark.parametrize(
    ("labels", "promised", "words"),
    [
        ([7] * 16 + [-100] * 16, 16.0, r"16\.0 tokens/s \(1 of what was promised\)"),
        ([7] * 16 + [-100] * 16, 32.0, r"16\.0 tokens/s \(0\.5 of what was promised\)"),
        (None, 16.0, "no tokens/s, as batches have no labels"),
    ],
)
def test_the_callback_counts_what_carries_loss_and_says_what_came_of_the_promise(
    labels: list[int] | None, promised: float, words: str, tmp_path: Path
) -> None:
    recipe = a_recipe(tiny_config(checkpoint_fraction=0.0))
    measurement = recipe.measurement.model_copy(update={"tokens_per_second": promised})
    recipe = recipe.model_copy(update={"measurement": measurement})
    lines: list[str] = []
    callback = ThroughputCallback(recipe, lines.append)
    callback._device = Marks(STEPS)
    arguments = training_arguments(recipe, output_dir=str(tmp_path), max_steps=len(STEPS))
    inner = torch.nn.Linear(1, 1)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: torch.Tensor, labels: Any = None) -> dict[str, Any]:
            return {"loss": self.inner(input_ids[:, :1].float()).mean()}

    row = {"input_ids": [3] * 32} | ({} if labels is None else {"labels": labels})
    Trainer(model=Model(), args=arguments, train_dataset=[row] * 32, callbacks=[callback]).train()
    assert lines[0].startswith("Promised: ")
    assert re.match(f"Reached: {words}; no peak, which a CPU does not count", lines[1])
    assert len(lines) == (3 if promised == 32.0 else 2)
    if labels is not None:
        # Two rows of 16 labels in a step of two seconds; the first five steps count for nothing.
        assert callback.tokens_per_second == pytest.approx(16.0)
    assert "tokens/s 50.0 % below the record" in lines[-1] or promised == 16.0
