"""Owns what is read of studies without driving them. Writes and creates nothing; needs no lease.

What a database holds that cannot be read is said of the study and of the trial that it is of, and
costs no other anything. Knows nothing of Optuna.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import sqlalchemy
from pydantic import ValidationError

from search_spaces.errors import InputError, did_you_mean, quote
from search_spaces.validation import explain
from storage.database import reader_of
from storage.definition import (
    StudySnapshot,
    StudySummary,
    UnreadableStudy,
)
from storage.holder import Holder
from storage.identity import look_beside, lost_words, stranger_words
from storage.kept import unsettled, unsettled_words
from storage.keys import FORMAT_WRITTEN
from storage.lease import holders
from storage.names import is_file_name
from storage.ranking import rank_study
from storage.spool import NAME as SPOOL
from storage.spool import Spool
from storage.stored import (
    StoredStudy,
    count_stored_trials,
    newer_words,
    read_all_stored,
    read_stored,
    stored_identity,
    stored_names,
    unreadable_words,
)
from storage.stored import unreadable_in_words as unreadable_in_words
from storage.urls import DatabaseUrl, parse_url


def read_study(name: str, *, url: str, home: Path) -> StudySnapshot:
    """Return a study as it stands, also while a driver runs.

    Args:
        name: of the study.
        url: of the database; see `storage.urls.parse_url`.
        home: the directory of all studies' files (``runs``).

    Raises:
        InputError: there is no such study, or no database yet, or its definition cannot be read.
        EnvironmentFault: the database is not to be had.
    """
    database = parse_url(url)
    lost = lost_words(home / name) if is_file_name(name) else ""
    with _reading(database, lost) as engine:
        found = read_stored(engine, name)
        if found is None:
            raise _unknown(name, engine, database, lost)
        driven = _holders(engine, database, [found])
    if isinstance(found, UnreadableStudy):
        raise InputError(unreadable_words(found))
    return _snapshot(found, database, home, driven.get(name))


def identity_in(database: DatabaseUrl, name: str) -> str | None:
    """Return the identity of a study; None where the database has none of that name. Raises as
    `read_study`."""
    with reader_of(database) as engine:
        return None if engine is None else stored_identity(engine, name)


def count_trials(name: str, *, url: str) -> int:
    """Return how many trials a study has, whichever version wrote it. Raises as `read_study`."""
    database = parse_url(url)
    with _reading(database) as engine:
        count = count_stored_trials(engine, name)
        if count is None:
            raise _unknown(name, engine, database)
    return count


def _unknown(
    name: str, engine: sqlalchemy.Engine, database: DatabaseUrl, lost: str = ""
) -> InputError:
    known = lost or did_you_mean(name, stored_names(engine), lists="sweep status")
    return InputError(f"no study {quote(name)} in {database}{known}")


def list_studies(
    url: str, home: Path, *, completed: Callable[[StudySnapshot], StudySnapshot] = lambda s: s
) -> list[StudySummary | UnreadableStudy]:
    """Return a summary of every study, oldest first. Raises as `read_study` does, but for studies
    that cannot be read: those are in the list.

    Args:
        url: of the database.
        home: the directory of all studies' files.
        completed: adds to a study what storage does not know: its speeds on the target card.
    """
    database = parse_url(url)
    with _reading(database) as engine:
        found = read_all_stored(engine)
        driven = _holders(engine, database, found)
    return [
        study
        if isinstance(study, UnreadableStudy)
        else _summary(completed(_snapshot(study, database, home, driven.get(study.name))))
        for study in found
    ]


def _holders(
    engine: sqlalchemy.Engine,
    database: DatabaseUrl,
    studies: Iterable[StoredStudy | UnreadableStudy],
) -> dict[str, Holder]:
    # Where its name can be no file's nobody of ours ever drove it.
    names = [study.name for study in studies if is_file_name(study.name)]
    return holders(engine, database, names)


@contextmanager
def _reading(url: DatabaseUrl, lost: str = "") -> Iterator[sqlalchemy.Engine]:
    with reader_of(url) as engine:
        if engine is None:
            raise InputError(f"no studies yet at {url}{lost or ': run `sweep run` first'}")
        yield engine


@contextmanager
def understood(name: str) -> Iterator[None]:
    """Translate what another version stored, and this one cannot read, to `InputError`."""
    try:
        yield
    except ValidationError as error:
        raise InputError(
            f"study '{name}' was written by another version of sweep "
            f"({explain(error)}); choose another --study"
        ) from error


def _snapshot(
    study: StoredStudy, database: DatabaseUrl, home: Path, holder: Holder | None
) -> StudySnapshot:
    trials, has_files = study.trials, is_file_name(study.name)
    return StudySnapshot(
        name=study.name,
        definition=study.definition,
        environment=study.environments[-1] if study.environments else {},
        records=tuple(record for record in trials.records if record.purpose == "search"),
        confirmations=tuple(record for record in trials.records if record.purpose != "search"),
        running=trials.running,
        unreadable=trials.unreadable,
        wall_seconds=study.wall_seconds,
        ended=study.ended,
        identity=study.identity,
        holder=None if holder is None else holder.who,
        driven_since=None if holder is None else holder.since,
        warnings=(
            *_newer_format(study),
            *_version_changes(study.environments),
            *(_beside(study, holder, home, str(database)) if has_files else ()),
            *study.damaged,
            *unreadable_in_words(trials.unreadable),
        ),
    )


def _summary(snapshot: StudySnapshot) -> StudySummary:
    ranking = rank_study(snapshot)
    best = ranking.winner
    return StudySummary(
        name=snapshot.name,
        gpu=snapshot.definition.target.gpu,
        model=str(snapshot.definition.model.get("name")),
        trials=len(snapshot.records),
        objectives=snapshot.definition.space.objectives,
        best_number=None if best is None else best.number,
        best=None if best is None else best.measurement,
        wall_seconds=snapshot.wall_seconds,
        holder=snapshot.holder,
        driven_since=snapshot.driven_since,
        running=tuple(trial.number for trial in snapshot.running),
        is_confirmed=ranking.is_confirmed,
        speed=None if best is None else snapshot.target_speed(best),
        unreadable=len(snapshot.unreadable),
    )


def _newer_format(study: StoredStudy) -> tuple[str, ...]:
    if study.format <= FORMAT_WRITTEN:
        return ()
    return (f"{newer_words(study.format)}: what is shown may lack what this one does not know",)


def _version_changes(runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Say which driver or library changed from one run of the study to the next."""
    changes = []
    for number, (old, new) in enumerate(pairwise(runs), start=2):
        changed = changed_versions(old, new)
        if changed:
            changes.append(
                f"run {number} changed {', '.join(changed)}; "
                "its trials may not compare with earlier ones"
            )
    return tuple(changes)


def changed_versions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return each driver or library that differs between two runs: ``torch 2.10 -> 2.11``."""
    before, after = _versions(old), _versions(new)
    return [
        f"{key} {before[key]} -> {after[key]}"
        for key in after
        # An earlier version of ours looked at fewer packages; that is no change.
        if key in before and before[key] != after[key]
    ]


def _versions(environment: Mapping[str, Any]) -> dict[str, Any]:
    machine = {
        key: environment.get(key) for key in ("gpu", "driver", "cuda_driver", "python", "commit")
    }
    return machine | dict(environment.get("versions", {}))


def _beside(study: StoredStudy, holder: Holder | None, home: Path, database: str) -> Iterator[str]:
    """Yield what a study's directory has that its database has not."""
    directory = home / study.name
    beside = look_beside(directory)
    yield from stranger_words(beside, study=study.name, identity=study.identity, database=database)
    spool, is_driven = Spool(directory / SPOOL, study.identity), holder is not None
    trials = study.trials
    found = unsettled(spool, records=trials.records, begun=trials.running, is_driven=is_driven)
    yield from unsettled_words(found, study=study.name, path=spool.path, is_driven=is_driven)
