"""Owns what is tried next: Optuna's samplers by name, kept from repeats and hopeless draws.

Knows nothing of runners, memory or storage; what cannot work is a predicate that is handed in.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.space import SamplerName, SearchSpace
from sweep.encoding import Encoding, Params, identity
from sweep.gaussian_process import GaussianProcessSampler

Refusal = Callable[[TrialConfig], bool]
"""Whether a configuration is known to be hopeless: a rule forbids it or it cannot fit."""

GRID_MAX = 1_000_000
"""Combinations that a grid may have; more than anybody waits for."""
LOOKAHEAD = 256
"""Random combinations that are looked at before a hopeless draw is let through."""
STARTUP_TRIALS = 10
"""Random trials before a model is fitted: a quarter of a study of 40."""


def nothing_refused(_: TrialConfig) -> bool:
    """Refuse nothing."""
    return False


def make_sampler(
    name: SamplerName,
    space: SearchSpace,
    *,
    seed: int,
    refuses: Refusal = nothing_refused,
) -> BaseSampler:
    """Return the sampler that a space or a person names.

    Args:
        name: ``tpe`` (Optuna's default for few trials), ``gp`` (imports torch in this process),
            ``random``, ``grid``.
        space: what may be tried.
        seed: makes the draws repeatable; a study that goes on should hand in another one.
        refuses: what not to ask for as long as something else is left. The grid asks for
            everything.

    Raises:
        InputError: a grid over a continuous dimension, or over more combinations than `GRID_MAX`.
    """
    encoding = Encoding(space)
    match name:
        case "grid":
            return EveryCombination(encoding, seed=seed)
        case "random":
            inner: BaseSampler = RandomSampler(seed=seed)
            attempts = 32
        case "tpe":
            # Trials run one at a time, so there is no running trial whose result would have to be
            # lied about.
            inner = TPESampler(
                seed=seed, n_startup_trials=STARTUP_TRIALS, constant_liar=False, multivariate=True
            )
            attempts = 32
        case "gp":
            inner = GaussianProcessSampler(
                seed=seed, n_startup_trials=STARTUP_TRIALS, deterministic_objective=False
            )
            attempts = 3  # Each draw is an optimization of its own, and most come out the same.
    return WithoutRepeats(inner, encoding, seed=seed, refuses=refuses, attempts=attempts)


def quiet_optuna() -> None:
    """Keep Optuna's log lines and notes on experimental features off the terminal."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


class WithoutRepeats(BaseSampler):
    """Any sampler, kept from what was tried already and from what is known to be hopeless.

    A draw of either kind is thrown away and drawn again a few times. Then, among a few random
    combinations, an acceptable one that was not tried is taken. Failing that a hopeless one passes:
    it gets its verdict without the device, and the sampler learns from it.
    """

    def __init__(
        self, inner: BaseSampler, encoding: Encoding, *, seed: int, refuses: Refusal, attempts: int
    ) -> None:
        self._inner = inner
        self._encoding = encoding
        self._refuses = refuses
        self._attempts = attempts
        self._random = random.Random(seed)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the whole space, also before there is any trial to infer it from."""
        return self._encoding.free

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Params:
        """Draw all parameters at once."""
        tried = _tried(study, trial, encoding=self._encoding)
        passable: Params | None = None
        candidate: Params = {}
        for candidate in self._candidates(study, trial, search_space):
            config = self._encoding.config(candidate)
            if identity(config) in tried:
                continue
            if not self._refuses(config):
                return candidate
            passable = passable or candidate
        return passable or candidate

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Draw one parameter that the space does not know, or that a queued trial left open."""
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Hand on."""
        self._inner.before_trial(study, trial)

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Hand on."""
        self._inner.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        """Hand on."""
        self._inner.reseed_rng()

    def _candidates(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Iterator[Params]:
        for _ in range(self._attempts):
            params = self._inner.sample_relative(study, trial, search_space)
            missing = {name: d for name, d in search_space.items() if name not in params}
            yield params | {
                name: self._inner.sample_independent(study, trial, name, distribution)
                for name, distribution in missing.items()
            }
        size = self._encoding.size
        if size is not None:
            for index in self._random.sample(range(size), min(size, LOOKAHEAD)):
                combination = self._encoding.combination(index)
                yield {name: combination[name] for name in search_space}


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
        tried = _tried(study, trial, encoding=self._encoding)
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


def _tried(study: optuna.Study, trial: FrozenTrial, *, encoding: Encoding) -> set[str]:
    """Return the identities of every other trial of the study that has all parameters."""
    return {
        identity(encoding.config(other.params))
        for other in study.get_trials(deepcopy=False)
        if other.number != trial.number and encoding.free.keys() <= other.params.keys()
    }
