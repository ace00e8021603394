"""A study's winner in every format: nothing lost, nothing broken, and what is lost is said."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from qlora_sweep.search_spaces.config import CONFIG_KEYS, TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.learning_rates import in_words, learning_rate_of
from qlora_sweep.search_spaces.models import PART_OF, ModelSpec
from qlora_sweep.sweep.export.formats import exported, format_names, written
from qlora_sweep.sweep.export.record import record_of
from qlora_sweep.sweep.export.trainers import cases_of, trainers, unsupported
from tests.storage.builders import confirmed
from tests.sweep.export.studies import HOSTILE, MODEL, a_measurement, a_study, export, some_dataset
from tests.tables import cases

FILES = ("axolotl", "llama-factory", "trl")
KINDS: tuple[Any, ...] = ("text", "instruction", "prompt-completion", "messages", "conversations")
BASE = TrialConfig(upcast_fp32=False, checkpoint_fraction=0.0)
OTHER: dict[str, Any] = yaml.safe_load(
    """
double_quant: false
upcast_fp32: true
compile: true
expandable_segments: true
lora_rank: 64
lora_alpha: 24.5
lora_dropout: 0.05
target_modules: all-linear
micro_batch_size: 10
seq_len: 2048
effective_batch_size: 16
compute_dtype: fp16
quantization: fp4
quantized_fraction: 0.5
adapter_dtype: bf16
checkpoint_fraction: 0.3
checkpoint_offload: true
kernels: fused-loss
attention: flash_attention_2
optimizer: paged_adamw_8bit
packing: packed
learning_rate: 0.001
data_parallel: 2
sharding: fsdp
"""
)
OF_PAIRS: dict[str, Any] = {"loss_type": "ipo", "dpo_beta": 0.3, "reference": "precomputed"}
EIGHT_BITS: dict[str, Any] = {"compute_dtype": "fp8", "quantization": "fp8"}
CONFIGS = [
    TrialConfig(),
    TrialConfig(**EIGHT_BITS),
    *(BASE.model_copy(update={key: value}) for key, value in OTHER.items()),
    TrialConfig(quantization="none", kernels="liger", compute_dtype="fp32", attention="eager"),
]


@pytest.mark.parametrize(
    ("changes", "beside"),
    [
        ({"method": "dpo"}, ["preference.py", "rows.py"]),
        ({"compute_dtype": "int8"}, ["eight_bit.py", "fitting.py", "int8_products.py", "rows.py"]),
        ({"checkpoint_offload": True}, ["host_memory.py", "recomputing.py", "rows.py"]),
        ({"compile": True}, ["host_memory.py", "recomputing.py", "rows.py"]),
        ({"compile": True, "checkpoint_fraction": 0.0}, ["rows.py"]),
    ],
)
def test_a_script_and_what_lies_beside_it_need_nothing_of_ours(
    changes: dict[str, Any], beside: list[str]
) -> None:
    found = exported(a_study(TrialConfig(**changes)), format="script")
    assert sorted(found.beside) == beside
    for text in (found.text, *found.beside.values()):
        names = set[str]()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                names.add(str(node.module))
            elif isinstance(node, ast.Import):
                names.update(module.name for module in node.names)
        assert not any(name.startswith("qlora_sweep") for name in names)


def read(text: str, *, format: str) -> dict[str, Any]:
    """Return what a file says, by the names it says it with."""
    if format in ("json", "peft"):
        return dict(json.loads(text))
    if format not in ("script", "unsloth"):
        return dict(yaml.safe_load(text))
    nodes = list(ast.walk(ast.parse(text)))
    named = [
        (n.targets[0].id, n.value)
        for n in nodes
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
    ]
    named += [(n.arg, n.value) for n in nodes if isinstance(n, ast.keyword) and n.arg]
    found = {}
    for name, value in named:
        with suppress(ValueError):
            found[name] = ast.literal_eval(value)
    return found


def said(text: str) -> str:
    """Return the comments of a file as one line."""
    return " ".join(line.lstrip("#! ") for line in text.splitlines() if line.startswith("#"))


# Keys


def schema_of(name: str) -> dict[str, Any]:
    path = Path("tests/exports", f"{name.replace('-', '_')}_keys.json")
    return dict(json.loads(path.read_text(encoding="utf-8")))


AXOLOTL, LLAMA_FACTORY = schema_of("axolotl"), schema_of("llama-factory")


def unknown_keys(text: str, *, format: str) -> set[str]:
    """Return the keys of a file that its trainer would leave out, some without a word.

    The keys of the schemas are test data, read from the versions that are named there by ``--keys``
    of the programs in `tests/exports`, which hold them to what is installed.
    """
    values = yaml.safe_load(text)
    parts = [("gradient_checkpointing_kwargs", ["use_reentrant"])]
    parts += [(part, AXOLOTL[part]) for part in ("accelerator_config", "bnb_config_kwargs")]
    pairs = [(values.get(part, {}), known) for part, known in parts]
    if format == "axolotl":
        (dataset,) = values["datasets"]
        kind, mappings = dataset.get("type"), dataset.get("message_property_mappings", {})
        pairs += [(values, AXOLOTL["config"] + AXOLOTL["liger"]), (dataset, AXOLOTL["dataset"])]
        pairs += [(kind if isinstance(kind, dict) else {}, AXOLOTL["dataset.type"])]
        pairs += [(mappings, ["role", "content"])]
    else:
        (dataset,) = dataset_info(text).values()
        pairs += [(values, LLAMA_FACTORY["config"]), (dataset, LLAMA_FACTORY["dataset"])]
        pairs += [(dataset.get(part, {}), LLAMA_FACTORY[part]) for part in ("columns", "tags")]
    return {key for found, known in pairs for key in set(found) - set(known)}


def dataset_info(text: str) -> dict[str, Any]:
    """Return what LLaMA-Factory's file says is to be in its `dataset_info.json`."""
    begins = "# dataset_info.json: "
    (line,) = (line for line in text.splitlines() if line.startswith(begins))
    return dict(json.loads(line.removeprefix(begins)))


