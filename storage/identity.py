"""Owns a study's identity beside its database: a file that says whose the study's directory is.

A database that was emptied, deleted or taken for another no longer knows the study whose spool and
report stand in the directory. To start anew there would mix two studies' files, and nobody would
learn that the first one is gone: it is refused, and said wherever the study is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces.errors import EnvironmentFault, InputError, words_of
from storage.files import create, make_directory, open_reading, replace
from storage.spool import NAME as SPOOL
from storage.spool import newest_study

NAME = "study.json"
"""Of the file, in the study's directory."""
HOST = "host.json"
"""Of the file that says on which machine a study is driven that was fetched from there."""
REPORT = "report.html"
BYTES_MAX = 16 * 1024 * 1024
_REPORT_HEAD_BYTES = 64 * 1024
_REPORT_META = re.compile(rb'<meta name="study-identity" content="([0-9a-zA-Z-]+)">')


@dataclass(frozen=True)
class StudyFile:
    """What the file says."""

    identity: str
    name: str
    database: str
    """Where the study was last driven, without a password."""
    definition: dict[str, Any]
    """What it is about, as plain JSON: a spool is taken over by it where no database is left."""
    environment: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return what is written."""
        return {
            "study": self.identity,
            "name": self.name,
            "database": self.database,
            "definition": self.definition,
            "environment": self.environment,
        }


@dataclass(frozen=True)
class Beside:
    """Whose files stand in a study's directory."""

    directory: Path
    file: StudyFile | None = None
    is_file_unreadable: bool = False
    spooled: str | None = None
    """Identity that the spool's last line names."""
    reported: str | None = None
    """Identity that the report names."""
    has_report: bool = False

    def strangers(self, identity: str | None) -> tuple[str, ...]:
        """Return the names of the files that are of another study than the database's.

        Args:
            identity: of the database's study; None where it has none of that name.
        """
        named = {
            NAME: self.file.identity if self.file is not None else None,
            SPOOL: self.spooled,
            REPORT: self.reported,
        }
        if identity is not None:
            return tuple(name for name, its in named.items() if its not in (None, identity))
        left = [name for name, its in named.items() if its is not None]
        if self.has_report and self.reported is None:
            left.append(REPORT)
        if self.is_file_unreadable:
            left.append(NAME)
        return tuple(left)


def look_beside(directory: Path) -> Beside:
    """Return whose files stand in a study's directory. Reads, and never raises."""
    file, is_unreadable = _read(directory / NAME)
    reported, has_report = _read_report(directory / REPORT)
    spooled = newest_study(directory / SPOOL)
    return Beside(directory, file, is_unreadable, spooled, reported, has_report)


def refuse_strangers(beside: Beside, *, study: str, identity: str | None, database: str) -> None:
    """Raise where the files beside are of another study than the database's.

    Raises:
        InputError: they are; says what to do.
    """
    for words in stranger_words(beside, study=study, identity=identity, database=database):
        raise InputError(words)


def stranger_words(
    beside: Beside, *, study: str, identity: str | None, database: str
) -> tuple[str, ...]:
    """Return the same as a warning, for whoever only reads."""
    names = beside.strangers(identity)
    if not names:
        return ()
    return (f"{_what(beside, names, study, identity, database)}: {_advice(beside)}",)


def lost_words(directory: Path) -> str:
    """Return what to add where a database has no study of a directory's name; "" without one."""
    file = read_identity(directory)
    if file is None:
        return ""
    return (
        f"; the files of one are in {directory}, driven in {file.database}: put that database back "
        "or name it with --storage"
    )


def _what(
    beside: Beside, names: tuple[str, ...], study: str, identity: str | None, database: str
) -> str:
    *most, last = names
    files = f"{', '.join(most)} and {last}" if most else last
    of = "of another study" if identity is not None else "of a study that is not there any more"
    known = beside.file
    where = f", driven in {known.database}" if known is not None and NAME in names else ""
    are = "are" if len(names) > 1 else "is"
    return f"study '{study}' in {database}: {files} in {beside.directory} {are} {of}{where}"


def _advice(beside: Beside) -> str:
    over = ""
    if beside.spooled is not None:
        over = f" (--from {shlex.quote(str(beside.directory / SPOOL))} takes its results over)"
    return (
        "put that database back or name it with --storage, take another name with --study"
        f"{over}, or move or remove {beside.directory}"
    )


def note_identity(directory: Path, ours: StudyFile) -> None:
    """Write whose the directory is, where nobody else was faster.

    Raises:
        InputError: since anybody looked it has become another study's.
        EnvironmentFault: it cannot be written; a healthy database does not need it.
    """
    path = directory / NAME
    there, is_unreadable = _read(path)
    try:
        data = json.dumps(ours.to_json()).encode()
        known = there if there is not None and there.identity == ours.identity else None
        if is_unreadable or (known is not None and known.to_json() != json.loads(data)):
            replace(path, data)
        elif there is None:
            make_directory(directory)
            # Of two drivers at once one is first, and the other reads whose it is.
            with contextlib.suppress(FileExistsError):
                create(path, data)
    except OSError as error:
        reason = error.strerror or words_of(error)
        raise EnvironmentFault(f"cannot write {path}: {reason}") from error
    there, _ = _read(path)
    if there is not None:
        beside = Beside(directory, there)
        refuse_strangers(beside, study=ours.name, identity=ours.identity, database=ours.database)


def read_identity(directory: Path) -> StudyFile | None:
    """Return what the file in a study's directory says; None where there is none to be read."""
    return _read(directory / NAME)[0]


def _read(path: Path) -> tuple[StudyFile | None, bool]:
    """Return the file, and whether something else than one stands in its place."""
    try:
        values = json.loads(_head(path, BYTES_MAX))
        texts = values["study"], values["name"], values["database"]
        mappings = values["definition"], values["environment"]
        if not all(isinstance(t, str) for t in texts) or not all(
            isinstance(m, dict) for m in mappings
        ):
            raise TypeError
        return StudyFile(*texts, *mappings), False
    except FileNotFoundError:
        return None, False
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, os.path.lexists(path)


def _read_report(path: Path) -> tuple[str | None, bool]:
    """Return the identity that a report names, and whether there is a report."""
    try:
        head = _head(path, _REPORT_HEAD_BYTES)
    except OSError:
        return None, os.path.lexists(path)
    found = _REPORT_META.search(head)
    return (None if found is None else found[1].decode()), True


def _head(path: Path, limit: int) -> bytes:
    """Return the beginning of a file, and of nothing else that may stand there."""
    with open_reading(path) as file:
        return file.read(limit)
