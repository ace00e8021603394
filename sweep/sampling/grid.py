"""Owns going through every combination of a space, and knowing which have been tried.

Knows nothing of other samplers, of runners or of storage.
"""

from __future__ import annotations

import random
from collections.abc import Container
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from search_spaces.errors import InputError
from sweep.sampling.encoding import Encoding, Params, identity

GRID_MAX = 1_000_000
"""Combinations that a grid may have; more than anybody waits for."""


class EveryCombination(BaseSampler):
    """Every combination once, in an order that the seed gives. Optuna's own grid cannot be asked
    and told."""

    def __init__(self, encoding: Encoding, *, seed: int) -> None:
        name, size = encoding.space.name, encoding.size
        if size is None:
            raise InputError(
                f"space '{name}': a grid needs a step for every range; or use --sampler tpe"
            )
        if size > GRID_MAX:
            raise InputError(
                f"space '{name}': a grid of {size:,} combinations is too large; use --sampler tpe"
            )
        self._encoding = encoding
        self._order = random.Random(seed).sample(range(size), size)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the whole space."""
        return self._encoding.free

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Params:
        """Return the next combination that was not tried; the last one again when all were."""
        tried = tried_already(study, trial, encoding=self._encoding)
        candidate: Params = {}
        for index in self._order:
            combination = self._encoding.combination(index)
            candidate = {name: combination[name] for name in search_space}
            if identity(self._encoding.config(candidate)) not in tried:
                return candidate
        return candidate

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Refuse: a grid knows its own dimensions only."""
        raise ValueError(
            f"'{param_name}' is not a dimension of space '{self._encoding.space.name}'"
        )


class Frontier:
    """Whether every combination of a space has been tried; each is looked at once over a study."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._index = 0

    def is_exhausted(self, tried: Container[str]) -> bool:
        """Return whether nothing is left, given the identities of what was tried so far.

        A continuous dimension always leaves something.
        """
        size = self._encoding.size
        if size is None:
            return False
        while self._index < size:
            config = self._encoding.config(self._encoding.combination(self._index))
            if identity(config) not in tried:
                return False
            self._index += 1
        return True


def tried_already(study: optuna.Study, trial: FrozenTrial, *, encoding: Encoding) -> set[str]:
    """Return the identities of every other trial of the study that has all parameters."""
    return {
        identity(encoding.config(other.params))
        for other in study.get_trials(deepcopy=False)
        if other.number != trial.number and encoding.free.keys() <= other.params.keys()
    }