def studies() -> Iterator[Any]:
    """Yield a study of each configuration, and of each kind of examples and packing."""
    yield from (a_study(config) for config in CONFIGS)
    for kind in KINDS:
        for packing in ("none", "packed", "grouped"):
            dataset = some_dataset(kind, completions_only=True)
            yield a_study(TrialConfig(packing=packing), dataset=dataset)  # type: ignore[arg-type]


def studies_on_pairs() -> Iterator[Any]:
    """Yield a study of each kind of what trains on pairs, on a dataset and on random ones."""
    dataset = some_dataset("preference", completions_only=True)
    plain = BASE.model_copy(update={"method": "dpo"})
    yield a_study(plain)
    for changes in ({"packing": "grouped"}, {"kernels": "liger"}, {"lora_dropout": 0.1}):
        changed = {**changes, "reference": "precomputed"}
        yield a_study(plain.model_copy(update=changed), dataset=dataset)


@pytest.mark.parametrize("format", ["axolotl", "llama-factory"])
def test_every_key_is_one_that_the_trainer_knows(format: Any) -> None:
    for study in (*studies(), *studies_on_pairs()):
        assert unknown_keys(export(study, format=format), format=format) == set()
    schema = AXOLOTL if format == "axolotl" else LLAMA_FACTORY
    assert schema["version"] == trainers()[format]["versions"]
    key = "lora_r:" if format == "axolotl" else "cutoff_len:"
    broken = export(a_study(), format=format).replace(key, f"x{key}")
    assert unknown_keys(broken, format=format) == {f"x{key[:-1]}"}


# Settings


