"""Taking in a study that was driven on another machine: its trials into the database here, its
files into its directory, with a note of where it is from.

What is here alone is never lost to what is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import optuna

from search_spaces.errors import EnvironmentFault, InputError, words_of
from storage.database import close, faults, open_for_reading
from storage.files import make_directory, read_bytes, replace
from storage.identity import HOST, stranger_words
from storage.lease import open_leased
from storage.reading import identity_in, read_study
from storage.spool import NAME as SPOOL
from storage.spool import WORTH_KEEPING, Spool
from storage.urls import SqliteUrl, parse_url


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
    if identity_in(parse_url(url), name) or stranger_words(home / name, name, None, url):
        raise InputError(
            f"study '{name}' is here already, of {noted or 'this machine'}: choose another name "
            f"for that of {host} with --study"
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
    with ExitStack() as closing:
        # What is looked at can no longer change: whoever goes on with it here needs the lease.
        target = open_leased(here, name, closing.callback)
        is_there = identity_in(here, name) is not None
        if is_there:
            _refuse_loss(name, url=url, there=str(there), home=home, spool=files.get(SPOOL))
        source = open_for_reading(there)
        assert source is not None, "its identity was read"
        closing.callback(close, source)
        try:
            make_directory(home / name)
            # Before its trials, so that whatever happens then the next fetch knows whose they are.
            replace(home / name / HOST, json.dumps({"host": host}).encode())
            with faults(here), target.together():
                if is_there:
                    target.delete_study(target.get_study_id_from_name(name))
                optuna.copy_study(from_study_name=name, from_storage=source, to_storage=target)
            for file, copy in files.items():
                replace(home / name / file, copy.read_bytes())
        except OSError as error:
            raise EnvironmentFault(f"cannot write to {home / name}: {words_of(error)}") from error


def _refuse_loss(name: str, *, url: str, there: str, home: Path, spool: Path | None) -> None:
    """Raise where what is here, in database or spool, would be lost to what was fetched."""
    ours, theirs = (read_study(name, url=of, home=home) for of in (url, there))
    if ours.identity != theirs.identity:
        raise InputError(
            f"study '{name}' is here already, and is another than the one that was fetched: choose "
            "another name with --study"
        )
    here, fetched = (
        {(r.number, r.attempt_id) for r in (*study.records, *study.confirmations)}
        for study in (ours, theirs)
    )
    for path, known in ((home / name / SPOOL, here), (spool, fetched)):
        spooled = () if path is None else Spool(path, ours.identity).read()
        known |= {(r.number, r.attempt_id) for r in spooled if r.verdict in WORTH_KEEPING}
    if lost := here - fetched:
        raise InputError(
            f"study '{name}' has results here ({len(lost)}) that are not on the machine it was "
            "fetched from, so nothing of it was replaced: go on with it here, or under another "
            "--study there"
        )


def _noted(directory: Path) -> str | None:
    """Return where a study's directory was fetched from; None for one of this machine's."""
    try:
        noted = json.loads(read_bytes(directory / HOST))
    except (OSError, ValueError):
        return None
    return str(noted["host"]) if isinstance(noted, dict) and "host" in noted else None
