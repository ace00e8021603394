"""A study's identity beside its database: a file that says whose the study's directory is.

A database that was emptied, deleted or taken for another no longer knows the study whose spool and
report stand in the directory. To start anew there would mix two studies' files, and nobody would
learn that the first one is gone: it is refused, and said wherever the study is read.
"""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from search_spaces.errors import EnvironmentFault, InputError, words_of
from storage.files import create, make_directory, read_bytes, replace
from storage.spool import NAME as SPOOL

NAME = "study.json"
"""Of the file, in the study's directory."""
HOST = "host.json"
"""Of the file that says on which machine a study is driven that was fetched from there."""
REPORT = "report.html"


class StudyFile(BaseModel):
    """What the file says."""

    model_config = ConfigDict(frozen=True)

    identity: str
    name: str
    database: str
    """Where the study was last driven, without a password."""
    definition: dict[str, Any]
    """What it is about, as plain JSON: a spool is taken over by it where no database is left."""
    environment: dict[str, Any]


def read_identity(directory: Path) -> StudyFile | None:
    """Return what the file in a study's directory says; None where there is none to be read."""
    try:
        return StudyFile.model_validate_json(read_bytes(directory / NAME))
    except (OSError, ValueError):
        return None


def stranger_words(
    directory: Path, study: str, identity: str | None, database: str
) -> tuple[str, ...]:
    """Return what is said where a study's directory is that of another study; nothing else.

    Args:
        directory: of the study.
        study: its name.
        identity: of the database's study of that name; None where it has none.
        database: that was asked.
    """
    beside = read_identity(directory)
    if beside is None or beside.identity == identity:
        return ()
    of = "of a study that is not there any more" if identity is None else "of another study"
    spool, over = directory / SPOOL, ""
    if spool.exists():
        over = f" (--from {shlex.quote(str(spool))} takes its results over)"
    return (
        f"study '{study}' in {database}: the files in {directory} are {of}, driven in "
        f"{beside.database}: put that database back or name it with --storage, take another name "
        f"with --study{over}, or move or remove {directory}",
    )


def note_identity(directory: Path, ours: StudyFile) -> None:
    """Write whose the directory is, where nobody else was faster.

    Raises:
        InputError: since anybody looked it has become another study's.
        EnvironmentFault: it cannot be written; a healthy database does not need it.
    """
    path, data = directory / NAME, json.dumps(ours.model_dump()).encode()
    try:
        make_directory(directory)
        # Of two drivers at once one is first, and the other reads whose it is.
        with suppress(FileExistsError):
            create(path, data)
        for words in stranger_words(directory, ours.name, ours.identity, ours.database):
            raise InputError(words)
        if read_identity(directory) != ours:
            replace(path, data)
    except OSError as error:
        reason = error.strerror or words_of(error)
        raise EnvironmentFault(f"cannot write {path}: {reason}") from error
