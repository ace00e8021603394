"""What a verification is held against: a configuration, and what was measured of it.

It is read from a study, or from an export, each of which has it in one line.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from search_spaces.config import TrialConfig
from search_spaces.documents import is_directory, parse_object, read_text
from search_spaces.errors import InputError, quote
from search_spaces.models import ModelSpec, load_model_spec
from search_spaces.space import Weights
from search_spaces.texts import TextsSummary
from storage.definition import StudySnapshot, Target
from sweep.export.documents import recorded
from sweep.export.recipe import recipe_of

Kind = Literal["training", "script", "trl"]
"""What runs: our own `sweep train`, an exported script, TRL's own command on an exported file."""
_SUFFIXES = (".py", ".yaml", ".yml")


@dataclass(frozen=True)
class Record:
    """A configuration with what was measured of it, and on what."""

    label: str
    """In words: ``trial 12 of study 'a10'``."""
    kind: Kind
    config: TrialConfig
    model: ModelSpec
    weights: Weights
    target: Target
    tokens_per_second: float
    peak_allocated_bytes: int
    flags: tuple[str, ...] = ()
    is_confirmed: bool = False
    environment: Mapping[str, Any] = field(default_factory=dict)
    texts: TextsSummary | None = None
    """None where rows were random."""
    eval_fraction: float = 0.0
    """Of those texts' rows, held out by every trial."""
    seed: int = 0
    path: Path | None = None
    """The export that runs; None for a training of ours."""


def record_of_study(snapshot: StudySnapshot, *, number: int | None = None) -> Record:
    """Return the record of a study's winner, or of the trial of that number.

    Raises:
        NothingFits: nothing that was tried was measured to fit.
        InputError: there is no such trial that fits.
    """
    recipe = recipe_of(snapshot, number=number)
    definition = snapshot.definition
    return Record(
        label=_label(recipe.study, recipe.number),
        kind="training",
        config=recipe.config,
        model=recipe.model,
        weights=definition.space.weights,
        target=recipe.target,
        tokens_per_second=recipe.measurement.tokens_per_second,
        peak_allocated_bytes=recipe.measurement.peak_allocated_bytes,
        flags=recipe.measurement.flags,
        is_confirmed=recipe.is_confirmed,
        environment=recipe.environment,
        texts=definition.texts,
        eval_fraction=0.0 if definition.space.data is None else definition.space.data.eval_fraction,
        seed=definition.space.seed,
    )


def record_of_export(typed: str) -> Record:
    """Return the record that an exported file has, or the one in a directory.

    Raises:
        InputError: it has none, or it is for a trainer that cannot be run here.
    """
    path = _file_of(Path(typed), typed)
    text = read_text(path, label=typed)
    values = _document_in(path, text, label=typed)
    kind = _kind_of(path, text, typed)
    try:
        told = _Told.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"]))
        raise InputError(
            f"{typed}: the record in it is not whole ({key}: {fault['msg']}): export it again"
        ) from error
    return _record(told, path=path, kind=kind)


def refuse_several_cards(record: Record) -> None:
    """Refuse what was measured on several GPUs at once.

    Raises:
        InputError: says how many, and what can be verified.
    """
    cards = record.config.data_parallel
    if cards > 1:
        raise InputError(
            f"{record.label}: it was measured on {cards} GPUs at once (data_parallel), and a "
            "verification runs on one: name a trial of one GPU with --trial, or run the exported "
            "script with torchrun, which compares itself"
        )


def _file_of(path: Path, typed: str) -> Path:
    if not is_directory(path, label=typed):
        return path
    found = [
        file
        for file in sorted(path.iterdir())
        if file.suffix in _SUFFIXES and recorded(_text_or_nothing(file)) is not None
    ]
    if len(found) == 1:
        return found[0]
    what = "no export" if not found else f"{len(found)} exports: {found[0].name}, {found[1].name}"
    raise InputError(f"{typed}: {what} in it; name the file that `sweep export` wrote")


