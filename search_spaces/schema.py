"""The JSON Schema of a space file, by which an editor completes, explains and checks one.

Made from the models that read the file: nothing is said twice. It says what may be written; what
contradicts itself only reading finds.
"""

from __future__ import annotations

import json
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig, number_kind
from qlora_sweep.search_spaces.dimensions import FloatRange, IntRange
from qlora_sweep.search_spaces.gpus import gpu_catalogue
from qlora_sweep.search_spaces.models import shipped_models
from qlora_sweep.search_spaces.space import SearchSpace

Schema = dict[str, Any]

_LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
"""Of what a validator of ours reads first, pydantic leaves the limits in its own words."""


def space_schema() -> Schema:
    """Return the JSON Schema of a space file, in plain JSON values."""
    schema = _plain(SearchSpace.model_json_schema())
    values = _plain(TrialConfig.model_json_schema())["properties"]
    properties = schema["properties"]
    # A section with nothing under it is read as one that is not there.
    section = {"type": ["object", "null"], "additionalProperties": False}
    for key in ("fixed", "baseline"):
        properties[key] |= {**section, "properties": values}
    dimensions = dict(zip(values, map(_dimension, values, values.values()), strict=True))
    properties["dimensions"] |= {**section, "properties": dimensions, "minProperties": 1}
    properties["gpu"]["enum"] = ["auto", "cpu"] + list(gpu_catalogue())
    properties["model"]["anyOf"] = [{"enum": [m.name for m in shipped_models()]}, {}]
    properties["steps"] |= {"anyOf": [{"$ref": properties["steps"].pop("$ref")}, {"type": "null"}]}
    properties["confirm"]["anyOf"] += [{"type": "boolean"}, {"const": 0}]
    properties["data"]["anyOf"].append({"type": "string", "minLength": 1})
    properties["time_budget"] = {
        "description": "Stop a run after this long: 90s, 10m, 1h30m, or seconds.",
        "type": ["string", "number"],
        "examples": ["10m", "1h30m"],
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **schema,
        "title": "A search space of qlora-sweep",
        "required": ["dimensions"],
    }


def schema_text() -> str:
    """Return the schema as the file that is shipped has it."""
    return json.dumps(space_schema(), indent=1, ensure_ascii=False) + "\n"


def _dimension(key: str, value: Schema) -> Schema:
    """Return the schema of what a dimension may be: a list, the same under choices, or a range."""
    item = dict(value)
    item.pop("default", None)
    item.pop("description")
    listed = {"type": "array", "items": item, "minItems": 1, "uniqueItems": True}
    alone = {"properties": {"choices": listed}, "required": ["choices"]}
    forms = [listed, {"type": "object", **alone, "additionalProperties": False}]
    kind = number_kind(key)
    if kind is int:
        forms.append(_plain(IntRange.model_json_schema()))
    if kind is float:
        forms.append(_plain(FloatRange.model_json_schema()))
    return {"description": value["description"], "anyOf": forms}


def _plain(schema: Any) -> Any:
    """Return pydantic's schema without titles made up of the names, its texts as plain lines."""
    if isinstance(schema, list):
        return list(map(_plain, schema))
    if not isinstance(schema, dict):
        return schema
    plain = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "description" and isinstance(value, str):
            plain[key] = " ".join(value.split()).replace("``", "")
        else:
            plain[_LIMITS.get(key, key)] = _plain(value)
    return plain
