"""Owns reading one dimension of a space: choices or a range of values that a configuration takes.

Knows nothing of the other dimensions.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from search_spaces.config import explain_validation, parse_config
from search_spaces.documents import Document
from search_spaces.errors import InputError, did_you_mean, shown
from search_spaces.knobs import KNOBS
from search_spaces.space import Choices, Dimension, FloatRange, IntRange


def read_dimension(document: Document, key: str, value: Any) -> Dimension:
    """Return the dimension ``key``: a list, ``{choices: [...]}`` or ``{low, high, step, log}``.

    Raises:
        InputError: another form, an unknown key, or a value that no configuration takes.
    """
    where = document.where("dimensions", key)
    match value:
        case list():
            return _choices(document, ("dimensions", key), value)
        case {"choices": list() as choices} if len(value) == 1:
            return _choices(document, ("dimensions", key, "choices"), choices)
        case {"choices": _}:
            raise InputError(
                f"{where}: {key}: choices must be a list and stand alone, got {shown(value)}"
            )
        case dict():
            return _range(document, key, value)
        case _:
            raise InputError(
                f"{where}: {key} must list its values, got {shown(value)}; "
                "a single value goes under fixed"
            )


def read_value(key: str, value: Any, *, where: str) -> Any:
    """Return ``value`` as a configuration reads it for ``key``, in plain JSON values.

    Raises:
        InputError: no configuration takes it; the message names ``where``, key and value.
    """
    try:
        # Any effective batch is a multiple of a micro-batch of one.
        config = parse_config({"micro_batch_size": 1, key: value}, where=where)
    except InputError as error:
        raise InputError(f"{error}{_yaml_hint(key, value)}") from error
    return config.model_dump(mode="json")[key]


def _yaml_hint(key: str, value: Any) -> str:
    """Say what YAML made of something that was perhaps meant otherwise."""
    if KNOBS[key].kind is float:
        return ""
    if KNOBS[key].kind is int:
        text = isinstance(value, str) and _is_number(value)
        return "; YAML reads it as text: write 1000, not '1000' or 1e3" if text else ""
    match value:
        case False:
            return '; YAML reads an unquoted no or off as false: write a word in quotes, "none"'
        case None:
            return '; YAML reads null, ~ and nothing as no value: write a word in quotes, "none"'
        case _:
            return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _choices(document: Document, path: tuple[str, ...], choices: list[Any]) -> Choices:
    key = path[1]
    if not choices:
        raise InputError(f"{document.where(*path)}: {key} has no values: list at least one")
    read: dict[str, Any] = {}
    for index, choice in enumerate(choices):
        where = document.where(*path, index)
        value = read_value(key, choice, where=where)
        # By their JSON text: 1 and true are equal in Python and are not the same value.
        if json.dumps(value) in read:
            raise InputError(f"{where}: {key} lists {shown(choice)} twice")
        read[json.dumps(value)] = value
    return Choices(choices=tuple(read.values()))


def _range(document: Document, key: str, value: dict[str, Any]) -> Dimension:
    where = document.where("dimensions", key)
    kind = IntRange if KNOBS[key].kind is int else FloatRange
    if KNOBS[key].kind not in (int, float):
        raise InputError(f"{where}: {key} is not a number: list its values, got {shown(value)}")
    for name in value:
        if name not in kind.model_fields:
            known = (*kind.model_fields, "choices")
            raise InputError(
                f"{document.where('dimensions', key, name)}: unknown key {shown(name)} under {key}"
                f"{did_you_mean(name, known)}"
            )
    try:
        dimension = kind.model_validate(value)
    except ValidationError as error:
        path = error.errors()[0]["loc"]
        raise InputError(
            f"{document.where('dimensions', key, *path)}: {key}: {explain_validation(error)}"
        ) from error
    for end in ("low", "high"):
        read_value(key, value[end], where=document.where("dimensions", key, end))
    return dimension
