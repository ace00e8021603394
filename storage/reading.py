"""Owns what is read of studies without driving them. Writes and creates nothing; needs no lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from search_spaces.errors import InputError, did_you_mean
from search_spaces.validation import explain
from storage import mapping
from storage.database import close, faults, open_for_reading
from storage.definition import (
    RunningTrial,
    StudyDefinition,
    StudySnapshot,
    StudySummary,
    names_cost,
)
from storage.identity import look_beside, stranger_words
from storage.kept import how_begun, unsettled, unsettled_words
from storage.lease import Holder, lease_for
from storage.ranking import rank_study
from storage.spool import NAME as SPOOL
from storage.spool import Spool
from storage.urls import DatabaseUrl, parse_url

DEFINITION, RUNS, WALL_SECONDS, IDENTITY = "definition", "runs", "wall_seconds", "identity"
ENDED = "ended"
"""Keys of a study's user attributes."""


def read_study(name: str, *, url: str, home: Path) -> StudySnapshot:
    """Return a study as it stands, also while a driver runs.

    Args:
        name: of the study.
        url: of the database; see `storage.urls.parse_url`.
        home: the directory of all studies' files (``runs``).

    Raises:
        InputError: there is no such study, or no database yet.
        EnvironmentFault: the database is not to be had.
    """
    database = parse_url(url)
    with _reading(database) as storage:
        attributes = _attributes(storage)
        _require(name, attributes, database)
        trials = _trials(storage, name)
        holder = lease_for(database, name).holder()
    return _snapshot(name, attributes[name], trials, holder, home, str(database))


def count_trials(name: str, *, url: str) -> int:
    """Return how many trials a study has, whichever version wrote it. Raises as `read_study`."""
    database = parse_url(url)
    with _reading(database) as storage:
        _require(name, _attributes(storage), database)
        return len(_trials(storage, name))


def _require(name: str, known: Mapping[str, Any], database: DatabaseUrl) -> None:
    if name not in known:
        raise InputError(f"no study '{name}' in {database}{did_you_mean(name, known)}")


def list_studies(
    url: str, home: Path, *, completed: Callable[[StudySnapshot], StudySnapshot] = lambda s: s
) -> list[StudySummary]:
    """Return a summary of every study, oldest first. Raises as `read_study` does.

    Args:
        url: of the database.
        home: the directory of all studies' files.
        completed: adds to a study what storage does not know: its speeds on the target card.
    """
    database = parse_url(url)
    with _reading(database) as storage:
        snapshots = [
            _snapshot(
                name,
                attributes,
                _trials(storage, name),
                lease_for(database, name).holder(),
                home,
                str(database),
            )
            for name, attributes in _attributes(storage).items()
        ]
    return [_summary(completed(snapshot)) for snapshot in snapshots]


@contextmanager
def _reading(url: DatabaseUrl) -> Iterator[RDBStorage]:
    storage = open_for_reading(url)
    if storage is None:
        raise InputError(f"no studies yet at {url}: run `sweep run` first")
    try:
        with faults(url):
            yield storage
    finally:
        close(storage)


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


def _attributes(storage: RDBStorage) -> dict[str, dict[str, Any]]:
    """Return the user attributes of each study that is one of ours, by name."""
    return {
        s.study_name: s.user_attrs for s in storage.get_all_studies() if DEFINITION in s.user_attrs
    }


def _trials(storage: RDBStorage, name: str) -> list[FrozenTrial]:
    return storage.get_all_trials(storage.get_study_id_from_name(name), deepcopy=False)


def _snapshot(
    name: str,
    attributes: Mapping[str, Any],
    trials: Sequence[FrozenTrial],
    holder: Holder | None,
    home: Path,
    database: str,
) -> StudySnapshot:
    with understood(name):
        definition = StudyDefinition.model_validate(attributes[DEFINITION])
        records = [record for trial in trials if (record := mapping.record_of(trial)) is not None]
    records.sort(key=lambda record: record.number)
    running = [trial for trial in trials if trial.state is TrialState.RUNNING]
    runs = [run["environment"] for run in attributes.get(RUNS, ())]
    identity = str(attributes.get(IDENTITY, ""))
    beside = look_beside(home / name)
    spool = Spool(home / name / SPOOL, identity)
    begun = [begun for trial in running if (begun := how_begun(trial)) is not None]
    found = unsettled(spool, records=records, begun=begun, is_driven=holder is not None)
    return StudySnapshot(
        name=name,
        definition=definition,
        environment=runs[-1] if runs else {},
        records=tuple(record for record in records if record.purpose == "search"),
        confirmations=tuple(record for record in records if record.purpose != "search"),
        running=tuple(map(_running, running)),
        wall_seconds=float(attributes.get(WALL_SECONDS, 0.0)),
        ended=attributes.get(ENDED),
        identity=str(attributes.get(IDENTITY, "")),
        holder=None if holder is None else holder.who,
        warnings=(
            *_former_objective(attributes),
            *_version_changes(runs),
            *stranger_words(beside, study=name, identity=identity, database=database),
            *unsettled_words(found, study=name, path=spool.path, is_driven=holder is not None),
        ),
    )


def _running(trial: FrozenTrial) -> RunningTrial:
    errand = mapping.errand_of(trial)
    return RunningTrial(
        trial.number,
        mapping.config_of(trial),
        trial.user_attrs.get(mapping.STARTED_AT),
        errand.purpose,
        errand.confirms,
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
        is_confirmed=ranking.is_confirmed,
        speed=None if best is None else snapshot.target_speed(best),
    )


def _former_objective(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    if not names_cost(attributes[DEFINITION]):
        return ()
    return (
        "it was started with the objective cost, which is no objective any more: it is ranked by "
        "speed, as on one card at one price cost is 1 / speed",
    )


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
        f"{key} {before.get(key)} -> {after.get(key)}"
        for key in after
        if before.get(key) != after[key]
    ]


def _versions(environment: Mapping[str, Any]) -> dict[str, Any]:
    machine = {
        key: environment.get(key) for key in ("gpu", "driver", "cuda_driver", "python", "commit")
    }
    return machine | dict(environment.get("versions", {}))