def _text_or_nothing(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _document_in(path: Path, text: str, *, label: str) -> dict[str, Any]:
    """Return the record of an export: the document itself, or the line that has it."""
    found = recorded(text)
    if found is not None:
        return parse_object(found, where=f"{label}: its record")
    values = _whole_document(path, text, label=label)
    if values is not None:
        return values
    raise InputError(
        f"{label}: no record of what was measured in it; name a study, or a file that "
        "`sweep export` wrote"
    )


def _whole_document(path: Path, text: str, *, label: str) -> dict[str, Any] | None:
    """Return the values of a file that is a record as a whole; None where it is something else."""
    if path.suffix == ".json":
        values: Any = parse_object(text, where=label)
    elif path.suffix in (".yaml", ".yml"):
        values = _yaml(text, label=label)
    else:
        return None
    return values if isinstance(values, dict) and {"measurement", "config"} <= set(values) else None


def _yaml(text: str, *, label: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{label}: no YAML: {_first_line(error)}") from error


def _kind_of(path: Path, text: str, typed: str) -> Kind:
    """Return what runs an export.

    Raises:
        InputError: nothing does here.
    """
    if path.suffix == ".json":
        return "training"
    if path.suffix == ".py":
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise InputError(f"{typed}: line {error.lineno}: {error.msg}") from error
        if "\nfrom unsloth import" in text:
            raise InputError(f"{typed}: Unsloth's script is not verified: verify the study")
        return "script"
    values = _yaml(text, label=typed)
    keys = set(values) if isinstance(values, dict) else set()
    if {"use_peft", "max_length"} <= keys:
        return "trl"
    if "config" in keys and "measurement" in keys:
        return "training"
    raise InputError(
        f"{typed}: a script, TRL's file or the configuration can be verified; for this trainer, "
        "verify the study"
    )


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class _ToldGpu(_Part):
    name: str
    budget_bytes: PositiveInt
    emulated_on: str | None = None


class _ToldModel(_Part):
    name: str
    weights: str | None = None


class _ToldFigures(_Part):
    tokens_per_second: PositiveFloat
    peak_allocated_bytes: PositiveInt
    flags: tuple[str, ...] = ()


class _ToldTexts(_Part):
    eval_fraction: float = Field(default=0.0, ge=0, lt=1)
    seed: int = Field(default=0, ge=0)


class _ToldProvenance(_Part):
    driver: str | None = None
    cuda_driver: str | None = None
    python: str | None = None
    gpu: str | None = None
    sweep: dict[str, str | None] = Field(default_factory=dict)
    texts: _ToldTexts | None = None


class _Told(_Part):
    """What an export's document tells of what was measured; the rest of it is not looked at."""

    study: str
    number: int
    config: TrialConfig
    gpu: _ToldGpu
    model: _ToldModel
    measurement: _ToldFigures
    confirmed: bool = False
    versions: dict[str, str | None] | None = None
    texts: TextsSummary | None = None
    provenance: _ToldProvenance | None = None


def _record(told: _Told, *, path: Path, kind: Kind) -> Record:
    is_cpu = told.gpu.name == "cpu"
    provenance = told.provenance or _ToldProvenance()
    held_out = provenance.texts or _ToldTexts()
    return Record(
        label=f"{_label(told.study, told.number)}, as {path.name}",
        kind=kind,
        config=told.config,
        model=load_model_spec(told.model.weights or told.model.name),
        weights="pretrained" if told.model.weights else "random",
        target=Target(
            gpu=told.gpu.name,
            device="cpu" if is_cpu else "cuda",
            budget_bytes=told.gpu.budget_bytes,
            emulated_on=told.gpu.emulated_on,
        ),
        tokens_per_second=told.measurement.tokens_per_second,
        peak_allocated_bytes=told.measurement.peak_allocated_bytes,
        flags=told.measurement.flags,
        is_confirmed=told.confirmed,
        environment=_environment(provenance, told.versions or {}, is_cpu=is_cpu),
        texts=told.texts,
        eval_fraction=held_out.eval_fraction,
        seed=held_out.seed,
        path=path.resolve(),
    )


def _environment(
    provenance: _ToldProvenance, versions: Mapping[str, Any], *, is_cpu: bool
) -> dict[str, Any]:
    """Return a study's environment from what an export tells of it."""
    told = provenance.model_dump(include={"driver", "cuda_driver", "python"})
    # Of a study on the CPU an export calls that its GPU.
    gpu = None if is_cpu else provenance.gpu
    return told | {
        "gpu": gpu,
        "commit": provenance.sweep.get("commit"),
        "versions": dict(versions),
    }


def _label(study: str, number: int) -> str:
    return f"trial {number} of study {quote(study)}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
