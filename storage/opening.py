"""Owns how a study comes to be driven: its name, its lease, whose its directory is, its definition.

Nothing is created before that is right. What a driver does with the study then is `study`'s.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning

from search_spaces.errors import EnvironmentFault, InputError
from storage import mapping
from storage.advisory import AdvisoryLease
from storage.database import close, faults, open_for_writing, opening, patiently
from storage.definition import StudyDefinition, differences
from storage.failures import is_passing_at_first
from storage.files import sweep_temporary
from storage.identity import StudyFile, look_beside, note_identity, refuse_strangers
from storage.keys import DEFINITION, FORMAT, FORMAT_WRITTEN, IDENTITY, RUNS
from storage.lease import Lease, lease_for
from storage.names import check_name
from storage.patience import PATIENCE, Patience
from storage.reading import identity_in, understood
from storage.sampler_view import SearchStorage
from storage.spool import NAME as SPOOL
from storage.spool import Spool
from storage.stored import refuse_unreadable
from storage.study import OpenStudy
from storage.urls import DatabaseUrl, parse_url


def open_study(
    name: str,
    *,
    url: str,
    definition: StudyDefinition,
    sampler: optuna.samplers.BaseSampler,
    environment: Mapping[str, Any],
    home: Path,
    patience: Patience = PATIENCE,
    warn: Callable[[str], None] = lambda _: None,
) -> OpenStudy:
    """Create or resume a study and take its lease; close it, or use it in a ``with``.

    Args:
        name: becomes a directory's name, so letters, digits, dots, dashes and underscores.
        url: ``sqlite:///path`` or ``postgresql://user:password@host/database``.
        definition: must agree with the stored one in space, model and target.
        sampler: proposes the next trial.
        environment: fingerprint of this run, kept beside those of earlier runs.
        home: the directory of all studies' files (``runs``).
        patience: how long a database that is locked or away is waited for.
        warn: told, in words, what becomes of results that cannot be told or written.

    Raises:
        InputError: the name or URL is not right, the stored study is about something else, or the
            study's directory holds the files of one that this database does not have. Nothing was
            created or changed.
        EnvironmentFault: the database is not to be had, or another driver has the study.
    """
    check_name(name)
    database, patience = parse_url(url), replace(patience)
    _refuse_strangers(name, database, home)
    with ExitStack() as undo:
        lease, storage = _leased(name, database, patience, undo)
        with faults(database), understood(name):
            patiently(partial(refuse_unreadable, storage.engine, name), patience=patience)
            study = _created(name, definition, sampler, storage, patience)
            agree = partial(_check_agreement, study, definition, database)
            was_resumed = patiently(agree, patience=patience, storage=storage)
            started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
            run = {"started_at": started_at, "environment": dict(environment)}
            note = partial(_note_run, study, definition, run)
            identity = patiently(note, patience=patience, storage=storage)
            beside = StudyFile(
                identity, name, str(database), definition.model_dump(mode="json"), dict(environment)
            )
            try:
                note_identity(home / name, beside)
            except EnvironmentFault as fault:
                warn(f"{fault}; the database goes on without it")
            except InputError:
                # Another database's driver was faster, by less than it takes to look and create.
                if not was_resumed:
                    optuna.delete_study(study_name=name, storage=storage)
                raise
            sweep_temporary(home / name)
            opened = OpenStudy(
                study,
                definition,
                was_resumed,
                environment,
                storage,
                database,
                lease,
                Spool(home / name / SPOOL, identity),
                patience,
                warn,
            )
        if isinstance(lease, AdvisoryLease):
            # Creating tables took more; from here on the lease's own is enough.
            close(storage)
        undo.pop_all()
    return opened


def _leased(
    name: str, database: DatabaseUrl, patience: Patience, undo: ExitStack
) -> tuple[Lease, SearchStorage]:
    """Take the lease of a study and open its database, in the order in which nothing is half done.

    A file's lock is beside the file, which is created first. On a server nothing is created through
    what nothing can be driven; then who writes borrows the lease's connection.
    """
    lease = lease_for(database, name, patience=patience)
    undo.callback(lease.release)
    if isinstance(lease, AdvisoryLease):
        with opening(database):
            patiently(lease.acquire, patience=patience, passes=is_passing_at_first)
        storage = open_for_writing(database, patience=patience, borrow=lease.lend)
    else:
        storage = open_for_writing(database, patience=patience)
        with faults(database):
            patiently(lease.acquire, patience=patience)
    undo.callback(close, storage)
    return lease, storage


def _created(
    name: str,
    definition: StudyDefinition,
    sampler: optuna.samplers.BaseSampler,
    storage: SearchStorage,
    patience: Patience,
) -> optuna.Study:
    """Return the study of that name, created where there is none."""
    create = partial(
        optuna.create_study,
        study_name=name,
        storage=storage,
        sampler=sampler,
        pruner=optuna.pruners.NopPruner(),
        directions=mapping.directions(definition.space.objectives),
        load_if_exists=True,
    )
    # Other drivers may be writing into the same file: their locks pass.
    return patiently(create, patience=patience, storage=storage)


def _refuse_strangers(name: str, database: DatabaseUrl, home: Path) -> None:
    """Raise where the study's directory holds files of a study that the database does not have."""
    beside = look_beside(home / name)
    if beside.strangers(None):
        identity = identity_in(database, name)
        refuse_strangers(beside, study=name, identity=identity, database=str(database))


def _check_agreement(study: optuna.Study, definition: StudyDefinition, url: DatabaseUrl) -> bool:
    """Return whether the study was there before; raise where it is about something else."""
    stored, named = study.user_attrs.get(DEFINITION), f"study '{study.study_name}' in {url}"
    if stored is None:
        if study.get_trials(deepcopy=False):
            raise InputError(f"{named} is not one of sweep's; choose another --study")
        return False
    lines = differences(StudyDefinition.model_validate(stored), definition)
    if lines:
        raise InputError(
            f"{named} was started with another definition:\n  "
            + "\n  ".join(lines)
            + "\nStart a new study with --study and another name, or go on as it was started."
        )
    return True


def _note_run(study: optuna.Study, definition: StudyDefinition, run: Mapping[str, Any]) -> str:
    """Store what this run is about and on what it runs; return the study's identity.

    Safe to repeat after a failure: the run itself is noted last, and once.
    """
    stored = study.user_attrs
    identity = str(stored.get(IDENTITY) or uuid.uuid4().hex)
    # First, so that nothing of a study of this format is there without it.
    study.set_user_attr(FORMAT, FORMAT_WRITTEN)
    study.set_user_attr(IDENTITY, identity)
    study.set_user_attr(DEFINITION, definition.model_dump(mode="json"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names(list(definition.space.objectives))
    runs = list(stored.get(RUNS, ()))
    if run not in runs:
        study.set_user_attr(RUNS, [*runs, run])
    return identity
