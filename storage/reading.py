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
from storage.lease import Holder, lease_for
from storage.ranking import rank_study
from storage.recovery import Spool
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
        if name not in attributes:
            raise InputError(f"no study '{name}' in {database}{did_you_mean(name, attributes)}")
        trials = _trials(storage, name)
        holder = lease_for(database, name).holder()
    return _snapshot(name, attributes[name], trials, holder, home)


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
                name, attributes, _trials(storage, name), lease_for(database, name).holder(), home
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
) -> StudySnapshot:
    with understood(name):
        definition = StudyDefinition.model_validate(attributes[DEFINITION])
        records = [record for trial in trials if (record := mapping.record_of(trial)) is not None]
    records.sort(key=lambda record: record.number)
    running = [trial for trial in trials if trial.state is TrialState.RUNNING]
    runs = [run["environment"] for run in attributes.get(RUNS, ())]
    untold = (
        ()
        if holder
        else _untold(Spool(home / name / "spool.jsonl", attributes.get(IDENTITY, "")), running)
    )
    return StudySnapshot(
        name=name,
        definition=definition,
        environment=runs[-1] if runs else {},
        records=tuple(record for record in records if record.purpose == "search"),
        confirmations=tuple(record for record in records if record.purpose != "search"),
        running=tuple(map(_running, running)),
        wall_seconds=float(attributes.get(WALL_SECONDS, 0.0)),
        ended=attributes.get(ENDED),
        holder=None if holder is None else holder.who,
        warnings=(*_former_objective(attributes), *_version_changes(runs), *untold),
    )


def _running(trial: FrozenTrial) -> RunningTrial:
    return RunningTrial(
        trial.number,
        mapping.config_of(trial),
        trial.user_attrs.get(mapping.STARTED_AT),
        mapping.errand_of(trial).purpose,
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
        before, after = _versions(old), _versions(new)
        changed = [
            f"{key} {before.get(key)} -> {after.get(key)}"
            for key in after
            if before.get(key) != after[key]
        ]
        if changed:
            changes.append(
                f"run {number} changed {', '.join(changed)}; "
                "its trials may not compare with earlier ones"
            )
    return tuple(changes)


def _versions(environment: Mapping[str, Any]) -> dict[str, Any]:
    machine = {
        key: environment.get(key) for key in ("gpu", "driver", "cuda_driver", "python", "commit")
    }
    return machine | dict(environment.get("versions", {}))


def _untold(spool: Spool, running: Sequence[FrozenTrial]) -> tuple[str, ...]:
    numbers = {trial.number for trial in running}
    waiting = sorted({record.number for record in spool.read()} & numbers)
    if not waiting:
        return ()
    listed = ", ".join(map(str, waiting))
    return (
        f"results of trials {listed} are in {spool.path} and not yet in the database; "
        "resume the study to tell them",
    )
