"""Files and directories that a person names for output, and what of them may be replaced."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from search_spaces.documents import is_directory
from search_spaces.errors import EnvironmentFault, InputError, listed, words_of
from storage.files import write_chosen

WRITTEN_BY = "Written by qlora-sweep"
"""Begins a comment, on a line of its own, in every file of sweep's that can hold comments."""

_MARK = re.compile(
    rb'^# Written by qlora-sweep|^<meta name="generator" content="qlora-sweep">'
    rb"|<svg[^>]*><!-- Written by qlora-sweep|tEXtSoftware\0qlora-sweep",
    re.MULTILINE,
)
_DOCUMENT = re.compile(
    rb'\A{"surface": \d+, "model": |^ +"provenance": {\n +"study": ', re.MULTILINE
)
"""What an export has in JSON, which holds no comments."""
_MARKED_BYTES, _DOCUMENT_BYTES = 2**12, 2**20
"""A mark stands at a file's beginning; a document of JSON is smaller."""
_KNOWN_ENDINGS = re.compile(
    r"\.(arrow|bz2|csv|eps|gif|gz|html?|ini|jpe?g|jsonl?|md|ndjson|parquet|pdf|png|py|safetensors|"
    r"sh|svg|toml|tsv|txt|webp|xz|ya?ml|zip)"
)
"""Endings that say what a file holds; any other is a part of its name."""


def checked_output(
    typed: str | None,
    *,
    what: str,
    endings: Sequence[str],
    is_forced: bool,
    is_marked: bool = True,
) -> Path | None:
    """Return the path of a file that a person named, which may be written; None where none is
    named, and for ``-``, which is stdout.

    Args:
        typed: its name; a link stands for what it points to.
        what: is written, for the message.
        endings: of its name, the usual one first; a name may also have none.
        is_forced: whether a file that sweep did not write may be replaced.
        is_marked: whether one that it did write may be replaced all the same.

    Raises:
        InputError: its ending means another format, it is a directory or in one that does not
            exist, or it would replace somebody's file.
        EnvironmentFault: it cannot be looked at.
    """
    if typed is None or typed == "-":
        return None
    path, label = Path(typed), f"--output: {typed}"
    suffix = path.suffix.lower()
    if _KNOWN_ENDINGS.fullmatch(suffix) and suffix not in endings:
        raise InputError(f"{label}: {what} goes into a file that ends in {listed(endings)}")
    if typed.endswith("/") or is_directory(path, label=label):
        raise InputError(f"{label} names a directory: name a file in it")
    require_parent(path)
    if not is_forced and path.is_file() and not (is_marked and _is_replaceable(path)):
        whose = "is not sweep's to replace" if is_marked else "is there already"
        raise InputError(f"{label} {whose}: name another file, or replace it with --force")
    return path


def write_output(path: Path, data: bytes) -> None:
    """Write a file that a person named, as `files.write_chosen` does.

    Raises:
        EnvironmentFault: it cannot be written there; what was there before is untouched.
    """
    try:
        write_chosen(path, data)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror or error}") from error


def require_parent(path: Path) -> None:
    """Refuse an output in a directory that does not exist.

    Raises:
        InputError: names that directory.
    """
    parent = Path(os.path.realpath(path)).parent
    if not is_directory(parent, label=f"--output: {path}"):
        raise InputError(f"--output: {path}: there is no directory {parent}: make it first")


def _is_replaceable(path: Path) -> bool:
    """Whether a file is empty, or sweep wrote it."""
    try:
        with path.open("rb") as file:
            head = file.read(_DOCUMENT_BYTES)
    except OSError as error:
        raise EnvironmentFault(f"--output: {words_of(error)}") from error
    marked = _MARK.search(head[:_MARKED_BYTES]) or _DOCUMENT.search(head)
    return not head or marked is not None
