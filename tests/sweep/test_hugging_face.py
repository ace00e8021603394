"""What goes into transformers, PEFT and TRL trains what was measured, and says what it cannot."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.export.record import Record, RecordedModel, record_of
from tests.lazy import lazily
from tests.sweep.export.studies import a_study, export, some_dataset
from tests.sweep.export.weights import saved_model
from tests.sweep.training.tiny import TINY, tiny_config, tiny_loop

torch = lazily("torch")
peft = lazily("peft")
transformers = lazily("transformers")
ours = lazily("qlora_sweep.sweep.hugging_face")
exported = lazily("tests.sweep.export.test_export_script")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    saved_model(directory)
    return str(directory)


def a_recipe(config: TrialConfig) -> Record:
    return record_of(a_study(config, model=TINY))


def trained(model: Any, recipe: Record, output: Path) -> int:
    """Return the steps that transformers' Trainer takes of a model on random rows."""
    tokens = torch.randint(0, 400, (16, recipe.config.seq_len)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = ours.training_arguments(recipe, output_dir=str(output), max_steps=2)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    return int(trainer.train().global_step)


def loaded(recipe: Record, weights: str) -> Any:
    """Return a model that was loaded the libraries' own way."""
    kwargs = ours.model_kwargs(recipe)
    model = transformers.AutoModelForCausalLM.from_pretrained(weights, **kwargs)
    return peft.get_peft_model(model, ours.peft_config(recipe))


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
    model = ours.load_model(recipe, weights, seed=0)
    assert trained(model, recipe, tmp_path) == 2
    with tiny_loop(config) as loop:
        base = loop.attached.model.get_base_model()
        assert exported.described(model.get_base_model()) == exported.described(base)


def test_the_libraries_own_way_says_what_it_leaves_out(weights: str, tmp_path: Path) -> None:
    recipe = a_recipe(tiny_config(compile=True, expandable_segments=True))
    with pytest.warns(UserWarning, match="Not done by from_pretrained") as warned:
        model = loaded(recipe, weights)
    said = str(warned[0].message)
    assert all(key in said for key in ("upcast_fp32", "compile true", "expandable_segments"))
    assert trained(model, recipe, tmp_path) == 2
    assert all(layer.gradient_checkpointing for layer in model.get_base_model().model.layers)
    # It is silent where nothing is left out.
    config = tiny_config(upcast_fp32=False, checkpoint_fraction=0.0, quantized_fraction=0.5)
    model = loaded(a_recipe(config), weights)
    with tiny_loop(config) as loop:
        base = loop.attached.model.get_base_model()
        tensors = exported.described(model.get_base_model())["tensors"]
        assert tensors == exported.described(base)["tensors"]


def trained_by(trainer: Any, arguments: Any, recipe: Record, weights: str, rows: Any) -> Any:
    """Take two steps in one of TRL's trainers; return it with the callback that counts."""
    from datasets import Dataset

    said = ours.ThroughputCallback(recipe, lambda _: None)
    kwargs = ours.model_kwargs(recipe)
    ready = trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(weights, **kwargs),
        args=arguments,
        peft_config=ours.peft_config(recipe),
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(weights),
        callbacks=[said],
    )
    assert ready.train().global_step == 2
    return ready, said


