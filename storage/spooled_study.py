"""Owns reading a spool as a study whose results another run takes over. Writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from search_spaces.errors import InputError
from storage.database import reader_of
from storage.definition import StudyDefinition, StudySnapshot
from storage.identity import read_identity
from storage.reading import understood
from storage.spool import Spool, newest_study
from storage.stored import StoredStudy, read_stored
from storage.urls import DatabaseUrl, parse_url


def read_spooled_study(path: Path, *, url: str) -> StudySnapshot:
    """Return what a spool has of the study that wrote it last.

    What that study was about is in the file beside it, or in the database.

    Args:
        path: of the spool.
        url: of the database.

    Raises:
        InputError: there is no such file or no result in it, or nothing says what it is about.
        EnvironmentFault: the database is not to be had.
    """
    if not path.exists():
        raise InputError(f"--from {path}: no such file")
    identity = newest_study(path)
    if identity is None:
        raise InputError(f"--from {path}: there is no result of a study in it")
    contents = Spool(path, identity).look()
    name, definition, environment = _about(path, identity, parse_url(url))
    return StudySnapshot(
        name=name,
        definition=definition,
        environment=environment,
        records=tuple(r for r in contents.records if r.purpose == "search"),
        confirmations=tuple(r for r in contents.records if r.purpose != "search"),
        warnings=contents.problems,
        identity=identity,
    )


def _about(
    path: Path, identity: str, database: DatabaseUrl
) -> tuple[str, StudyDefinition, dict[str, Any]]:
    """Return name, definition and newest environment of the study that wrote a spool."""
    beside = read_identity(path.parent)
    if beside is not None and beside.identity == identity:
        with understood(beside.name):
            definition = StudyDefinition.model_validate(beside.definition)
        return beside.name, definition, beside.environment
    with reader_of(database) as engine:
        stored = None if engine is None else read_stored(engine, path.absolute().parent.name)
    if not isinstance(stored, StoredStudy) or stored.identity != identity:
        raise InputError(
            f"--from {path}: neither a study.json beside it nor {database} says on what card and "
            "model its results were measured; put it back into its study's directory"
        )
    return stored.name, stored.definition, next(iter(stored.environments[-1:]), {})
