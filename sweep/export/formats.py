"""The formats of an export by name: the way into this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from search_spaces.errors import InputError, did_you_mean, quote
from storage.definition import StudySnapshot
from storage.surfaces import surface_text
from sweep.export.documents import PEFT_LOST, peft, yaml_document
from sweep.export.record import Record, beside, record_of
from sweep.export.script import imported_beside, script, script_lost
from sweep.export.trainer_files import axolotl, llama_factory, lost, trl, unsloth


@dataclass(frozen=True)
class Export:
    """What is written of a study in one format."""

    text: str
    """Of one file."""
    lost: tuple[str, ...] = ()
    """What the format cannot say of what was measured, and what its file does instead."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Texts of files that it needs in its directory, by their names."""
    record: str | None = None
    """Text of the record that `sweep verify` reads, of a file that it can run."""

    def files(self, path: Path) -> dict[Path, str]:
        """Return the texts of all files of an export to a path, that one first."""
        found = {
            path: self.text,
            **{path.with_name(name): self.beside[name] for name in self.beside},
        }
        return found if self.record is None else found | {beside(path): self.record}


@dataclass(frozen=True)
class _Format:
    text: Callable[[Record], str]
    endings: tuple[str, ...]
    lost: Callable[[Record], tuple[str, ...]] = lambda _: ()
    beside: Callable[[Record], Mapping[str, str]] = lambda _: {}


_JSON, _YAML, _PYTHON = (".json",), (".yaml", ".yml"), (".py",)
_FORMATS: dict[str, _Format] = {
    "script": _Format(script, _PYTHON, script_lost, imported_beside),
    "json": _Format(Record.to_json, _JSON),
    "yaml": _Format(yaml_document, _YAML),
    "peft": _Format(peft, _JSON, lambda _: PEFT_LOST),
    "axolotl": _Format(axolotl, _YAML, lambda recipe: lost(recipe, "axolotl")),
    "llama-factory": _Format(llama_factory, _YAML, lambda recipe: lost(recipe, "llama-factory")),
    "trl": _Format(trl, _YAML, lambda recipe: lost(recipe, "trl")),
    "unsloth": _Format(unsloth, _PYTHON, lambda recipe: lost(recipe, "unsloth")),
}

SURFACE = "surface"
"""The format of all of a study's trials; the others are of one."""


def format_names() -> tuple[str, ...]:
    """Return the names of all formats of a winner, the one that expresses everything first."""
    return tuple(_FORMATS)


def endings_of(format: str) -> tuple[str, ...]:
    """Return the endings of a format's file, the usual one first.

    Raises:
        InputError: no such format.
    """
    if format == SURFACE:
        return (".jsonl", ".ndjson")
    if format not in _FORMATS:
        raise InputError(
            f"--format: unknown format {quote(format)}{did_you_mean(format, (*_FORMATS, SURFACE))}"
        )
    return _FORMATS[format].endings


def export(snapshot: StudySnapshot, *, format: str, number: int | None = None) -> str:
    """Return the text of `exported`."""
    return exported(snapshot, format=format, number=number).text


def exported(snapshot: StudySnapshot, *, format: str, number: int | None = None) -> Export:
    """Return the winner of a study as a recipe, or its trials as a surface.

    Args:
        snapshot: the study.
        format: one of `format_names`, or a surface.
        number: of the trial that is wanted instead of the winner.

    Raises:
        InputError: no such trial that fits.
        NothingFits: nothing that was tried was measured to fit.
    """
    if format == SURFACE:
        if number is not None:
            raise InputError("--trial: a surface is of all trials; leave it out")
        return Export(surface_text(snapshot))
    chosen = _FORMATS[format]
    record = record_of(snapshot, number=number).model_copy(update={"format": format})
    lost = chosen.lost(record)
    told = record.model_copy(update={"unsupported": lost})
    return Export(
        chosen.text(record),
        lost,
        chosen.beside(record),
        told.to_json() if format in ("script", "trl") else None,
    )