@pytest.mark.parametrize("format", format_names())
def test_no_setting_is_dropped_without_a_word(format: str) -> None:
    plain = export(a_study(BASE), format=format)
    for key in OTHER.keys() - {"packing", "checkpoint_offload"}:
        changed = BASE.model_copy(update={key: OTHER[key]})
        assert export(a_study(changed), format=format) != plain, key
    # Where all is recomputed, Unsloth's checkpoints wait on the host whatever is said.
    if format != "unsloth":
        recomputed = BASE.model_copy(update={"checkpoint_fraction": 1.0})
        waiting = recomputed.model_copy(update={"checkpoint_offload": True})
        on_gpu = export(a_study(recomputed), format=format)
        assert export(a_study(waiting), format=format) != on_gpu
    packed = BASE.model_copy(update={"packing": "packed"})
    on_texts = export(a_study(BASE, dataset=some_dataset()), format=format)
    assert export(a_study(packed, dataset=some_dataset()), format=format) != on_texts
    if format in ("peft", "unsloth"):
        return
    on_pairs = BASE.model_copy(update={"method": "dpo"})
    plain = export(a_study(on_pairs), format=format)
    for key, value in OF_PAIRS.items():
        # LLaMA-Factory trains one loss; another is refused.
        if (format, key) != ("llama-factory", "loss_type"):
            changed = on_pairs.model_copy(update={key: value})
            assert export(a_study(changed), format=format) != plain, key


def test_every_setting_is_tried() -> None:
    elsewhere = {"method", "trainer", "image_size", "offload_fraction"}
    assert OTHER.keys() | OF_PAIRS.keys() | elsewhere == set(CONFIG_KEYS)


@pytest.mark.parametrize("config", [TrialConfig(lora_rank=64), TrialConfig(method="dpo")])
@pytest.mark.parametrize("format", ["trl", "axolotl", "llama-factory", "script"])
def test_a_rate_that_nobody_named_is_the_rules_and_its_range_is_said(
    format: str, config: TrialConfig
) -> None:
    rule = learning_rate_of(config, MODEL.config)
    text = export(a_study(config), format=format)
    assert rate_in(text, format=format) == rule.value
    for rate in (rule.low, rule.high):
        assert in_words(rate) in said(text)
    own = export(a_study(config.changed(learning_rate=7e-3)), format=format)
    assert rate_in(own, format=format) == 7e-3
    assert in_words(rule.value) in said(own)


def rate_in(text: str, *, format: str) -> Any:
    values = read(text, format=format)
    return values.get("learning_rate", values.get("LEARNING_RATE"))


@pytest.mark.parametrize(
    ("format", "change", "key", "value"),
    cases(
        """
        trl | {checkpoint_fraction: 0.5} | gradient_checkpointing_kwargs | 2
        trl | {checkpoint_fraction: 0.3} | gradient_checkpointing_kwargs
        llama-factory | {checkpoint_fraction: 0.01} | disable_gradient_checkpointing | true
        axolotl | {compute_dtype: int8} | bf16 | true
        axolotl | {quantization: int8} | load_in_8bit | true
        llama-factory | {double_quant: false} | double_quantization | false
        trl | {compute_dtype: fp16} | dtype | float16
        trl | {} | packing_strategy | wrapped
        axolotl | {data_parallel: 2} | ddp_find_unused_parameters | false
        unsloth | {quantization: fp8} | load_in_fp8 | true
        unsloth | {quantization: none} | load_in_16bit | true
        script | {effective_batch_size: 16} | ACCUMULATION_STEPS | 4
        """
    ),
)
def test_a_setting_is_what_was_measured_or_the_nearest_that_a_trainer_has(
    format: str, change: dict[str, Any], key: str, value: Any
) -> None:
    values = read(export(a_study(BASE.model_copy(update=change)), format=format), format=format)
    found = values[key]
    if isinstance(found, dict):
        found = found.get("every_n_layers")
    assert found == value
    if format in FILES:
        # A step waits for the GPU no more than the measured one.
        assert values["accelerator_config"] == {"non_blocking": True}


