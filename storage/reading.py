"""What is read of studies without driving them. Writes and creates nothing; needs no lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial
from pydantic import ValidationError

from search_spaces.documents import explain
from search_spaces.errors import InputError, did_you_mean, quote
from storage.database import Storage, close, faults, open_for_reading
from storage.definition import StudyDefinition, StudySnapshot, StudySummary, UnreadableStudy
from storage.identity import read_identity, stranger_words
from storage.keys import DEFINITION, IDENTITY
from storage.lease import Holder, holders
from storage.names import is_file_name
from storage.ranking import rank_study
from storage.spool import NAME as SPOOL
from storage.spool import Spool, newest_study, spool_words
from storage.stored import (
    StoredTrials,
    StudyAttributes,
    read_attributes,
    read_trials,
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
    found = _read(url, home, name)
    if not found:
        raise _unknown(name, url, _lost(name, url, home))
    (study,) = found
    if isinstance(study, UnreadableStudy):
        raise InputError(unreadable_words(study))
    return study


def list_studies(
    url: str, home: Path, *, completed: Callable[[StudySnapshot], StudySnapshot] = lambda s: s
) -> list[StudySummary | UnreadableStudy]:
    """Return a summary of every study, oldest first. Raises as `read_study` does, but for studies
    that cannot be read: those are in the list.

    Args:
        url: of the database.
        home: the directory of all studies' files.
        completed: adds to a study what storage does not know: its speeds on the target GPU.
    """
    return [
        study if isinstance(study, UnreadableStudy) else _summary(completed(study))
        for study in _read(url, home)
    ]


def count_trials(name: str, *, url: str) -> int:
    """Return how many trials a study has, whichever version wrote it. Raises as `read_study`."""
    with _opened(url) as storage:
        count = _ours(storage).get(name)
    if count is None:
        raise _unknown(name, url)
    return count


def identity_in(database: DatabaseUrl, name: str) -> str | None:
    """Return the identity of a study; None where the database has none of that name. Raises as
    `read_study`."""
    storage = open_for_reading(database)
    if storage is None:
        return None
    try:
        with faults(database):
            attributes = storage.get_study_user_attrs(storage.get_study_id_from_name(name))
    except KeyError:
        return None
    finally:
        close(storage)
    return str(attributes.get(IDENTITY, ""))


def read_spooled_study(path: Path) -> StudySnapshot:
    """Return what a spool has of the study that wrote it last, to be taken over.

    What that study was about is in the file beside it.

    Args:
        path: of the spool.

    Raises:
        InputError: there is no such file or no result in it, or nothing says what it is about.
    """
    if not path.exists():
        raise InputError(f"--from {path}: no such file")
    identity = newest_study(path)
    if identity is None:
        raise InputError(f"--from {path}: there is no result of a study in it")
    contents, beside = Spool(path, identity).look(), read_identity(path.parent)
    if beside is None or beside.identity != identity:
        raise InputError(
            f"--from {path}: no study.json beside it says on what GPU and model its results were "
            "measured; put it back into its study's directory"
        )
    try:
        definition = StudyDefinition.model_validate(beside.definition)
    except ValidationError as error:
        raise InputError(
            f"--from {path}: another version of sweep wrote it ({explain(error)})"
        ) from error
    return StudySnapshot(
        name=beside.name,
        definition=definition,
        environment=beside.environment,
        records=tuple(r for r in contents.records if r.purpose == "search"),
        confirmations=tuple(r for r in contents.records if r.purpose != "search"),
        warnings=contents.problems,
        identity=identity,
    )


def changed_versions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return each driver or library that differs between two runs: ``torch 2.10 -> 2.11``."""
    before, after = _versions(old), _versions(new)
    return [
        f"{key} {before[key]} -> {after[key]}"
        for key in after
        # Another version of ours looked at fewer packages; that is no change.
        if key in before and before[key] != after[key]
    ]


def _versions(environment: Mapping[str, Any]) -> dict[str, Any]:
    machine = {
        key: environment.get(key) for key in ("gpu", "driver", "cuda_driver", "python", "commit")
    }
    return machine | dict(environment.get("versions", {}))


@contextmanager
def _opened(url: str, lost: str = "") -> Iterator[Storage]:
    """Open the database to read studies, each as it stands at one moment."""
    database = parse_url(url)
    storage = open_for_reading(database)
    if storage is None:
        raise InputError(lost or f"no studies yet at {database}: run `sweep run` first")
    try:
        with faults(database):
            yield storage
    finally:
        close(storage)


_Stored = tuple[Mapping[str, Any], list[FrozenTrial]]
"""Attributes and trials of a study, of one moment."""


