"""Owns taking in a study that was driven on another machine: its rows into the database here, its
files into its directory, with a note of where it is from.

What is here alone is never lost to what is fetched. Knows nothing of how it was fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy

from search_spaces.errors import EnvironmentFault, InputError, words_of
from storage.database import close, faults, open_for_writing, reader_of
from storage.files import make_directory, open_reading, replace
from storage.identity import HOST, look_beside
from storage.lease import lease_for
from storage.reading import identity_in, read_study
from storage.rows import copy_rows
from storage.urls import DatabaseUrl, SqliteUrl, parse_url

_NOTE_BYTES_MAX = 4096


def refuse_local(name: str, *, host: str, url: str, home: Path) -> None:
    """Raise where a study of that name is here that was not fetched from that host.

    Args:
        name: of the study.
        host: where it is to be driven.
        url: of the database here.
        home: the directory of all studies' files (``runs``).

    Raises:
        InputError: there is one; or its directory holds another study's files.
        EnvironmentFault: the database is not to be had.
    """
    noted = _noted(home / name)
    if noted == host:
        return
    of = "this machine" if noted is None else noted
    if identity_in(parse_url(url), name) or look_beside(home / name).strangers(None):
        raise InputError(
            f"study '{name}' is here already, of {of}: choose another name for that of {host} "
            "with --study"
        )


def take_in(
    name: str, *, host: str, database: Path, files: Mapping[str, Path], url: str, home: Path
) -> None:
    """Take in a study as it stands on the machine that drives it.

    Args:
        name: of the study.
        host: where it was driven.
        database: a SQLite file with the study.
        files: copies of its directory's, by name.
        url: of the database here.
        home: the directory of all studies' files here.

    Raises:
        InputError: here is another study of that name, or one with results of its own.
        EnvironmentFault: a database or the directory is not to be had, or somebody drives it here.
    """
    here, there = parse_url(url), SqliteUrl(database.resolve())
    if identity_in(there, name) is None:
        return
    with _leased(name, here) as engine:
        # What is looked at can no longer change: whoever goes on with it here needs the lease.
        _refuse_loss(name, here=here, there=there, home=home)
        try:
            make_directory(home / name)
            # Before its rows, so that whatever happens then the next fetch knows whose they are.
            replace(home / name / HOST, json.dumps({"host": host}).encode())
            with reader_of(there) as source:
                assert source is not None, "its identity was read"
                copy_rows(name, source=source, target=engine)
            for file, copy in files.items():
                replace(home / name / file, copy.read_bytes())
        except OSError as error:
            raise EnvironmentFault(f"cannot write to {home / name}: {words_of(error)}") from error


@contextmanager
def _leased(name: str, url: DatabaseUrl) -> Iterator[sqlalchemy.Engine]:
    """Open the database with the right to drive a study, so that nobody else does meanwhile."""
    storage = open_for_writing(url)
    lease = lease_for(url, name)
    try:
        with faults(url):
            lease.acquire()
            yield storage.engine
    finally:
        lease.release()
        close(storage)


def _refuse_loss(name: str, *, here: DatabaseUrl, there: DatabaseUrl, home: Path) -> None:
    """Raise where what is here would be lost to what was fetched."""
    known = identity_in(here, name)
    if known is None:
        return
    if known != identity_in(there, name):
        raise InputError(
            f"study '{name}' is here already, and is another than the one that was fetched: choose "
            "another name with --study"
        )
    lost = _attempts(name, here, home) - _attempts(name, there, home)
    if lost:
        raise InputError(
            f"study '{name}' has results here ({len(lost)}) that are not on the machine it was "
            "fetched from, so nothing of it was replaced: go on with it here, or under another "
            "--study there"
        )


def _attempts(name: str, url: DatabaseUrl, home: Path) -> set[tuple[int, str | None]]:
    study = read_study(name, url=_text(url), home=home)
    return {(r.number, r.attempt_id) for r in (*study.records, *study.confirmations)}


def _text(url: DatabaseUrl) -> str:
    return str(url) if isinstance(url, SqliteUrl) else url.text


def _noted(directory: Path) -> str | None:
    """Return where a study's directory was fetched from; None for one of this machine's."""
    try:
        with open_reading(directory / HOST) as file:
            noted = json.loads(file.read(_NOTE_BYTES_MAX))
    except (OSError, ValueError):
        return None
    host = noted.get("host") if isinstance(noted, dict) else None
    return host if isinstance(host, str) else None
