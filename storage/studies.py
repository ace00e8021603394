"""Owns the opening of a study: created or resumed, checked against what it started with, leased.

Driving it is `leased`'s, looking at it without a lease is `reading`'s; both are offered here.
"""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning

from search_spaces.errors import InputError, quote
from storage import mapping
from storage.agreement import differences
from storage.database import PATIENCE, Patience, close, faults, open_for_writing, patiently
from storage.definition import StudyDefinition
from storage.lease import lease_for
from storage.leased import LeasedStudy
from storage.reading import DEFINITION, IDENTITY, RUNS, list_studies, read_study, understood
from storage.spool import Spool
from storage.urls import DatabaseUrl, parse_url, redact

__all__ = [
    "NAME_BYTES_MAX",
    "NAME_MAX",
    "LeasedStudy",
    "list_studies",
    "open_study",
    "read_study",
    "redact",
]

NAME_MAX = 100
NAME_BYTES_MAX = 200
"""A file system's names end at 255 bytes, and the lock's begins with the database's."""

_NAME = re.compile(rf"[^\W_][\w.-]{{0,{NAME_MAX - 1}}}")


def open_study(
    name: str,
    *,
    url: str,
    definition: StudyDefinition,
    sampler: optuna.samplers.BaseSampler,
    environment: Mapping[str, Any],
    home: Path,
    patience: Patience = PATIENCE,
) -> LeasedStudy:
    """Create or resume a study and take its lease; close it, or use it in a ``with``.

    Args:
        name: becomes a directory's name, so letters, digits, dots, dashes and underscores.
        url: ``sqlite:///path`` or ``postgresql://user:password@host/database``.
        definition: must agree with the stored one in space, model and target.
        sampler: proposes the next trial.
        environment: fingerprint of this run, kept beside those of earlier runs.
        home: the directory of all studies' files (``runs``).
        patience: how long a database that is locked or away is waited for.

    Raises:
        InputError: the name or URL is not right, or the stored study is about something else.
        EnvironmentFault: the database is not to be had, or another driver has the study.
    """
    if not _NAME.fullmatch(name) or len(name.encode()) > NAME_BYTES_MAX:
        raise InputError(
            f"study name must be at most 100 letters, digits, '.', '_' and '-', got {quote(name)}"
        )
    database = parse_url(url)
    with ExitStack() as undo:
        storage = open_for_writing(database)
        undo.callback(close, storage)
        lease = lease_for(database, name)
        undo.callback(lease.release)
        with faults(database), understood(name):
            lease.acquire()
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
            study = patiently(create, patience=patience)
            was_resumed = _check_agreement(study, definition, database)
            note = partial(_note_run, study, definition, environment)
            identity = patiently(note, patience=patience)
            spool = Spool(home / name / "spool.jsonl", identity)
            leased = LeasedStudy(
                study, definition, was_resumed, storage, database, lease, spool, patience
            )
        undo.pop_all()
    return leased


def _check_agreement(study: optuna.Study, definition: StudyDefinition, url: DatabaseUrl) -> bool:
    """Return whether the study was there before; raise where it is about something else."""
    stored = study.user_attrs.get(DEFINITION)
    if stored is None:
        if study.get_trials(deepcopy=False):
            raise InputError(
                f"study '{study.study_name}' in {url} is not one of sweep's; choose another --study"
            )
        return False
    lines = differences(StudyDefinition.model_validate(stored), definition)
    if lines:
        raise InputError(
            f"study '{study.study_name}' in {url} was started with another definition:\n  "
            + "\n  ".join(lines)
            + "\nStart a new study with --study and another name, or go on as it was started."
        )
    return True


def _note_run(
    study: optuna.Study, definition: StudyDefinition, environment: Mapping[str, Any]
) -> str:
    """Store what this run is about and on what it runs; return the study's identity.

    Safe to repeat after a failure: the run itself is noted last.
    """
    stored = study.user_attrs
    identity = str(stored.get(IDENTITY) or uuid.uuid4().hex)
    run = {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": dict(environment),
    }
    study.set_user_attr(IDENTITY, identity)
    study.set_user_attr(DEFINITION, definition.model_dump(mode="json"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names(list(definition.space.objectives))
    study.set_user_attr(RUNS, [*stored.get(RUNS, ()), run])
    return identity