def _ours(storage: Storage) -> dict[str, int]:
    """Return how many trials each of sweep's studies has, by name, oldest first; of every study
    where some hold what is no JSON."""
    with storage.together():
        counts = storage.trial_counts()

    def is_ours(name: str) -> bool:
        number = storage.get_study_id_from_name(name)
        return DEFINITION in storage.get_study_user_attrs(number)

    with suppress(JSONDecodeError, KeyError), storage.together():
        return {name: count for name, count in counts.items() if is_ours(name)}
    return counts


def _stored(storage: Storage, name: str | None) -> dict[str, _Stored | int]:
    """Return what is stored of the study of a name, or of all of them, of one moment; how many
    trials there are where that is no JSON."""

    def of(study: str) -> _Stored | None:
        number = storage.get_study_id_from_name(study)
        attributes = storage.get_study_user_attrs(number)
        if DEFINITION not in attributes:
            return None
        return attributes, storage.get_all_trials(number, deepcopy=False)

    with suppress(JSONDecodeError), storage.together():
        wanted = [study for study in storage.trial_counts() if name in (None, study)]
        return {study: known for study in wanted if (known := of(study)) is not None}
    found = dict[str, _Stored | int]()
    for study, count in _ours(storage).items():
        # Each by itself, and one that is gone by now is left out.
        with suppress(KeyError):
            try:
                with storage.together():
                    its: _Stored | int | None = of(study)
            except JSONDecodeError:
                its = count
            if its is not None and name in (None, study):
                found[study] = its
    return found


def _unknown(name: str, url: str, lost: str = "") -> InputError:
    with _opened(url) as storage:
        names = _ours(storage)
    meant = did_you_mean(name, names, lists="sweep status")
    return InputError(lost or f"no study {quote(name)} in {parse_url(url)}{meant}")


def _lost(name: str | None, url: str, home: Path) -> str:
    """Return what is said of the files of a study that the database has not; "" without any."""
    if name is None or not is_file_name(name):
        return ""
    return "".join(stranger_words(home / name, name, None, str(parse_url(url))))


def _read(url: str, home: Path, name: str | None = None) -> list[StudySnapshot | UnreadableStudy]:
    """Return the study of a name, or all of them, oldest first."""
    database = parse_url(url)
    with _opened(url, _lost(name, url, home)) as storage:
        stored = _stored(storage, name)
        driven = holders(storage.engine, database, filter(is_file_name, stored))
    found = list[StudySnapshot | UnreadableStudy]()
    for study, its in stored.items():
        if isinstance(its, int):
            found.append(UnreadableStudy(study, "what is stored of it is no JSON", its))
            continue
        attributes = read_attributes(study, its[0], trials=len(its[1]))
        if isinstance(attributes, StudyAttributes):
            holder, trials = driven.get(study), read_trials(its[1])
            found.append(_snapshot(study, attributes, trials, holder, home, database))
        else:
            found.append(attributes)
    return found


def _snapshot(
    name: str,
    study: StudyAttributes,
    trials: StoredTrials,
    holder: Holder | None,
    home: Path,
    database: DatabaseUrl,
) -> StudySnapshot:
    environments = [run.environment for run in study.runs]
    warnings = list(_version_changes(environments))
    if study.is_newer:
        warnings.insert(0, f"{study.newer_words}: what is shown may lack what this one ignores")
    if is_file_name(name):
        warnings += stranger_words(home / name, name, study.identity, str(database))
        warnings += spool_words(
            Spool(home / name / SPOOL, study.identity),
            study=name,
            known=trials.records,
            open_attempts={trial.attempt_id for trial in trials.running},
            is_driven=holder is not None,
        )
    return StudySnapshot(
        name=name,
        definition=study.definition,
        environment=environments[-1] if environments else {},
        records=tuple(record for record in trials.records if record.purpose == "search"),
        confirmations=tuple(record for record in trials.records if record.purpose != "search"),
        running=trials.running,
        unreadable=trials.unreadable,
        wall_seconds=study.wall_seconds,
        ended=study.ended,
        identity=study.identity,
        holder=None if holder is None else holder.who,
        driven_since=None if holder is None else holder.since,
        warnings=(*warnings, *unreadable_in_words(trials.unreadable)),
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


def _version_changes(environments: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say which driver or library changed from one run of the study to the next."""
    for number, (old, new) in enumerate(pairwise(environments), start=2):
        if changed := changed_versions(old, new):
            yield (
                f"run {number} changed {', '.join(changed)}; "
                "its trials may not compare with earlier ones"
            )
