"""What is read of studies without driving them. Writes and creates nothing; needs no lease."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from qlora_sweep.search_spaces.errors import InputError, did_you_mean, quote
from qlora_sweep.storage import codec, directory
from qlora_sweep.storage.database import Storage, close, faults, open_for_reading
from qlora_sweep.storage.definition import StudySnapshot, UnreadableStudy, is_file_name
from qlora_sweep.storage.lease import Holder, holders
from qlora_sweep.storage.records import TrialRecord
from qlora_sweep.storage.soundness import Soundness, left_out_words
from qlora_sweep.storage.urls import DatabaseUrl, parse_url

S = TypeVar("S", bound=Storage)


def read_study(name: str, *, url: str, home: Path) -> StudySnapshot:
    """Return a study as it stands, also while a driver runs.

    Args:
        name: of the study.
        url: of the database; see `storage.urls.parse_url`.
        home: the directory of all studies' files (``runs``).

    Raises:
        InputError: there is no such study, or no database yet, or it cannot be read.
        EnvironmentFault: the database is not to be had.
    """
    (study,) = list_studies(url, home, name)
    if isinstance(study, UnreadableStudy):
        raise refusal(study)
    return study


def count_trials(name: str, *, url: str) -> int:
    """Return how many trials a study has, whatever wrote it. Raises as `read_study`."""
    database = parse_url(url)
    with _opened(database) as opened:
        storage, _ = _required(opened, database, name)
        return len(storage.trials_of(name))


def identity_in(database: DatabaseUrl, name: str) -> str | None:
    """Return the identity of a study; None where the database has none of that name. Raises as
    `read_study`."""
    with _opened(database) as storage:
        if storage is None:
            return None
        attributes = _studies(storage).get(name)
    if attributes is None:
        return None
    return str(attributes.get("identity", ""))


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
    lines, _ = directory.spooled_lines(path)
    if not lines:
        raise InputError(f"--from {path}: there is no result of a study in it")
    identity = lines[-1].study
    known = directory.read_identity(path.parent)
    if known is None or known.identity != identity:
        missing = "no study.json beside it says what its results are of"
        raise InputError(f"--from {path}: {missing}; put it back into its study's directory")
    try:
        soundness = Soundness.of(known.definition)
    except (InputError, LookupError, TypeError, ValueError) as error:
        beside = f"what study.json beside it says of the model cannot be read ({error})"
        raise InputError(f"--from {path}: {beside}; put it back as it was") from error
    spooled = directory.Spool(path, identity, soundness).read()
    records, confirmations = _by_purpose(spooled.records)
    return StudySnapshot(
        name=known.name,
        definition=known.definition,
        environment=known.environment,
        records=records,
        confirmations=confirmations,
        warnings=spooled.problems,
        identity=identity,
    )


def _by_purpose(
    records: Iterable[TrialRecord],
) -> tuple[tuple[TrialRecord, ...], tuple[TrialRecord, ...]]:
    """Return the trials of a search, and what measured its winners again."""
    searched = []
    confirmations = []
    for record in records:
        if record.purpose == "search":
            searched.append(record)
        else:
            confirmations.append(record)
    return tuple(searched), tuple(confirmations)


def changed_versions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return each driver or library that differs between two runs: ``torch 2.10 -> 2.11``."""
    before = _versions(old)
    changed = []
    for key, version in _versions(new).items():
        if key in before and before[key] != version:
            changed.append(f"{key} {before[key]} -> {version}")
    return changed


