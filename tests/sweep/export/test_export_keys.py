"""axolotl and LLaMA-Factory leave out keys that they do not know, some without a word: every one of
ours is in their schemas, also those of a data set and of what they hand on to others.

The keys of the schemas are test data, read from the versions that are named there by ``--keys`` of
`tests/exports/axolotl_on_cpu.py` and of its neighbour; `make test-exports` holds them to what is
installed. TRL refuses a key that it does not know, which `test_export_trl` tries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces.config import TrialConfig
from sweep.export.formats import export
from sweep.export.trainer_files import TRIED
from tests.sweep.export.studies import a_study, some_texts
from tests.sweep.export.test_export_formats import CONFIGS

KINDS: tuple[Any, ...] = ("text", "instruction", "prompt-completion", "messages", "conversations")


def schema_of(name: str) -> dict[str, Any]:
    path = Path("tests/exports", f"{name}_keys.json")
    return dict(json.loads(path.read_text(encoding="utf-8")))


AXOLOTL, LLAMA_FACTORY = schema_of("axolotl"), schema_of("llama_factory")


def unknown_to_axolotl(text: str) -> set[str]:
    values = yaml.safe_load(text)
    found = set(values) - {*AXOLOTL["config"], *AXOLOTL["liger"]}
    for dataset in values["datasets"]:
        found |= set(dataset) - set(AXOLOTL["dataset"])
        if isinstance(dataset["type"], dict):
            found |= set(dataset["type"]) - set(AXOLOTL["dataset.type"])
        # Any name is a message's; these two are what its chats are made of.
        found |= set(dataset.get("message_property_mappings", {})) - {"role", "content"}
    return found | unknown_to_others(values, AXOLOTL, ("bnb_config_kwargs", "accelerator_config"))


def unknown_to_others(
    values: Mapping[str, Any], schema: Mapping[str, Any], groups: Iterable[str]
) -> set[str]:
    found = {key for group in groups for key in set(values.get(group, {})) - set(schema[group])}
    return found | set(values.get("gradient_checkpointing_kwargs", {})) - {"use_reentrant"}


def dataset_info(text: str) -> dict[str, Any]:
    """Return what LLaMA-Factory's file says is to be in its `dataset_info.json`."""
    begins = "# dataset_info.json: "
    (line,) = (line for line in text.splitlines() if line.startswith(begins))
    return dict(json.loads(line.removeprefix(begins)))


def unknown_to_llama_factory(text: str) -> set[str]:
    values = yaml.safe_load(text)
    (dataset,) = dataset_info(text).values()
    found = set(values) - set(LLAMA_FACTORY["config"])
    found |= set(dataset) - set(LLAMA_FACTORY["dataset"])
    for group in ("columns", "tags"):
        found |= set(dataset.get(group, {})) - set(LLAMA_FACTORY[group])
    return found | set(values["accelerator_config"]) - set(AXOLOTL["accelerator_config"])


UNKNOWN: dict[str, Callable[[str], set[str]]] = {
    "axolotl": unknown_to_axolotl,
    "llama-factory": unknown_to_llama_factory,
}


@pytest.mark.parametrize(
    ("format", "schema"), [("axolotl", AXOLOTL), ("llama-factory", LLAMA_FACTORY)]
)
def test_the_schema_is_of_the_version_that_the_file_names(
    format: Any, schema: dict[str, Any]
) -> None:
    assert schema["version"] == TRIED[format].versions


@pytest.mark.parametrize(
    ("format", "key"),
    [
        ("axolotl", "lora_r"),
        ("axolotl", "bnb_4bit_use_double_quant"),
        ("axolotl", "non_blocking"),
        ("axolotl", "use_reentrant"),
        ("axolotl", "field_output"),
        ("axolotl", "ds_type"),
        ("llama-factory", "cutoff_len"),
        ("llama-factory", "non_blocking"),
    ],
)
def test_a_key_that_is_misspelt_is_found(format: str, key: str) -> None:
    text = export(a_study(texts=some_texts("prompt-completion")), format=format)
    assert UNKNOWN[format](text) == set()
    assert UNKNOWN[format](text.replace(f"{key}:", f"{key}s:")) == {f"{key}s"}


@pytest.mark.parametrize("format", UNKNOWN)
@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_every_key_of_a_configuration_is_in_the_schema(number: int, format: str) -> None:
    assert UNKNOWN[format](export(a_study(CONFIGS[number]), format=format)) == set()


@pytest.mark.parametrize("format", UNKNOWN)
@pytest.mark.parametrize("packing", ["none", "packed", "grouped"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_texts_is_in_the_schema(kind: Any, packing: Any, format: str) -> None:
    study = a_study(TrialConfig(packing=packing), texts=some_texts(kind, completions_only=True))
    assert UNKNOWN[format](export(study, format=format)) == set()


@pytest.mark.parametrize("packing", ["none", "packed", "grouped"])
def test_axolotl_packs_as_was_measured(packing: Any) -> None:
    study = a_study(TrialConfig(packing=packing), texts=some_texts(completions_only=True))
    values = yaml.safe_load(export(study, format="axolotl"))
    assert values["sample_packing"] is (packing == "packed")
    assert values.get("group_by_length", False) is (packing == "grouped")
    assert values["train_on_inputs"] is False


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
def test_it_packs_with_every_attention(attention: Any) -> None:
    text = export(a_study(TrialConfig(attention=attention)), format="axolotl")
    assert yaml.safe_load(text)["sample_packing"] is True
    assert "does not pack" not in text
