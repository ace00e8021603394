"""Which files are texts, by their names: one, a directory of them, or a data set of the hub.

Light to import, as the parent does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from search_spaces.documents import exists, home_expanded, is_directory
from search_spaces.errors import EnvironmentFault, InputError, quote, words_of
from search_spaces.models import is_hub_id

LINES, JSON, CSV, PARQUET = "lines", "json", "csv", "parquet"
"""How a file is read; JSON may be lines or an array."""
_ENDINGS = {
    ".jsonl": LINES,
    ".ndjson": LINES,
    ".json": JSON,
    ".csv": CSV,
    ".tsv": CSV,
    ".parquet": PARQUET,
}
_COMPRESSIONS = (".gz", ".bz2", ".xz")
_NO_HUBS = (*_COMPRESSIONS, ".arrow", ".md", ".pdf", ".tar", ".txt", ".xlsx", ".xml", ".zip")
"""Endings that files have and data sets of the hub do not, of formats that are not read."""
_KNOWN = (
    ".jsonl, .ndjson, .json, .csv, .tsv (with .gz, .bz2 or .xz behind it, where it is compressed) "
    'or .parquet; of plain texts, write each as a line {"text": ...} of a .jsonl'
)


def is_on_hub(name: str) -> bool:
    """Return whether texts are on the hub: named like it, and not like a file that is to be here.

    Where there is a directory of the organization's name, what is missing is missing in it.
    """
    path = home_expanded(name)
    is_file = how_read(path) is not None or name.lower().endswith(_NO_HUBS)
    is_here = exists(path, label=name) or is_directory(path.parent, label=name)
    return is_hub_id(name) and not is_file and not is_here


def text_files(name: str) -> list[tuple[str, Path]]:
    """Return the files of texts that are here, each with the name that a person would use.

    Raises:
        InputError: there is no such file or directory, or nothing in it can be read as texts.
        EnvironmentFault: it is there and cannot be read.
    """
    path = home_expanded(name)
    if not exists(path, label=name):
        is_here = path.parent.name and is_directory(path.parent, label=name)
        why = f" in '{path.parent}'" if is_here else ", and no hub id (org/name)"
        if is_here and is_hub_id(name):
            why += "; for the hub's, run this where no directory has that name"
        raise InputError(f"{quote(name)}: no such file or directory{why}")
    if not is_directory(path, label=name):
        if how_read(path) is None:
            raise InputError(f"{name}: its name must end in {_KNOWN}")
        return _named([(name, path)])
    try:
        found = sorted(file for file in _walked(path) if how_read(file) is not None)
    except OSError as error:
        raise EnvironmentFault(f"{name}: cannot be read: {words_of(error)}") from error
    if not found:
        raise InputError(f"{name}: no file in this directory ends in {_KNOWN}")
    dead = next((file for file in found if not exists(file, label=str(file))), None)
    if dead is not None:
        raise InputError(f"{dead}: a link to what is not there: remove it, or bring that back")
    return _named([(f"{name.rstrip('/')}/{file.relative_to(path)}", file) for file in found])


def _named(files: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Return files with their names, all of which can be written down."""
    for label, _ in files:
        try:
            label.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{quote(label)}: the name is no UTF-8: rename it") from error
    return files


def _walked(directory: Path) -> Iterator[Path]:
    """Yield the files below a directory, without what is hidden."""
    for folder, folders, files in os.walk(directory, onerror=_raise):
        # In place: what is left out is not walked either.
        folders[:] = filter(_is_shown, folders)
        yield from (Path(folder, file) for file in files if _is_shown(file))


def _raise(error: OSError) -> None:
    raise error


def _is_shown(name: str) -> bool:
    return not name.startswith((".", "__"))


def how_read(path: Path) -> str | None:
    """Return how a file is read, by its name; None for no texts."""
    name = path.name.lower()
    for ending in _COMPRESSIONS:
        if name.endswith(ending):
            how = _ENDINGS.get(Path(name.removesuffix(ending)).suffix)
            return None if how == PARQUET else how
    return _ENDINGS.get(Path(name).suffix)
