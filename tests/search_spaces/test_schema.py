"""The JSON Schema of a space file: what an editor completes, explains and checks."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import pytest
import yaml

from search_spaces.config import KNOBS
from search_spaces.gpus import gpu_catalogue
from search_spaces.loading import parse_space
from search_spaces.models import shipped_models
from search_spaces.schema import schema_text, space_schema
from tests.search_spaces.test_space_files import ADDED, SMALL

LEAST = "dimensions: {micro_batch_size: [1, 2]}\n"


@cache
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft7Validator.check_schema(space_schema())
    return jsonschema.Draft7Validator(json.loads(schema_text()))


def faults(text: str) -> list[str]:
    return [fault.message for fault in validator().iter_errors(yaml.safe_load(text))]


def test_the_shipped_schema_is_of_the_code_and_explains_every_key_and_value() -> None:
    shipped = (files("search_spaces") / "space.schema.json").read_text(encoding="utf-8")
    assert shipped == schema_text(), "run: sweep schema > search_spaces/space.schema.json"
    schema = space_schema()
    properties = schema["properties"]
    assert properties["gpu"]["enum"][2:] == list(gpu_catalogue())
    assert properties["model"]["anyOf"][0]["enum"] == [m.name for m in shipped_models()]
    sections = [properties, schema["$defs"]["StepBudget"]["properties"]]
    for section in ("dimensions", "fixed", "baseline"):
        assert list(properties[section]["properties"]) == list(KNOBS)
        sections.append(properties[section]["properties"])
    assert all(value["description"] for section in sections for value in section.values())


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


@pytest.mark.parametrize("text", [text for text, _ in ADDED])
def test_a_mistake_is_marked_in_the_editor_as_it_is_when_it_is_read(text: str) -> None:
    assert faults(f"{SMALL}{text}\n")
