"""Owns what is tried next: Optuna's samplers by name, kept from repeats and hopeless draws.

Knows nothing of runners, memory or storage; what cannot work is a predicate that is handed in.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from search_spaces.config import TrialConfig
from search_spaces.space import SamplerName, SearchSpace
from sweep.sampling.encoding import Encoding, Params, identity
from sweep.sampling.gaussian_process import GaussianProcessSampler
from sweep.sampling.grid import EveryCombination, tried_already

Refusal = Callable[[TrialConfig], bool]
"""Whether a configuration is known to be hopeless: a rule forbids it or it cannot fit."""

Expectation = Callable[[TrialConfig], float | None]
"""What a configuration promises, more being better; None where that is not known."""

BREADTH = 1024
"""Combinations whose promise is compared for a guided trial."""
LOOKAHEAD = 256
"""The most promising combinations that are looked at for one that is acceptable."""
REFUSALS_MAX = 1024
"""Refused draws and combinations before one of them is let through: one in a hundred is found."""
UNTRIED_MAX = 50_000
"""Combinations that are gone through for one that was not tried."""
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
    expects: Expectation | None = None,
) -> BaseSampler:
    """Return the sampler that a space or a person names.

    Args:
        name: ``tpe`` (Optuna's default for few trials), ``gp`` (imports torch in this process),
            ``random``, ``grid``.
        space: what may be tried.
        seed: makes the draws repeatable.
        refuses: what not to ask for as long as something else is left. The grid asks for
            everything.
        expects: expected speed, where speed is what the study is after. It guides ``tpe`` alone:
            every other trial is the most promising of the space, the rest are its own.

    Raises:
        InputError: a grid over a continuous dimension, or over far too many combinations.
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
    return WithoutRepeats(
        inner,
        encoding,
        seed=seed,
        refuses=refuses,
        attempts=attempts,
        expects=expects if name == "tpe" else None,
    )


def quiet_optuna() -> None:
    """Keep Optuna's log lines and notes on experimental features off the terminal."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


class WithoutRepeats(BaseSampler):
    """Any sampler, kept from what was tried already and from what is known to be hopeless.

    A draw of either kind is thrown away and drawn again a few times. Then, among many random
    combinations, an acceptable one that was not tried is taken. Failing that a hopeless one passes:
    it gets its verdict without the device, and the sampler learns from it.

    With an expectation, every other trial is the most promising one of a broad look at the space.
    """

    def __init__(
        self,
        inner: BaseSampler,
        encoding: Encoding,
        *,
        seed: int,
        refuses: Refusal,
        attempts: int,
        expects: Expectation | None = None,
    ) -> None:
        self._inner = inner
        self._encoding = encoding
        self._refuses = refuses
        self._attempts = attempts
        self._expects = expects
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
        tried = tried_already(study, trial, encoding=self._encoding)
        if self._expects is not None and trial.number % 2 == 0:
            promising = self._most_promising(self._expects, tried)
            if promising is not None:
                return {name: promising[name] for name in search_space}
        hopeless: Params | None = None
        candidate: Params = {}
        refusals = 0
        for candidate in self._candidates(study, trial, search_space):
            config = self._encoding.config(candidate)
            if identity(config) in tried:
                continue
            if not self._refuses(config):
                return candidate
            hopeless, refusals = hopeless or candidate, refusals + 1
            if refusals >= REFUSALS_MAX:
                break
        return hopeless or candidate

    def _most_promising(self, expects: Expectation, tried: Collection[str]) -> Params | None:
        """Return the acceptable combination that promises most; None where none is found."""
        ranked = sorted(
            ((expects(config) or 0.0, index) for index, config in self._broad_look()), reverse=True
        )
        for _, index in ranked[:LOOKAHEAD]:
            combination = self._encoding.combination(index)
            config = self._encoding.config(combination)
            if identity(config) not in tried and not self._refuses(config):
                return combination
        return None

    def _broad_look(self) -> Iterator[tuple[int, TrialConfig]]:
        size = self._encoding.size
        if size is not None:
            for index in self._random.sample(range(size), min(size, BREADTH)):
                yield index, self._encoding.config(self._encoding.combination(index))

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
            params = params | {
                name: self._inner.sample_independent(study, trial, name, distribution)
                for name, distribution in missing.items()
            }
            yield self._encoding.with_whole_batches(params, draw=self._random)
        size = self._encoding.size
        if size is not None:
            for index in self._random.sample(range(size), min(size, UNTRIED_MAX)):
                combination = self._encoding.combination(index)
                yield {name: combination[name] for name in search_space}