@pytest.mark.parametrize(
    ("change", "dataset"),
    [
        ({}, None),
        (
            EIGHT_BITS | {"compile": True, "packing": "packed"},
            some_dataset("instruction", source="data.csv"),
        ),
    ],
)
@pytest.mark.parametrize("format", format_names())
def test_what_is_predicted_is_nowhere_said_to_be_measured(
    format: str, change: dict[str, Any], dataset: Any
) -> None:
    study = a_study(BASE.model_copy(update=change), dataset=dataset)
    record = record_of(study).model_copy(update={"is_predicted": True, "provenance": None})
    found = written(record, format=format)
    for text in (found.text, found.record or "", *found.lost):
        assert re.findall(r"(?<!not )\bmeasured\b", text, re.IGNORECASE) == []
    if format not in ("json", "peft"):
        assert f"Learning rate: {record.learning_rate.words}" in said(found.text)


@pytest.mark.parametrize(
    ("format", "change", "named"),
    cases(
        """
        axolotl | {compile: true} | it may not fit
        axolotl | {expandable_segments: true} | _segments:True axolotl train FILE
        # Where nothing is said, it makes them expandable by itself.
        axolotl | {} | PYTORCH_ALLOC_CONF=expandable_segments:False axolotl train FILE
        llama-factory | {} | nothing known
        llama-factory | {sharding: fsdp, data_parallel: 2} | NPROC_PER_NODE=2 llama
        script | {sharding: fsdp} | the script does not ask for it
        llama-factory | {method: dpo, reference: precomputed} | asks the reference
        axolotl | {method: dpo, lora_dropout: 0.1} | trains without dropout
        trl | {} | keeps them in bf16
        unsloth | {compute_dtype: fp8, quantization: fp8} | for the gradient it decodes the weights
        """
    ),
)
def test_what_a_file_cannot_express_is_said_at_its_top(
    format: str, change: dict[str, Any], named: str
) -> None:
    found = exported(a_study(BASE.model_copy(update=change)), format=format)
    assert named in said(found.text)
    assert all(words in said(found.text) for words in found.lost)
    assert bool(found.lost) is (named != "nothing known")


STORED = replace(
    MODEL,
    config={
        **MODEL.config,
        "quantization_config": {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "float16",
        },
    },
)
"""A checkpoint of 4-bit weights that says what they are computed in, and not as it is measured."""


def test_a_stored_base_computes_in_the_measured_type_or_the_file_says_how() -> None:
    study = a_study(model=STORED)
    assert "bnb_4bit_compute_dtype" in export(study, format="script")
    record = record_of(study)
    for trainer in ("trl", "axolotl", "llama-factory", "unsloth"):
        assert "write bfloat16 there" in unsupported(record, trainer)["stored"]
    alike = {**STORED.config["quantization_config"], "bnb_4bit_compute_dtype": "bfloat16"}
    same = replace(STORED, config={**STORED.config, "quantization_config": alike})
    assert "stored" not in unsupported(record_of(a_study(model=same)), "trl")


def test_every_limit_of_a_trainer_is_one_of_some_configuration() -> None:
    table = yaml.safe_load(Path("sweep/export/trainers.yaml").read_text())["unsupported"]
    told = {(key, case) for key, cases in table.items() for case in cases}
    tried = [*studies(), *studies_on_pairs(), a_study(model=STORED)]
    for changes in (
        {"quantization": "int8"},
        {"quantization": "none", "adapter_dtype": "bf16"},
        {"checkpoint_fraction": 0.5},
        {"checkpoint_fraction": 1.0, "checkpoint_offload": True},
        {"packing": "packed", "micro_batch_size": 1},
    ):
        tried.append(a_study(BASE.model_copy(update=changes), dataset=some_dataset()))
    for record in map(record_of, tried):
        told -= cases_of(record).items()
        for trainer in trainers():
            assert all("{" not in words for words in unsupported(record, trainer).values())
    assert told == set()