@pytest.mark.filterwarnings("ignore")
def test_trl_is_told_what_its_file_says_and_trains(weights: str, tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    config = tiny_config(optimizer="adamw_torch_fused", effective_batch_size=4)
    recipe = a_recipe(config)
    with pytest.warns(UserWarning, match="(?s)Not done by SFTTrainer:.*kernels hf: TRL") as warned:
        arguments = ours.trl_args(recipe, output_dir=str(tmp_path), max_steps=2)
    assert "upcast_fp32" in str(warned[0].message)
    assert type(arguments) is SFTConfig
    written = yaml.safe_load(export(a_study(config, model=TINY), format="trl"))
    known = {field.name for field in dataclasses.fields(SFTConfig)} & written.keys()
    for key in known - {"output_dir", "report_to", "accelerator_config"}:
        assert getattr(arguments, key) == written[key], key
    rows = [{"text": "the quick brown fox " * 9}] * 20
    _, said = trained_by(SFTTrainer, arguments, recipe, weights, rows)
    assert said.tokens_per_second


@pytest.mark.filterwarnings("ignore")
def test_trl_is_told_of_a_template_that_marks_the_assistants_turns() -> None:
    dataset = some_dataset("messages", completions_only=True, marked_template="{{ messages }}")
    arguments = ours.trl_args(record_of(a_study(tiny_config(), model=TINY, dataset=dataset)))
    assert arguments.assistant_only_loss
    assert Path(arguments.chat_template_path).read_text() == "{{ messages }}"


@pytest.mark.filterwarnings("ignore")
def test_trl_trains_on_pairs_and_the_reference_counts_no_tokens(
    weights: str, tmp_path: Path
) -> None:
    from trl import DPOConfig, DPOTrainer

    recipe = a_recipe(tiny_config(method="dpo", loss_type="ipo", seq_len=64))
    arguments = ours.trl_args(recipe, output_dir=str(tmp_path), max_steps=2)
    assert (type(arguments), arguments.loss_type) == (DPOConfig, ["ipo"])
    pair = {"prompt": "the quick ", "chosen": "brown fox", "rejected": "lazy dog"}
    trainer, said = trained_by(DPOTrainer, arguments, recipe, weights, [pair] * 8)
    supervised = next(iter(trainer.get_train_dataloader()))["completion_mask"].sum()
    assert said.tokens_per_second is not None
    assert said.tokens_per_second * said.seconds()[1] == pytest.approx(int(supervised))


def test_what_cannot_be_loaded_as_measured_is_refused_or_said(weights: str) -> None:
    sharded = tiny_config(data_parallel=2, sharding="fsdp")
    with pytest.raises(InputError, match="sharding fsdp"):
        ours.load_model(a_recipe(sharded), weights, seed=0)
    with pytest.raises(InputError, match="no base in fp8 as measured: use load_model"):
        ours.model_kwargs(a_recipe(tiny_config(quantization="fp8")))
    recipe = a_recipe(tiny_config())
    demo = RecordedModel(**load_model_spec("demo").to_json())
    recipe = recipe.model_copy(update={"model": demo})
    with pytest.warns(UserWarning, match="is no demo, which was measured"):
        ours.load_model(recipe, weights, seed=0)


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
LABELS = [7] * 16 + [-100] * 16


@pytest.mark.parametrize(
    ("labels", "promised", "words"),
    [
        (LABELS, 16.0, [r"16\.0 tokens/s \(1 of the promise\)"]),
        (
            LABELS,
            32.0,
            [r"16\.0 tokens/s \(0\.5 of the promise", r".*tokens/s 50\.0 % below the record"],
        ),
        (None, 16.0, ["no tokens/s, as batches have no labels"]),
    ],
)
def test_the_callback_counts_what_carries_loss_and_says_what_came_of_the_promise(
    labels: list[int] | None, promised: float, words: list[str], tmp_path: Path
) -> None:
    recipe = a_recipe(tiny_config(checkpoint_fraction=0.0))
    measurement = recipe.measurement.model_copy(update={"tokens_per_second": promised})
    recipe = recipe.model_copy(update={"measurement": measurement})
    lines: list[str] = []
    callback = ours.ThroughputCallback(recipe, lines.append)
    callback._device = Marks(STEPS)
    arguments = ours.training_arguments(recipe, output_dir=str(tmp_path), max_steps=len(STEPS))

    class Model(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(1, 1)

        def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
            return {"loss": self.inner(input_ids[:, :1].float()).mean()}

    rows = [{"input_ids": [3] * 32} | ({} if labels is None else {"labels": labels})] * 32
    given = {"args": arguments, "train_dataset": rows, "callbacks": [callback]}
    transformers.Trainer(model=Model(), **given).train()
    promise, reached, *further = lines
    assert promise.startswith("Promised: ")
    assert re.match(f"Reached: {words[0]}.*; no peak, which a CPU does not count", reached)
    assert len(further) == len(words) - 1
    assert all(map(re.match, words[1:], further))
    if labels is not None:
        # Two rows of 16 labels in a step of two seconds; the first five steps count for nothing.
        assert callback.tokens_per_second == pytest.approx(16.0)
