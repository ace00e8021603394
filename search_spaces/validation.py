"""Owns what a person is told where pydantic refuses what they wrote: file, line, key and value.

Every file that people write goes through it. Knows nothing of what the keys mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from search_spaces.documents import Document, KeyPath
from search_spaces.errors import InputError, did_you_mean, quote

Model = TypeVar("Model", bound=BaseModel)
Fault = Mapping[str, Any]
"""One of pydantic's errors: its type, location, input and context."""
FAULTS_TOLD = 5
"""Of a file at once: whoever corrects one wants to know of the next."""


class UnknownKeyError(ValueError):
    """What a validator raises for a key of a mapping that is not among ``known``."""

    def __init__(self, known: tuple[str, ...]) -> None:
        super().__init__("is not a known key")
        self.known = known


class ContradictionError(ValueError):
    """What a validator of a whole model raises for values that contradict each other.

    ``path`` is the key, inside the model, on whose line the message stands.
    """

    def __init__(self, message: str, *path: str) -> None:
        super().__init__(message)
        self.path = path


def known_key(key: str, *, known: tuple[str, ...]) -> str:
    """Return a mapping's key if it is among ``known``: a validator for pydantic."""
    if key not in known:
        raise UnknownKeyError(known)
    return key


_RULES = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be one of {expected}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "date_type": "must be a date like 2026-11-21",
    "date_parsing": "must be a date like 2026-11-21",
    "date_from_datetime_parsing": "must be a date like 2026-11-21",
    "date_from_datetime_inexact": "must be a date like 2026-11-21",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "too_short": "must not be empty",
    "dict_type": "must map keys to values",
    "model_type": "must map keys to values",
    "missing": "is missing",
}
"""What pydantic's errors mean for whoever wrote the value, by type."""


def validate(
    model: type[Model],
    values: object,
    document: Document,
    *,
    at: KeyPath = (),
    moved: Mapping[str, KeyPath] | None = None,
    about: str = "",
) -> Model:
    """Return ``values`` as an instance of ``model``.

    Args:
        model: strict, with extra keys forbidden.
        values: of the document, or made from what it holds.
        document: what they came from.
        at: where in it they stand.
        moved: by field of the model, where its value stands instead of under ``at`` by its name.
        about: stands before the key in the message, but for an unknown one.

    Raises:
        InputError: of a file's keys all that is wrong, each fault after its line, else the first;
            each as `explain` says.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        told: dict[KeyPath, tuple[float, str]] = {}
        # Within one value they are often one mistake.
        for fault in _faults(error) if document.lines and not at else _faults(error)[:1]:
            path = _path(fault)
            inside = (moved or {}).get(str(path[0])) if path else None
            line = document.line_of(*(inside or (*at, *path))) or math.inf
            words = _words(fault, model, document, at=at, about=about)
            told.setdefault(_key(fault, model), (line, words))
        faults = sorted(told.values(), key=lambda fault: fault[0])
        label = f"{document.label}: " if document.label else ""
        raise InputError(f"{label}{_in_one_line(faults)}") from error


def _in_one_line(faults: list[tuple[float, str]]) -> str:
    """Return faults, each after its line; what is missing in the whole file has none."""
    text = ""
    for line, words in faults[:FAULTS_TOLD]:
        between = " " if text.endswith("?") else ". "
        where = "" if line == math.inf else f"{'Line' if text else 'line'} {line}: "
        text += f"{between if text else ''}{where}{words}"
    left = len(faults) - FAULTS_TOLD
    return f"{text}. And {left} more" if left > 0 else text


def explain(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Return one line for the first fault of a pydantic error: key, rule, and what broke it.

    Args:
        error: what pydantic raised.
        model: what refused the values; an unknown key is then compared with its fields.
    """
    return _words(_faults(error)[0], model, Document(""), at=(), about="")


def _words(
    fault: Fault, model: type[BaseModel] | None, document: Document, *, at: KeyPath, about: str
) -> str:
    path, kind = _path(fault), fault["type"]
    if _is_unknown_key(fault):
        return _unknown_key((*at, *path), known=_known_keys(fault, model))
    if isinstance(_raised(fault), ContradictionError):
        return f"{about}{_raised(fault)}"
    key = ".".join(map(str, path))
    subject = f"{about}{document.names.get(key, key)} " if path else about
    if kind == "value_error":
        return f"{subject}{_raised(fault)}"
    rule = _RULES[kind].format(**fault.get("ctx", {})) if kind in _RULES else fault["msg"]
    value = "" if kind == "missing" else f", got {quote(fault['input'])}"
    return f"{subject}{rule}{value}{_yaml_hint(fault) if document.lines else ''}"


def _faults(error: ValidationError) -> list[Fault]:
    """Return unknown keys before anything else: what is missing is often a key misspelt."""
    return sorted(error.errors(), key=lambda fault: not _is_unknown_key(fault))


def _key(fault: Fault, model: type[BaseModel]) -> KeyPath:
    """Return whose fault it is: a value that may be of several kinds has one of each."""
    models, key = [model], []
    for step in _path(fault):
        key.append(step)
        models = _models_under(str(step), models)
        if not models and not _is_unknown_key(fault):
            break
    return tuple(key)


def _is_unknown_key(fault: Fault) -> bool:
    is_extra = fault["type"] in ("extra_forbidden", "invalid_key")
    return is_extra or isinstance(_raised(fault), UnknownKeyError)


def _raised(fault: Fault) -> object:
    """Return what one of our own validators raised; None where pydantic itself refuses."""
    return fault.get("ctx", {}).get("error")


def _path(fault: Fault) -> KeyPath:
    """Return where a fault is, without what pydantic adds to a location for its own types."""
    raised = _raised(fault)
    inside = raised.path if isinstance(raised, ContradictionError) else ()
    steps = (step for step in fault["loc"] if step != "[key]")
    return (*(step for step in steps if not str(step).startswith("function-")), *inside)


def _unknown_key(path: KeyPath, *, known: tuple[str, ...]) -> str:
    key, around = str(path[-1]), path[-2:-1]
    under = f" under {around[0]}" if around and isinstance(around[0], str) else ""
    return f"unknown key {quote(key)}{under}{did_you_mean(key, known, lists='sweep schema')}"


def _known_keys(fault: Fault, model: type[BaseModel] | None) -> tuple[str, ...]:
    """Return the keys that the mapping around an unknown one may have."""
    raised = _raised(fault)
    if isinstance(raised, UnknownKeyError):
        return raised.known
    models = [] if model is None else [model]
    for step in _path(fault)[:-1]:
        # A list's index and a mapping's key lead to no field: the models stay those of its items.
        models = _models_under(str(step), models) or models
    return tuple(key for model in models for key in model.model_fields)


def _models_under(key: str, models: Sequence[type[BaseModel]]) -> list[type[BaseModel]]:
    fields = [model.model_fields[key] for model in models if key in model.model_fields]
    return [inner for field in fields for inner in _models_in(field.annotation)]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _yaml_hint(fault: Fault) -> str:
    """Say what YAML made of something that was perhaps meant otherwise."""
    match fault["type"], fault["input"]:
        case "literal_error", False:
            return '; YAML reads an unquoted no or off as false: write a word in quotes, "none"'
        case "literal_error", None:
            return '; YAML reads null, ~ and nothing as no value: write a word in quotes, "none"'
        case "int_type", str() as text if _is_number(text):
            return "; YAML reads it as text: write 1000, not '1000' or 1e3"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
