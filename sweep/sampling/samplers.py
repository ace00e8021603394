"""Owns what is tried next: Optuna's samplers by name, kept from repeats and hopeless draws.

Knows nothing of runners, memory or storage; what is known of a configuration before it runs is
handed in.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.space import SamplerName, SearchSpace
from sweep.sampling.encoding import Encoding, Params, identity

BREADTH = 1024
"""Combinations whose expected speed is compared for a guided trial."""
LOOKAHEAD = 256
"""The most promising combinations that are looked at for one that is acceptable."""
REFUSALS_MAX = 1024
"""Refused draws and combinations before one of them is let through: one in a hundred is found."""
UNTRIED_MAX = 50_000
"""Combinations that are gone through for one that was not tried."""
STARTUP_TRIALS = 10
"""Random trials before a model is fitted: a quarter of a study of 40."""
GRID_MAX = 1_000_000
"""Combinations that a grid may have; more than anybody waits for."""


class Expectation(Protocol):
    """What choosing asks of a configuration that has not run; each part costs only when read."""

    @property
    def is_refused(self) -> bool:
        """Whether it is known to be hopeless: a rule forbids it or it cannot fit."""
        ...

    @property
    def tokens_per_second(self) -> float | None:
        """Expected speed; None where that is not known."""
        ...


class Expecting(Protocol):
    """Says what is known of configurations before they run; `sweep.study.preflight` does."""

    @property
    def predicts_speed(self) -> bool:
        """Whether any speed is known."""
        ...

    def expect(self, config: TrialConfig) -> Expectation:
        """Return what is known of ``config``; the same value until a further trial is told."""
        ...


@dataclass(frozen=True)
class NothingExpected:
    """Knows nothing of any configuration: refuses none, expects no speed."""

    is_refused: bool = False
    tokens_per_second: float | None = None
    predicts_speed: bool = False

    def expect(self, config: TrialConfig) -> Expectation:
        """Return the same of every configuration."""
        return self


def make_sampler(
    name: SamplerName,
    space: SearchSpace,
    *,
    seed: int,
    preflight: Expecting = NothingExpected(),
) -> BaseSampler:
    """Return the sampler that a space or a person names.

    Args:
        name: ``tpe`` (Optuna's default for few trials), ``gp`` (imports torch in this process),
            ``random``, ``grid``.
        space: what may be tried.
        seed: makes the draws repeatable.
        preflight: what it refuses is not asked for as long as something else is left, but by the
            grid, which asks for everything. The speed that it expects guides ``tpe`` alone, where
            speed is all that the study is after: every other trial is the most promising of the
            space, the rest are its own.

    Raises:
        InputError: a grid over a continuous dimension, or over far too many combinations.
    """
    encoding = Encoding(space)
    match name:
        case "grid":
            return EveryCombination(encoding, seed=seed)
        case "random":
            inner: BaseSampler = RandomSampler(seed=seed)
        case "tpe":
            # Trials run one at a time, so there is no running trial whose result would have to be
            # lied about.
            inner = TPESampler(
                seed=seed, n_startup_trials=STARTUP_TRIALS, constant_liar=False, multivariate=True
            )
        case "gp":
            inner = GaussianProcessSampler(
                seed=seed, n_startup_trials=STARTUP_TRIALS, deterministic_objective=False
            )
    return WithoutRepeats(
        inner,
        encoding,
        seed=seed,
        preflight=preflight,
        # Each draw of gp is an optimization of its own, and most come out the same.
        attempts=3 if name == "gp" else 32,
        is_guided=name == "tpe" and set(space.objectives) == {"tokens_per_second"},
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

    Where it is guided, every other trial is the most promising one of a broad look at the space.
    """

    def __init__(
        self,
        inner: BaseSampler,
        encoding: Encoding,
        *,
        seed: int,
        preflight: Expecting,
        attempts: int,
        is_guided: bool,
    ) -> None:
        self._inner = inner
        self._encoding = encoding
        self._preflight = preflight
        self._attempts = attempts
        self._is_guided = is_guided and preflight.predicts_speed
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
        if self._is_guided and trial.number % 2 == 0:
            promising = self._most_promising(tried)
            if promising is not None:
                return {name: promising[name] for name in search_space}
        hopeless: Params | None = None
        candidate: Params = {}
        refusals = 0
        for candidate in self._candidates(study, trial, search_space):
            config = self._encoding.config(candidate)
            if identity(config) in tried:
                continue
            if not self._preflight.expect(config).is_refused:
                return candidate
            hopeless, refusals = hopeless or candidate, refusals + 1
            if refusals >= REFUSALS_MAX:
                break
        return hopeless or candidate

    def _most_promising(self, tried: Collection[str]) -> Params | None:
        """Return the acceptable combination of which most speed is expected; None for none."""
        speeds = (
            (self._preflight.expect(config).tokens_per_second, index)
            for index, config in self._broad_look()
        )
        ranked = sorted(((s, index) for s, index in speeds if s is not None), reverse=True)
        for _, index in ranked[:LOOKAHEAD]:
            combination = self._encoding.combination(index)
            config = self._encoding.config(combination)
            if identity(config) not in tried and not self._preflight.expect(config).is_refused:
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


class EveryCombination(BaseSampler):
    """Every combination once, in an order that the seed gives.

    Optuna's own grid cannot be asked and told.
    """

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


class GaussianProcessSampler(GPSampler):
    """Optuna's sampler, blind to trials that lack a parameter of the space.

    Such a trial is a baseline outside the space, and Optuna's own would look for its parameters.
    """

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Params:
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


def tried_already(study: optuna.Study, trial: FrozenTrial, *, encoding: Encoding) -> set[str]:
    """Return the identities of every other trial of the study that has all parameters."""
    return {
        identity(encoding.config(other.params))
        for other in study.get_trials(deepcopy=False)
        if other.number != trial.number and encoding.free.keys() <= other.params.keys()
    }
