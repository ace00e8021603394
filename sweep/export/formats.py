"""Owns the formats of an export by name, and writing one to a file. The way into this package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from search_spaces.errors import EnvironmentFault, InputError, did_you_mean, quote
from storage.definition import StudySnapshot
from storage.files import write_chosen
from storage.surfaces import surface_text
from sweep.export.recipe import Recipe, recipe_of
from sweep.export.record import document
from sweep.export.script import script
from sweep.export.trainer_files import axolotl, llama_factory, trl


def _document(recipe: Recipe) -> str:
    return json.dumps(document(recipe), indent=2) + "\n"


_FORMATS: dict[str, Callable[[Recipe], str]] = {
    "script": script,
    "json": _document,
    "axolotl": axolotl,
    "llama-factory": llama_factory,
    "trl": trl,
}

SURFACE = "surface"
"""The format of all of a study's trials; the others are of one."""


def format_names() -> tuple[str, ...]:
    """Return the names of all formats of a winner, the one that expresses everything first."""
    return tuple(_FORMATS)


def export(snapshot: StudySnapshot, *, format: str, number: int | None = None) -> str:
    """Return the winner of a study as a recipe, or its trials as a surface: the text of one file.

    Args:
        snapshot: the study.
        format: one of `format_names`.
        number: of the trial that is wanted instead of the winner.

    Raises:
        InputError: no such format, or no such trial that fits.
        NothingFits: nothing that was tried was measured to fit.
    """
    if format == SURFACE:
        if number is not None:
            raise InputError("--trial: a surface is of all trials; leave it out")
        return surface_text(snapshot)
    if format not in _FORMATS:
        raise InputError(
            f"unknown format {quote(format)}{did_you_mean(format, (*_FORMATS, SURFACE))}"
        )
    return _FORMATS[format](recipe_of(snapshot, number=number))


def save(text: str, path: Path) -> None:
    """Write an export to ``path``, whole or not at all; missing directories are made.

    Raises:
        EnvironmentFault: it cannot be written there; what was there before is untouched.
    """
    try:
        write_chosen(path, text.encode("utf-8"))
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror}") from error
