"""Owns a study as tools for Optuna see it: read from the database, never written to.

What they look for is put where they find it. Knows nothing of any such tool but what it reads.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Never

from optuna.storages import BaseStorage, RDBStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError
from sqlalchemy import Integer, column, select, table

from search_spaces.errors import EnvironmentFault, InputError
from storage import mapping
from storage.database import close, open_for_reading
from storage.urls import parse_url

_CONSTRAINTS = "constraints"
"""The system attribute in which tools look for a list; Optuna 5 keeps each under its own name."""

_UNREADABLE = (LookupError, ValueError, TypeError, RecursionError)
"""What Optuna raises over a state that it does not know, or an attribute that is no JSON."""


@contextmanager
def shown_storage(name: str, *, url: str) -> Iterator[ShownStorage]:
    """Open one study for tools to look at, also while it is driven.

    Raises:
        InputError: there is no such study.
        EnvironmentFault: the database is not to be had.
    """
    database = parse_url(url)
    storage = open_for_reading(database)
    if storage is None:
        raise InputError(f"no studies yet at {database}: run `sweep run` first")
    try:
        yield ShownStorage(storage, name)
    finally:
        close(storage)


def _refuse(*_: Any, **__: Any) -> Never:
    raise EnvironmentFault("the study is only shown: nothing of it can be changed here")


class ShownStorage(BaseStorage):
    """One study of a database, with its search's trials, their constraints and short attributes.

    Every method that would write raises `EnvironmentFault`; the connection cannot write either.
    """

    def __init__(self, storage: RDBStorage, name: str) -> None:
        self._storage = storage
        self._name = name

    def get_all_studies(self) -> list[FrozenStudy]:
        """Return the one study, without how it was defined and on what it ran: a page of JSON."""
        try:
            number = self._storage.get_study_id_from_name(self._name)
            shown = FrozenStudy(
                study_name=self._name,
                direction=None,
                directions=self._storage.get_study_directions(number),
                user_attrs={},
                system_attrs=self._storage.get_study_system_attrs(number),
                study_id=number,
            )
        except KeyError:
            return []
        finally:
            self._storage.remove_session()
        return [shown]

    def get_study_id_from_name(self, study_name: str) -> int:
        """Return the database's number of a study."""
        return self._storage.get_study_id_from_name(study_name)

    def get_study_name_from_id(self, study_id: int) -> str:
        """Return the name of a study."""
        return self._storage.get_study_name_from_id(study_id)

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Return which way each objective is better."""
        return self._storage.get_study_directions(study_id)

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Return what is kept of a study."""
        return self._storage.get_study_user_attrs(study_id)

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Return what Optuna keeps of a study: the names of its metrics."""
        return self._storage.get_study_system_attrs(study_id)

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Return one trial."""
        return _shown_trial(self._storage.get_trial(trial_id))

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        """Return the trials that a search began; what measured its winners again is none."""
        try:
            trials = self._storage.get_all_trials(study_id, deepcopy=False, states=states)
        except _UNREADABLE:
            trials = [t for t in self._readable(study_id) if states is None or t.state in states]
        # The next look has a transaction of its own, or it would see the same for ever.
        self._storage.remove_session()
        return [_shown_trial(trial) for trial in trials if _is_of_search(trial)]

    def _readable(self, study_id: int) -> Iterator[FrozenTrial]:
        """Yield the trials that Optuna can read, one by one: it reads all of them or none."""
        self._storage.remove_session()
        trials = table("trials", column("trial_id", Integer), column("study_id", Integer))
        query = select(trials.c.trial_id).where(trials.c.study_id == study_id)
        with self._storage.engine.connect() as connection:
            numbers = connection.execute(query.order_by(trials.c.trial_id)).scalars().all()
        for trial_id in numbers:
            with suppress(*_UNREADABLE):
                yield self._storage.get_trial(trial_id)

    # What would write
    create_new_study = _refuse
    delete_study = _refuse
    set_study_user_attr = _refuse
    set_study_system_attr = _refuse
    create_new_trial = _refuse
    set_trial_param = _refuse
    set_trial_state_values = _refuse
    set_trial_intermediate_value = _refuse
    set_trial_user_attr = _refuse
    set_trial_system_attr = _refuse


def _is_of_search(trial: FrozenTrial) -> bool:
    try:
        is_begun = mapping.CONFIG in trial.user_attrs
        return is_begun and mapping.errand_of(trial).purpose == "search"
    except ValidationError:
        return False


def _shown_trial(trial: FrozenTrial) -> FrozenTrial:
    shown = copy.copy(trial)
    # What parameters and other attributes say in few words; a baseline may have no parameters.
    hidden = {mapping.RECORD, mapping.ATTEMPT, *([mapping.CONFIG] if trial.params else [])}
    shown.user_attrs = {k: v for k, v in trial.user_attrs.items() if k not in hidden}
    shown.system_attrs = {**trial.system_attrs, _CONSTRAINTS: list(trial.constraints.values())}
    return shown
