"""Owns turning what a person names into a search space: a shipped preset, or a YAML file of theirs.

Strict: every key and every declared value is checked when the file is read, and the message names
file, line, key and value. Knows nothing of Optuna.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from search_spaces.config import TrialConfig, parse_config
from search_spaces.dimensions import read_dimension, read_value
from search_spaces.documents import Document, exists, home_expanded, parse_yaml, read_text
from search_spaces.errors import InputError, did_you_mean, quote
from search_spaces.gpus import find_gpu
from search_spaces.knobs import NEEDED
from search_spaces.models import located
from search_spaces.space import ConfigKey, SearchSpace, largest_whole
from search_spaces.texts import TextsChoice
from search_spaces.validation import validate


def preset_name(typed: str) -> str | None:
    """Return the shipped preset that a name means, whatever its case; None where none does.

    A path, or the name of a file that is there, is no preset unless it is written just like one.
    """
    presets = preset_texts()
    if typed in presets:
        return typed
    wanted = typed.strip().lower()
    is_free = wanted in presets and not _is_path(typed, home_expanded(typed))
    return wanted if is_free else None


def load_space(name_or_path: str) -> SearchSpace:
    """Return the space of a shipped preset, whatever the case of its name, or of a YAML file.

    Raises:
        InputError: neither a preset nor a file, or a file that does not describe a space.
        EnvironmentFault: the file is there and cannot be read.
    """
    presets, preset = preset_texts(), preset_name(name_or_path)
    if preset is not None:
        return parse_space(presets[preset], label=f"{preset}.yaml")
    path = home_expanded(name_or_path)
    if not _is_path(name_or_path, path):
        raise InputError(
            f"unknown preset '{name_or_path}'"
            f"{did_you_mean(name_or_path, presets, lists='sweep presets')} "
            "(a preset, or the path of a YAML file)"
        )
    space = parse_space(read_text(path, label=name_or_path), label=name_or_path)
    data = None if space.data is None else located_texts(space.data, beside=path.parent)
    here = {"model": located(space.model, beside=path.parent), "data": data}
    return space.model_copy(update=here)


def located_texts(choice: TextsChoice, *, beside: Path) -> TextsChoice:
    """Return a choice of texts as a file in the directory ``beside`` means its names.

    What is not there beside the file is left as it is: a path from where the command runs, or a hub
    id.
    """
    names = {"texts": choice.texts, "tokenizer": choice.tokenizer}
    found = {key: _located(name, beside=beside) for key, name in names.items() if name}
    return choice.model_copy(update=found)


def _located(name: str, *, beside: Path) -> str:
    path = beside / home_expanded(name)
    return str(path.absolute()) if exists(path, label=name) else name


def _is_path(text: str, path: Path) -> bool:
    return (
        path.suffix in (".yaml", ".yml") or "/" in text or (text != "" and exists(path, label=text))
    )


def shipped_presets() -> list[SearchSpace]:
    """Return the shipped presets by name."""
    return [load_space(name) for name in sorted(preset_texts())]


def preset_texts() -> dict[str, str]:
    """Return the YAML of every shipped preset, by name."""
    with as_file(files("search_spaces") / "presets") as directory:
        paths = sorted(directory.glob("*.yaml"))
        return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def parse_space(text: str, *, label: str) -> SearchSpace:
    """Read a space from YAML.

    Args:
        text: the YAML.
        label: the file as the person named it, for messages; its stem is the default name.

    Raises:
        InputError: an unknown key, a value that cannot be, or keys that contradict each other.
    """
    document = parse_yaml(text, label=label)
    values = {"name": _name_of(label), **_without_empty(document)}
    written = validate(_Written, values, document)
    for at, entry in enumerate(written.leave_out):
        for key, value in ((key, value) for key, of in entry.items() for value in of):
            read_value(key, value, document=document, at=("leave_out", at, key))
    for section in ("fixed", "baseline"):
        values[section] = {
            key: read_value(key, value, document=document, at=(section, key))
            for key, value in values.get(section, {}).items()
        }
    values["dimensions"] = {
        key: read_dimension(document, key, value)
        for key, value in values.get("dimensions", {}).items()
    }
    _take_time_budget(document, values)
    _check_gpu(document, values)
    space = validate(SearchSpace, values, document)
    _check_baseline(document, space)
    return space


class _Written(SearchSpace):
    """A space as a file may have it, its values not yet read."""

    time_budget: Any = None
    """A duration in place of ``time_budget_seconds``."""
    dimensions: dict[ConfigKey, Any] = Field(default={})

    @model_validator(mode="after")
    def _consistent(self) -> _Written:
        return self


def _name_of(label: str) -> str:
    """Return the name of a space whose file gives none: the file's, as far as names go."""
    stem = unicodedata.normalize("NFC", Path(label).stem)
    return re.sub(r"[^\w.-]+", "-", stem).strip(".-")[:64] or "space"


