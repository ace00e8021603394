"""A study as tools for Optuna see it: read from the database, never written to."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from search_spaces.errors import InputError
from storage import mapping
from storage.database import Storage, close, open_for_reading
from storage.urls import parse_url

_CONSTRAINTS = "constraints"
"""The system attribute in which tools look for a list; Optuna 5 keeps each under its own name."""


@contextmanager
def shown_storage(name: str, *, url: str) -> Iterator[BaseStorage]:
    """Open one study for tools to look at, also while it is driven.

    Raises:
        InputError: there is no such study.
        EnvironmentFault: the database is not to be had.
    """
    database = parse_url(url)
    storage = open_for_reading(database, kind=_Shown)
    if storage is None:
        raise InputError(f"no studies yet at {database}: run `sweep run` first")
    storage.name = name
    try:
        yield storage
    finally:
        close(storage)


class _Shown(Storage):
    """One study of a database, with its search's trials, their constraints and short attributes.

    The connection cannot write.
    """

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
        trials = super().get_all_trials(study_id, deepcopy=False, states=states)
        begun = (trial for trial in trials if mapping.CONFIG in trial.user_attrs)
        return [_shown_trial(t) for t in begun if mapping.PURPOSE not in t.user_attrs]


def _shown_trial(trial: FrozenTrial) -> FrozenTrial:
    shown = copy.copy(trial)
    # What parameters and other attributes say in few words; a baseline may have no parameters.
    hidden = {mapping.RECORD, mapping.ATTEMPT, *([mapping.CONFIG] if trial.params else [])}
    shown.user_attrs = {k: v for k, v in trial.user_attrs.items() if k not in hidden}
    shown.system_attrs = {**trial.system_attrs, _CONSTRAINTS: list(trial.constraints.values())}
    return shown
