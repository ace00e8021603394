"""Owns Optuna's Gaussian-process sampler for studies that hold trials without parameters.

Such a trial is a baseline outside the space; Optuna's sampler would look for its parameters.
"""

from __future__ import annotations

from typing import Any, cast

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import GPSampler
from optuna.trial import FrozenTrial


class GaussianProcessSampler(GPSampler):
    """Optuna's sampler, blind to trials that lack a parameter of the space."""

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return a value for each dimension; nothing while there are too few trials."""
        view = cast(optuna.Study, _TrialsOfSpace(study, names=frozenset(search_space)))
        return super().sample_relative(view, trial, search_space)


class _TrialsOfSpace:
    """A study without the trials that lack a parameter of the space."""

    def __init__(self, study: optuna.Study, *, names: frozenset[str]) -> None:
        self._study = study
        self._names = names

    def _get_trials(self, *args: Any, **kwargs: Any) -> list[FrozenTrial]:
        """Stand in for the method that Optuna's samplers read trials with."""
        trials = self._study._get_trials(*args, **kwargs)
        return [trial for trial in trials if self._names <= trial.params.keys()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)
