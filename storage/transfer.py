"""Whole studies: taken in from the machine that drove them, and removed.

What is here alone is never lost to what is fetched.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import optuna

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, words_of
from qlora_sweep.storage import directory
from qlora_sweep.storage.database import close, faults, open_for_reading
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.files import is_temporary, read_bytes, replace, writing
from qlora_sweep.storage.lease import FileLease, open_leased
from qlora_sweep.storage.reading import identity_in, read_study
from qlora_sweep.storage.urls import SqliteUrl, parse_url


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
    noted = None
    with suppress(OSError, ValueError, LookupError, TypeError):
        noted = str(json.loads(read_bytes(home / name / directory.HOST))["host"])
    is_here = identity_in(parse_url(url), name) or directory.stranger_words(
        home / name, name, None, url
    )
    if noted != host and is_here:
        ours = f"study '{name}' is here already, of {noted or 'this machine'}"
        raise InputError(f"{ours}: choose another --study for that of {host}")


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
    here = parse_url(url)
    there = SqliteUrl(database.resolve())
    if identity_in(there, name) is None:
        return
    with ExitStack() as closing:
        # Nothing here can change from now on: resuming the study needs the lease.
        target = open_leased(here, name, closing.callback)
        is_there = identity_in(here, name) is not None
        if is_there:
            _refuse_loss(name, url=url, there=str(there), home=home, files=files)
        source = open_for_reading(there)
        assert source is not None, "its identity was read"
        closing.callback(close, source)
        with writing(home / name):
            # Before its trials, so that whatever happens then the next fetch knows whose they are.
            replace(home / name / directory.HOST, json.dumps({"host": host}).encode())
            with faults(here), target.together():
                if is_there:
                    target.delete_study(target.get_study_id_from_name(name))
                optuna.copy_study(from_study_name=name, from_storage=source, to_storage=target)
            for file, copy in files.items():
                replace(home / name / file, copy.read_bytes())


def _refuse_loss(name: str, *, url: str, there: str, home: Path, files: Mapping[str, Path]) -> None:
    """Raise where what is here, in database or spool, would be lost to what was fetched."""
    ours = read_study(name, url=url, home=home)
    theirs = read_study(name, url=there, home=home)
    if ours.identity != theirs.identity:
        other = "and is another than the one that was fetched: choose another --study"
        raise InputError(f"study '{name}' is here already, {other}")
    here = _results(ours, home / name / directory.SPOOL)
    lost = here - _results(theirs, files.get(directory.SPOOL))
    if lost:
        raise InputError(
            f"study '{name}' has results here ({len(lost)}) that are not on the machine it was "
            "fetched from: nothing was replaced; resume it here, or under another --study there"
        )


def _results(study: StudySnapshot, spool: Path | None) -> set[tuple[int, str | None]]:
    """Return number and attempt of each result that is in a study's database, or in its spool and
    worth keeping."""
    records = list(study.records + study.confirmations)
    if spool is not None:
        for record in directory.Spool(spool, study.identity).read().records:
            if record.verdict in directory.WORTH_KEEPING:
                records.append(record)
    return {(record.number, record.attempt_id) for record in records}


_LOGS = ("worker.log", "worker-[0-9].log", "worker-[0-9][0-9].log")
_OF_QUEUE = ("slurm.sh", "slurm.run.json", "slurm-*.log", "slurm-*.idle")
"""Of a study that a queue ran: its job's script, and what each allocation leaves."""
FILES = (
    (directory.SPOOL,)
    + directory.OUTCOMES
    + (directory.REPORT,)
    + _LOGS
    + tuple(f"{log}.1" for log in _LOGS)
    + _OF_QUEUE
    + (directory.HOST, directory.STUDY)
)
"""Patterns of what a study leaves in its directory; whatever else is there is somebody else's.

The last one is what says whose they are: where that fails half-way it is still known.
"""


@dataclass(frozen=True)
class Removed:
    """What was removed, and what was found beside it and left."""

    files: tuple[Path, ...]
    left: tuple[Path, ...]


def remove_study(name: str, *, url: str, home: Path) -> Removed:
    """Remove a study that is there from its database, then its files.

    Files that are another study's, which another database may still have, are left.

    Args:
        name: of the study.
        url: of the database; see `storage.urls.parse_url`.
        home: the directory of all studies' files (``runs``).

    Raises:
        EnvironmentFault: somebody drives it, and nothing was removed; or the database or a file
            is not to be had.
    """
    database = parse_url(url)
    folder = home / name
    with ExitStack() as closing:
        storage = open_leased(database, name, closing.callback)
        with faults(database), storage.together():
            number = storage.get_study_id_from_name(name)
            identity = storage.get_study_user_attrs(number).get("identity")
            storage.delete_study(number)
        files: list[Path] = []
        # What a process that was killed had not yet given its name.
        torn: list[Path] = []
        if not directory.stranger_words(folder, name, identity, str(database)):
            there = _in_directory(folder)
            torn = list(filter(is_temporary, there))
            for pattern in FILES:
                files += (path for path in there if fnmatch.fnmatch(path.name, pattern))
        try:
            for path in torn + files:
                path.unlink()
            left = _in_directory(folder)
            if folder.is_dir() and not left:
                folder.rmdir()
            if isinstance(database, SqliteUrl):
                # A process that waits for the lock finds it gone, and is refused.
                FileLease(database.path, name).path.unlink(missing_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"cannot remove {folder}: {words_of(error)}") from error
        return Removed(tuple(files), left)


def _in_directory(folder: Path) -> tuple[Path, ...]:
    """Return what is in a directory, in order; nothing where it is not there."""
    if not folder.is_dir():
        return ()
    return tuple(sorted(folder.iterdir()))
