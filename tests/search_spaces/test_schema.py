"""The JSON Schema of a space file: what an editor completes, explains and checks."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import pytest
import yaml

from search_spaces.config import KNOBS
from search_spaces.errors import InputError
from search_spaces.gpus import gpu_catalogue
from search_spaces.loading import parse_space
from search_spaces.models import shipped_models
from search_spaces.presets import preset_texts
from search_spaces.schema import schema_text, space_schema

LEAST = "dimensions: {micro_batch_size: [1, 2]}\n"


schema_of_today = cache(schema_text)


def faults(text: str) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft7Validator(json.loads(schema_of_today()))
    return [fault.message for fault in validator.iter_errors(yaml.safe_load(text))]


def test_the_schema_that_is_shipped_is_that_of_the_code() -> None:
    shipped = (files("search_spaces") / "space.schema.json").read_text(encoding="utf-8")
    assert shipped == schema_text(), "run: sweep schema > search_spaces/space.schema.json"


def test_the_schema_is_one() -> None:
    pytest.importorskip("jsonschema").Draft7Validator.check_schema(space_schema())


@pytest.mark.parametrize("name", sorted(preset_texts()))
def test_every_preset_names_the_schema_and_is_right_by_it(name: str) -> None:
    text = preset_texts()[name]
    assert text.startswith("# yaml-language-server: $schema=../space.schema.json\n")
    assert faults(text) == []


RIGHT = [
    LEAST,
    "dimensions: {seq_len: {low: 64, high: 512, step: 64}, lora_dropout: {low: 0.0, high: 0.1}}",
    "dimensions: {lora_rank: {low: 4, high: 64, log: true}, compile: {choices: [true, false]}}",
    "dimensions: {lora_dropout: {low: 0.01, high: 0.1, log: true}, packing: [none, packed]}",
    LEAST + "fixed: {learning_rate: 0.0001, packing: grouped}",
    "dimensions: {target_modules: [qv, [q_proj, v_proj]], lora_alpha: [16, null]}",
    LEAST + "fixed:\nbaseline:\nsteps:\n",
    LEAST + "confirm: false\ntime_budget: 10m\nmodel: org/name\nmax_dollars: 2.5\nbudget_gib: 20",
    LEAST + "confirm: {seconds: 8}\nsteps: {measured_max: 8}\nobjectives: [peak_memory]",
]


@pytest.mark.parametrize("text", RIGHT)
def test_what_can_be_read_is_right(text: str) -> None:
    parse_space(text, label="mine.yaml")
    assert faults(text) == []


WRONG = [
    "name: nothing-to-search\n",
    LEAST + "trails: 40",
    LEAST + "trials: many",
    LEAST + "trials: 0",
    LEAST + "gpu: a11",
    LEAST + "sampler: bayes",
    LEAST + "objectives: [tokens]",
    LEAST + "weights: real",
    LEAST + "fixed: {lora_rnk: 8}",
    LEAST + "fixed: {lora_rank: 0}",
    LEAST + "fixed: {lora_alpha: -1}",
    LEAST + "fixed: {quantization: int5}",
    LEAST + "fixed: {upcast_fp32: 'yes'}",
    LEAST + "fixed: {target_modules: everything}",
    LEAST + "baseline: {kernels: fast}",
    LEAST + "steps: {measured: 9}",
    LEAST + "confirm: {soak: 3}",
    LEAST + "budget_gib: 0",
    "dimensions: {}",
    "dimensions: {micro_batch_size: 8}",
    "dimensions: {micro_batch_size: []}",
    "dimensions: {micro_batch_size: [1, 1]}",
    "dimensions: {micro_batch_size: [1.5]}",
    "dimensions: {micro_batch_size: {low: 1}}",
    "dimensions: {kernels: {low: 1, high: 2}}",
    "dimensions: {lora_rank: {low: 4, high: 64, step: 0}}",
    "dimensions: {lora_rank: {low: 4, high: 64, steps: 4}}",
    LEAST + "fixed: {learning_rate: 0}",
    LEAST + "fixed: {packing: wrapped}",
    "dimensions: {checkpoint_fraction: [0.5, 2.0]}",
]


@pytest.mark.parametrize("text", WRONG)
def test_a_mistake_is_marked_in_the_editor_as_it_is_when_it_is_read(text: str) -> None:
    with pytest.raises(InputError):
        parse_space(text, label="mine.yaml")
    assert faults(text)


def test_an_editor_completes_keys_and_values_and_explains_each() -> None:
    properties = space_schema()["properties"]
    assert properties["gpu"]["enum"][2:] == list(gpu_catalogue())
    assert properties["model"]["anyOf"][0]["enum"] == [m.name for m in shipped_models()]
    for section in ("dimensions", "fixed", "baseline"):
        keys = properties[section]["properties"]
        assert list(keys) == list(KNOBS)
        assert all(value["description"] for value in keys.values())
    sections: list[dict[str, Any]] = [
        properties,
        space_schema()["$defs"]["StepBudget"]["properties"],
    ]
    unsaid = [key for section in sections for key, v in section.items() if "description" not in v]
    assert unsaid == []
    assert json.loads(schema_text()) == space_schema()