def _versions(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the GPU, and what a run had of drivers and libraries."""
    machine = ("gpu", "driver", "cuda_driver", "python", "commit")
    return {key: environment.get(key) for key in machine} | dict(environment.get("versions", {}))


def refusal(study: UnreadableStudy) -> InputError:
    """Return why a study cannot be read, and what to do."""
    return InputError(
        f"study {quote(study.name)} cannot be read: {study.reason}; it may be of another version "
        "of sweep: read it with that one, or choose another --study"
    )


@contextmanager
def _opened(url: DatabaseUrl) -> Iterator[Storage | None]:
    """Open a database to read studies, all of one moment; None where there are none yet."""
    storage = open_for_reading(url)
    if storage is None:
        yield None
        return
    try:
        with faults(url), storage.together():
            yield storage
    finally:
        close(storage)


def _studies(storage: Storage) -> dict[str, dict[str, Any]]:
    """Return the attributes of each of sweep's studies, by name, oldest first."""
    # Of all studies, where one alone is shown.
    studies = Storage.get_all_studies(storage)
    return {s.study_name: s.user_attrs for s in studies if "definition" in s.user_attrs}


def _required(
    storage: S | None, url: DatabaseUrl, name: str | None
) -> tuple[S, dict[str, dict[str, Any]]]:
    """Return a storage and its studies. Raises `InputError` where the study of a name is none."""
    if storage is None:
        raise InputError(f"no studies yet at {url}: run `sweep run` first")
    studies = _studies(storage)
    if name is not None and name not in studies:
        meant = did_you_mean(name, studies, lists="sweep status")
        raise InputError(f"no study {quote(name)} in {url}{meant}")
    return storage, studies


def list_studies(
    url: str, home: Path, name: str | None = None
) -> list[StudySnapshot | UnreadableStudy]:
    """Return every study, or that of a name, oldest first. Raises as `read_study` does, but for
    studies that cannot be read: those are in the list."""
    database = parse_url(url)
    lost = ""
    if name is not None and is_file_name(name):
        lost = directory.stranger_words(home / name, name, None, str(database))
    with _opened(database) as opened:
        if lost and (opened is None or name not in _studies(opened)):
            raise InputError(lost)
        storage, studies = _required(opened, database, name)
        stored = {}
        for study, attributes in studies.items():
            if name in (None, study):
                trials = storage.trials_of(study)
                stored[study] = codec.read_stored(study, attributes, trials)
        driven = holders(storage.engine, database, filter(is_file_name, stored))
    found = list[StudySnapshot | UnreadableStudy]()
    for study, its in stored.items():
        if isinstance(its, codec.StoredStudy):
            found.append(_snapshot(study, its, driven.get(study), database, home))
        else:
            found.append(its)
    return found


def _snapshot(
    study: str, stored: codec.StoredStudy, holder: Holder | None, database: DatabaseUrl, home: Path
) -> StudySnapshot:
    """Return a study as it stands.

    Args:
        study: its name.
        stored: what its database has of it.
        holder: who drives it.
        database: that was read.
        home: the directory of all studies' files.
    """
    attributes = stored.attributes
    environments = [run.environment for run in attributes.runs]
    left_out = left_out_words(stored.left_out, of=f"study '{study}'")
    warnings = list(left_out)
    for number, (old, new) in enumerate(pairwise(environments), start=2):
        changed = ", ".join(changed_versions(old, new))
        if changed:
            apart = "its trials may not compare with earlier ones"
            warnings.append(f"run {number} changed {changed}; {apart}")
    if is_file_name(study):
        folder = home / study
        whose = directory.stranger_words(folder, study, attributes.identity, str(database))
        if whose:
            warnings.append(whose)
        if holder is None:
            soundness = Soundness.of(attributes.definition)
            spool = directory.Spool(folder / directory.SPOOL, attributes.identity, soundness)
            warnings += directory.spool_words(
                spool, study=study, known=stored.records, running=stored.running
            )
    who = None
    since = None
    if holder is not None:
        who = holder.who
        since = holder.since
    environment = {}
    if environments:
        environment = environments[-1]
    records, confirmations = _by_purpose(stored.records)
    return StudySnapshot(
        name=study,
        definition=attributes.definition,
        environment=environment,
        records=records,
        confirmations=confirmations,
        running=stored.running,
        wall_seconds=attributes.wall_seconds,
        ended=attributes.ended,
        identity=attributes.identity,
        holder=who,
        driven_since=since,
        warnings=tuple(warnings),
        left_out=left_out,
    )


@contextmanager
def shown_storage(name: str, *, url: str) -> Iterator[BaseStorage]:
    """Open one study for Optuna's tools to look at, also while it is driven; nothing can be
    written.

    Raises:
        InputError: there is no such study.
        EnvironmentFault: the database is not to be had.
    """
    database = parse_url(url)
    storage, _ = _required(open_for_reading(database, kind=_Shown), database, name)
    storage.name = name
    try:
        yield storage
    finally:
        close(storage)


class _Shown(Storage):
    """One study, with its search's trials, their constraints and short attributes."""

    name: str

    def get_all_studies(self) -> list[Any]:
        """Return the one study, without how it was defined and on what it ran: a page of JSON."""
        shown = [s for s in super().get_all_studies() if s.study_name == self.name]
        for study in shown:
            study.user_attrs = {}
        return shown

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Return one trial."""
        return _shown_trial(super().get_trial(trial_id))

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the trials that a search began; what measured its winners again is none."""
        shown = []
        for trial in super().get_all_trials(study_id, deepcopy=False, states=states):
            record = trial.user_attrs.get(codec.RECORD)
            if record and record["purpose"] == "search":
                shown.append(_shown_trial(trial))
        return shown


def _shown_trial(trial: FrozenTrial) -> FrozenTrial:
    shown = copy.copy(trial)
    shown.user_attrs = dict(trial.user_attrs)
    shown.user_attrs.pop(codec.RECORD, None)
    # Tools look for a list; Optuna 5 keeps each constraint under its own name.
    constraints = list(trial.constraints.values())
    shown.system_attrs = {**trial.system_attrs, "constraints": constraints}
    return shown