def _without_empty(document: Document) -> dict[str, Any]:
    """Return the document's values; a section with nothing under it is one that is not there."""
    sections = ("dimensions", "fixed", "baseline", "steps")
    return {k: v for k, v in document.values.items() if not (k in sections and v is None)}


def _check_gpu(document: Document, values: dict[str, Any]) -> None:
    gpu = values.get("gpu", "auto")
    if isinstance(gpu, str) and gpu not in ("auto", "cpu"):
        try:
            find_gpu(gpu)
        except InputError as error:
            raise InputError(f"{document.where('gpu')}: gpu: {error}") from error


def _check_baseline(document: Document, space: SearchSpace) -> None:
    """Refuse a baseline that is none, whether by what it names or by what it inherits."""
    validate(TrialConfig, space.baseline, document, at=("baseline",), about="baseline: ")
    try:
        space.baseline_config()
    except InputError as error:
        raise InputError(f"{document.where('baseline')}: {error}") from error


def _take_time_budget(document: Document, values: dict[str, Any]) -> None:
    """Turn ``time_budget: 10m`` into seconds."""
    if "time_budget" not in values:
        return
    where = document.where("time_budget")
    if "time_budget_seconds" in values:
        raise InputError(f"{where}: time_budget and time_budget_seconds are both given: keep one")
    typed = values.pop("time_budget")
    is_number = isinstance(typed, int | float) and not isinstance(typed, bool)
    try:
        values["time_budget_seconds"] = parse_duration(str(typed) if is_number else typed)
    except InputError as error:
        raise InputError(f"{where}: time_budget: {error}") from error


_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


def parse_duration(text: object) -> float:
    """Return the seconds that ``10m``, ``90s``, ``1h30m`` or ``600`` stands for.

    Raises:
        InputError: it is none of these, or no time at all.
    """
    written = text.strip().lower().replace(" ", "") if isinstance(text, str) else ""
    match = _DURATION.fullmatch(written)
    parts = match.groups() if match else ()
    seconds = sum(float(part or 0) * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if not seconds > 0 or seconds == float("inf"):
        raise InputError(f"a duration is written like 10m, 90s, 1h30m or 600, got {quote(text)}")
    return seconds


def with_fixed(space: SearchSpace, held: Mapping[str, Any]) -> SearchSpace | TrialConfig:
    """Return ``space`` with the values in ``held`` fixed; one configuration where nothing is free.

    Raises:
        InputError: no configuration takes such a value, or no batch of the space goes with it.
    """
    options = Document("options")
    values = {key: read_value(key, value, document=options) for key, value in held.items()}
    fixed = {**space.fixed, **_needed(values, space), **values}
    free = {key: dimension for key, dimension in space.dimensions.items() if key not in values}
    if not free:
        return parse_config(fixed, where="options")
    baseline = _with_whole_batch(
        space.baseline,
        effective=values.get("effective_batch_size"),
        cards=fixed.get("data_parallel", 1),
    )
    # What is typed is asked for, whatever the file leaves out.
    left_out = [entry for entry in space.leave_out if not entry.keys() <= values.keys()]
    changes = {"dimensions": free, "fixed": fixed, "baseline": baseline, "leave_out": left_out}
    return space.changed(changes)


def _needed(values: Mapping[str, Any], space: SearchSpace) -> dict[str, Any]:
    """Return what typed values need of settings that are neither typed nor searched."""
    words = {key: value for key, value in values.items() if isinstance(value, str | int)}
    needed = (NEEDED.get(pair, {}) for pair in words.items())
    return {
        key: value for each in needed for key, value in each.items() if key not in space.dimensions
    }


def _with_whole_batch(
    baseline: Mapping[str, Any], *, effective: int | None, cards: int
) -> dict[str, Any]:
    """Return a baseline whose micro-batch goes into an effective batch that somebody typed.

    The file that names the one knew nothing of the other: the largest that goes in takes its place.
    """
    micro = baseline.get("micro_batch_size")
    if effective is None or micro is None or "effective_batch_size" in baseline:
        return dict(baseline)
    share = effective // baseline.get("data_parallel", cards)
    return {**baseline, "micro_batch_size": largest_whole(micro, share)}