def test_every_linear_layer_is_left_to_the_trainer_where_names_are_not_known() -> None:
    odd = replace(MODEL, config={**MODEL.config, "model_type": "odd"})
    study = a_study(TrialConfig(target_modules="all-linear"), model=odd)
    for format, key, every in (
        ("axolotl", "lora_target_linear", True),
        ("llama-factory", "lora_target", "all"),
        ("trl", "lora_target_modules", ["all-linear"]),
        ("peft", "target_modules", "all-linear"),
        ("script", "TARGET_MODULES", "all-linear"),
    ):
        assert read(export(study, format=format), format=format)[key] == every


# Where it is from


@pytest.mark.parametrize("format", format_names())
def test_every_file_says_what_was_measured_how_surely_and_where(format: str) -> None:
    study = a_study(emulated_on=None)
    (record,) = study.records
    text = export(study, format=format)
    for fact in ("a10-mistral", "17", "2026-11-21", "580.65.06", "0.1.0", "0123abcd", "2.13.0"):
        assert fact in text
    if format in ("json", "peft"):
        return
    for words in ("16,800 tokens/s", "20.00 GiB", "not confirmed"):
        assert words in said(text)
    alone = (record.model_copy(update={"is_baseline": True, "started_at": None}),)
    again = replace(study, environment={}, records=alone, confirmations=confirmed(*alone))
    for words in ("confirmed (2 runs).", "this trial itself", "not recorded", "no known version"):
        assert words in said(export(again, format=format))


@pytest.mark.parametrize("format", format_names())
def test_names_that_try_to_break_out_stay_data(format: str) -> None:
    model = replace(MODEL, name=HOSTILE, source="directory", path=Path(HOSTILE))
    study = a_study(
        TrialConfig(target_modules=(HOSTILE, "q_proj")),
        measurement=a_measurement(flags=(HOSTILE,)),
        name=HOSTILE,
        model=model,
        emulated_on=HOSTILE,
    )
    text = export(study, format=format)
    text.encode("utf-8")
    values = read(text, format=format)
    keys = ("target_modules", "TARGET_MODULES", "lora_target_modules", "lora_target")
    found = next(v[key] for v in (values, values.get("config", {})) for key in keys if key in v)
    assert found in ([HOSTILE, "q_proj"], ["q_proj", HOSTILE], f"q_proj,{HOSTILE}")
    if format in ("script", "unsloth"):
        names = [node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
        assert "__import__" not in names


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        (MODEL, "path/or/hub-id/of/mistral-7b-v0.3"),
        (ModelSpec("org/model", "hub", MODEL.config, Path("/cache/x")), "org/model"),
        (ModelSpec("mine", "directory", MODEL.config, Path("/data/mine")), "/data/mine"),
    ],
)
def test_a_file_names_the_weights_as_far_as_they_are_known(model: ModelSpec, weights: str) -> None:
    text = export(a_study(model=model), format="trl")
    assert yaml.safe_load(text)["model_name_or_path"] == weights


def test_no_two_exports_share_an_output_directory() -> None:
    studies = [a_study(name=name) for name in ("a", "a b", "a-b", "a/b", "../a", "")]
    made = [(export(study, format=format), format) for study in studies for format in FILES]
    places = {read(text, format=format)["output_dir"] for text, format in made}
    assert len(places) == len(made)
    assert all(Path(place).parts[0] == "outputs" and ".." not in place for place in places)


@pytest.mark.parametrize("format", ["script", "peft", "trl", "axolotl", "llama-factory", "unsloth"])
def test_no_file_trains_on_texts_what_was_measured_with_images(format: str) -> None:
    study = a_study(BASE.changed(image_size=512))
    with pytest.raises(InputError, match="rows with images were measured"):
        exported(study, format=format)
    assert json.loads(exported(study, format="json").text)["config"]["image_size"] == 512


def test_a_decoder_that_is_stored_with_others_is_no_other_trainers() -> None:
    part = replace(MODEL, config={**MODEL.config, PART_OF: "qwen3_vl"})
    study = a_study(BASE, model=part)
    with pytest.raises(InputError, match="there are json, yaml and peft"):
        exported(study, format="trl")
    assert json.loads(exported(study, format="json").text)["model"]["config"][PART_OF] == "qwen3_vl"
