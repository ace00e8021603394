"""How a study comes to be driven: its name, its lease, whose its directory is, its definition."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning

from search_spaces.errors import EnvironmentFault, InputError
from storage import mapping
from storage.database import Storage, faults, retried
from storage.definition import StudyDefinition, UnreadableStudy, differences, step_differences
from storage.files import refuse_public, sweep_temporary
from storage.identity import StudyFile, note_identity, stranger_words
from storage.keys import DEFINITION, DRIVER, FORMAT, FORMAT_WRITTEN, IDENTITY, RUNS
from storage.lease import open_leased
from storage.ledger import Ledger
from storage.names import check_name
from storage.reading import identity_in
from storage.spool import NAME as SPOOL
from storage.spool import Spool
from storage.stored import (
    read_attributes,
    read_trials,
    refuse_unreadable_trials,
    unreadable_in_words,
    unreadable_words,
)
from storage.study import OpenStudy
from storage.urls import parse_url


def open_study(
    name: str,
    *,
    url: str,
    definition: StudyDefinition,
    sampler: optuna.samplers.BaseSampler,
    environment: Mapping[str, Any],
    home: Path,
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
        warn: told, in words, what becomes of results that cannot be told or written.

    Raises:
        InputError: the name or URL is not right, the stored study is about something else, or the
            study's directory holds the files of one that this database does not have. Nothing was
            created or changed.
        EnvironmentFault: the database is not to be had, or another driver has the study.
    """
    check_name(name)
    database, directory = parse_url(url), home / name
    refuse_public(directory)
    if stranger_words(directory, name, None, str(database)):
        for words in stranger_words(directory, name, identity_in(database, name), str(database)):
            raise InputError(words)
    driver = uuid.uuid4().hex
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    run = {"started_at": started_at, "environment": dict(environment)}
    with ExitStack() as closing:
        storage = open_leased(database, name, closing.callback)

        def begin() -> tuple[optuna.Study, bool, str]:
            """Create the study, or see that it can be resumed, all in one transaction."""
            with storage.together():
                is_there = name in storage.trial_counts()
                study = _loaded(name, storage, definition, sampler, is_there=is_there)
                if is_there:
                    _check(study, definition, f"study '{name}' in {database}", warn)
                return study, is_there, _note_run(study, definition, run, driver)

        with faults(database):
            study, was_resumed, identity = retried(begin)
            # Not through Optuna's cache, in which of two trials of one number one hides the other.
            trials = read_trials(retried(lambda: _trials(storage, name)))
        beside = StudyFile(
            identity=identity,
            name=name,
            database=str(database),
            definition=definition.model_dump(mode="json"),
            environment=dict(environment),
        )
        try:
            note_identity(directory, beside)
        except EnvironmentFault as fault:
            warn(f"{fault}; the database goes on without it")
        refuse_unreadable_trials(name, trials)
        for words in unreadable_in_words(trials.unreadable):
            warn(words)
        sweep_temporary(directory)
        return OpenStudy(
            study,
            definition,
            was_resumed,
            environment,
            Ledger(trials.records),
            storage,
            database,
            driver,
            closing.pop_all(),
            Spool(directory / SPOOL, identity),
            warn,
        )


def _trials(storage: Storage, name: str) -> list[optuna.trial.FrozenTrial]:
    return storage.get_all_trials(storage.get_study_id_from_name(name), deepcopy=False)


def _loaded(
    name: str,
    storage: Storage,
    definition: StudyDefinition,
    sampler: optuna.samplers.BaseSampler,
    *,
    is_there: bool,
) -> optuna.Study:
    """Return the study of that name, created where there is none."""
    known: dict[str, Any] = {"study_name": name, "storage": storage, "sampler": sampler}
    known["pruner"] = optuna.pruners.NopPruner()
    if is_there:
        return optuna.load_study(**known)
    directions = mapping.directions(definition.space.objectives)
    return optuna.create_study(**known, directions=directions)


def _check(
    study: optuna.Study, definition: StudyDefinition, named: str, warn: Callable[[str], None]
) -> None:
    """Raise where a stored study is about something else, or cannot be read or written here."""
    if DEFINITION not in study.user_attrs:
        raise InputError(f"{named} is not one of sweep's; choose another --study")
    stored = read_attributes(study.study_name, study.user_attrs, trials=0)
    if isinstance(stored, UnreadableStudy):
        raise InputError(unreadable_words(stored))
    if stored.is_newer:
        raise InputError(
            f"{named} cannot be gone on with: {stored.newer_words}: go on with that one (`pip "
            "install -U qlora-sweep`), or start another study with --study; `sweep status` and "
            "`sweep best` show what they can of it"
        )
    lines = differences(stored.definition, definition)
    if lines:
        raise InputError(
            f"{named} was started with another definition:\n  "
            + "\n  ".join(lines)
            + "\nStart a new study with --study and another name, or go on as it was started."
        )
    changed = step_differences(stored.definition, definition)
    if changed:
        warn(
            f"{named} was started with other steps ({', '.join(changed)}): its trials may not "
            "compare with earlier ones"
        )


def _note_run(
    study: optuna.Study, definition: StudyDefinition, run: Mapping[str, Any], driver: str
) -> str:
    """Store who drives, what this run is about and on what it runs; return the study's identity."""
    stored = study.user_attrs
    identity = str(stored.get(IDENTITY) or uuid.uuid4().hex)
    runs = [kept for kept in stored.get(RUNS, ()) if kept != run]
    attributes = {
        FORMAT: FORMAT_WRITTEN,
        IDENTITY: identity,
        DEFINITION: definition.model_dump(mode="json"),
        RUNS: [*runs, run],
        DRIVER: driver,
    }
    for key, value in attributes.items():
        study.set_user_attr(key, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names(list(definition.space.objectives))
    return identity
