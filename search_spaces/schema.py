"""Owns the JSON Schema of a space file, by which an editor completes, explains and checks one.

Made from the models that read the file and from the declarations of the settings: nothing is said
twice. It says what may be written; what contradicts itself only reading finds.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from typing import Any

from pydantic import BaseModel

from search_spaces.config import TrialConfig
from search_spaces.gpus import gpu_catalogue
from search_spaces.knobs import KNOBS, TARGET_SETS, Knobs
from search_spaces.models import shipped_models
from search_spaces.space import ConfirmBudget, SearchSpace, StepBudget
from search_spaces.texts import TextsChoice

Schema = dict[str, Any]

_LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
_DURATION: Schema = {
    "type": ["string", "number"],
    "description": "Stop a run after this long: 90s, 10m, 1h30m, or seconds.",
    "examples": ["10m", "1h30m"],
}


def space_schema() -> Schema:
    """Return the JSON Schema of a space file, in plain JSON values."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A search space of qlora-sweep",
        "type": "object",
        "properties": _space_properties(),
        "required": ["dimensions"],
        "additionalProperties": False,
    }


def _space_properties() -> Schema:
    """Return the schema of each key of a space file."""
    declared = SearchSpace.model_json_schema()
    said = _docstrings(SearchSpace)
    properties = {
        key: _described(_plain(value), said.get(key))
        for key, value in declared["properties"].items()
    }
    values = {key: _value(key) for key in KNOBS}
    properties |= {
        "gpu": _described(
            {"type": "string", "enum": ["auto", "cpu", *gpu_catalogue()]},
            "A name of `sweep gpus`, auto for the GPU that is there, or cpu.",
        ),
        "model": _described(
            {"anyOf": [{"enum": [m.name for m in shipped_models()]}, {"type": "string"}]},
            "A name of `sweep models`, a directory with a config.json, or a hub id.",
        ),
        "time_budget": _DURATION,
        "steps": _section(StepBudget, "How long one trial trains.") | {"type": ["object", "null"]},
        "confirm": _described(
            {
                "anyOf": [
                    {"type": "boolean"},
                    {"const": 0},
                    {"type": "null"},
                    _section(ConfirmBudget, None),
                ]
            },
            "How far the winner is measured again; false for not at all.",
        ),
        "data": _described(
            {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    _section(TextsChoice, None) | {"required": ["texts"]},
                    {"type": "null"},
                ]
            },
            said["data"],
        ),
        "dimensions": _keys(
            {key: _dimension(key, value) for key, value in values.items()},
            "What is searched: a list of values, or low and high.",
        )
        | {"minProperties": 1},
        "fixed": _keys(values, "What is the same in every trial."),
        "baseline": _keys(values, said["baseline"]),
    }
    return properties


def schema_text() -> str:
    """Return the schema as the file that is shipped has it."""
    return json.dumps(space_schema(), indent=1, ensure_ascii=False) + "\n"


def _described(schema: Schema, text: str | None) -> Schema:
    """Return a schema with what a person reads of it in the editor."""
    return schema if text is None else {"description": text, **schema}


def _keys(properties: Schema, text: str) -> Schema:
    # A section with nothing under it is read as one that is not there.
    return {
        "description": text,
        "type": ["object", "null"],
        "properties": properties,
        "additionalProperties": False,
    }


def _section(model: type[BaseModel], text: str | None) -> Schema:
    """Return the schema of a section that is a model of its own."""
    said = _docstrings(model)
    properties = {
        key: _described(_plain(value), said.get(key))
        for key, value in model.model_json_schema()["properties"].items()
    }
    return _described(
        {"type": "object", "properties": properties, "additionalProperties": False}, text
    )


def _value(key: str) -> Schema:
    """Return the schema of one setting's value, as a configuration takes it."""
    if key == "target_modules":
        names = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
        schema: Schema = {"anyOf": [{"enum": list(TARGET_SETS)}, names], "default": "attention"}
    else:
        schema = _plain(TrialConfig.model_json_schema()["properties"][key])
    return _described(schema, _docstrings(Knobs).get(key) or KNOBS[key].help)


def _dimension(key: str, value: Schema) -> Schema:
    """Return the schema of what a dimension may be: a list, the same under choices, or a range."""
    text = value.get("description")
    item = {k: v for k, v in value.items() if k not in ("default", "description")}
    listed = {"type": "array", "items": item, "minItems": 1, "uniqueItems": True}
    forms: list[Schema] = [listed, _object({"choices": listed}, required=["choices"])]
    kind = {int: "integer", float: "number"}.get(KNOBS[key].kind)
    if kind is not None:
        number: Schema = {"type": kind}
        above: Schema = {"type": kind, "exclusiveMinimum": 0}
        linear = {"low": number, "high": number, "step": above, "log": {"const": False}}
        on_a_log_scale = {"low": above, "high": number, "log": {"const": True}}
        if kind == "integer":
            on_a_log_scale["step"] = {"const": 1}
        forms += [
            _object(linear, required=["low", "high"]),
            _object(on_a_log_scale, required=["low", "high", "log"]),
        ]
    return _described({"anyOf": forms}, text)


def _object(properties: Schema, *, required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _plain(schema: Any) -> Any:
    """Return pydantic's schema in JSON Schema's words, without titles made up of the names.

    Of a value that may be null as well, pydantic leaves the limits in its own words.
    """
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if key != "title"}
        return {_LIMITS.get(key, key): _plain(value) for key, value in kept.items()}
    return [_plain(item) for item in schema] if isinstance(schema, list) else schema


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return what is said of each field, in the string below it."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef), "the source of a class is a class"
    said = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                said[name] = " ".join(text.split()).replace("``", "")
    return said
