"""Owns the samplers by name: the guided one, and Optuna's, kept from repeats and hopeless draws.

Knows nothing of runners, memory or storage; what is known of a configuration before it runs is
handed in.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, assert_never, cast

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from search_spaces.errors import InputError
from search_spaces.space import SamplerName, SearchSpace
from storage import mapping
from sweep.sampling.candidates import SpaceCandidates
from sweep.sampling.encoding import Encoding, Params, identity
from sweep.sampling.expecting import NOTHING_EXPECTED, Expecting
from sweep.sampling.guided import GuidedSampler
from sweep.sampling.telling import telling
from sweep.sampling.tried import Tried

REFUSALS_MAX = 1024
"""Refused draws and combinations before one of them is let through: one in a hundred is found."""
UNTRIED_MAX = 50_000
"""Combinations that are gone through for one that was not tried."""
STARTUP_TRIALS = 10
"""Random trials before a model is fitted: a quarter of a study of 40."""
PARZEN_MAX = 256
"""Trials that TPE is fitted to, which tells apart the best 25 and the rest."""
PROCESS_MAX = 128
"""Trials that a Gaussian process is fitted to."""
ATTEMPTS_LONG = 6
"""Draws of one choice once there are more trials than a model is fitted to: most repeat one."""
GRID_MAX = 1_000_000
"""Combinations that a grid may have; more than anybody waits for."""


def make_sampler(
    name: SamplerName,
    space: SearchSpace,
    *,
    seed: int,
    preflight: Expecting = NOTHING_EXPECTED,
) -> BaseSampler:
    """Return the sampler that a space or a person names.

    Args:
        name: ``guided`` (the default: everything that is predicted and measured decides), ``tpe``
            (Optuna's default for few trials), ``gp`` (imports torch in this process), ``random``,
            ``grid``.
        space: what may be tried.
        seed: makes the draws repeatable.
        preflight: what it refuses is not asked for as long as something else is left, but by the
            grid, which asks for everything. What it foresees guides ``guided`` alone.

    Raises:
        InputError: a grid over a continuous dimension, or over far too many combinations.
    """
    encoding = Encoding(space)
    if name == "grid":
        return EveryCombination(encoding, seed=seed)
    if name == "guided":
        return GuidedSampler(
            SpaceCandidates(encoding, is_valid=preflight.is_valid, seed=seed),
            preflight=preflight,
            objectives=space.objectives,
            distributions=encoding.free,
            steps=space.steps,
            seed=seed,
        )
    return WithoutRepeats(
        optunas_own(name, seed=seed),
        encoding,
        seed=seed,
        preflight=preflight,
        # Each draw of gp is an optimization of its own, and most come out the same.
        attempts=3 if name == "gp" else 32,
    )


def optunas_own(name: Literal["tpe", "gp", "random"], *, seed: int) -> BaseSampler:
    """Return one of Optuna's samplers, as it is of most use to a study of few trials."""
    match name:
        case "random":
            return RandomSampler(seed=seed)
        case "tpe":
            # Trials run one at a time, so there is no running trial whose result would have to be
            # lied about.
            return ParzenSampler(
                seed=seed, n_startup_trials=STARTUP_TRIALS, constant_liar=False, multivariate=True
            )
        case "gp":
            return GaussianProcessSampler(
                seed=seed, n_startup_trials=STARTUP_TRIALS, deterministic_objective=False
            )
    assert_never(name)


def quiet_optuna() -> None:
    """Keep Optuna's log lines and notes on experimental features off the terminal."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


class WithoutRepeats(BaseSampler):
    """Any sampler, kept from what was tried already and from what is known to be hopeless.

    A draw of either kind is thrown away and drawn again a few times. Then, among many random
    combinations, an acceptable one that was not tried is taken. Failing that a hopeless one passes:
    it gets its verdict without the device, and the sampler learns from it.
    """

    def __init__(
        self,
        inner: BaseSampler,
        encoding: Encoding,
        *,
        seed: int,
        preflight: Expecting,
        attempts: int,
    ) -> None:
        self._inner = inner
        self._encoding = encoding
        self._preflight = preflight
        self._attempts = attempts
        self._random = random.Random(seed)
        self._tried = Tried(_identity_in(encoding))

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the whole space, also before there is any trial to infer it from."""
        return self._encoding.free

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Params:
        """Draw all parameters at once."""
        tried = self._tried.besides(study, trial)
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
        is_long = trial.number > PARZEN_MAX
        for _ in range(min(self._attempts, ATTEMPTS_LONG) if is_long else self._attempts):
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
                f"space '{name}': a grid needs a step for every range; or use --sampler guided"
            )
        if size > GRID_MAX:
            raise InputError(
                f"space '{name}': a grid of {size:,} combinations is too large; "
                "use --sampler guided"
            )
        self._encoding = encoding
        self._order = random.Random(seed).sample(range(size), size)
        self._next = 0
        """Place in that order before which all was tried: what was, stays so."""
        self._tried = Tried(_identity_in(encoding))

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the whole space."""
        return self._encoding.free

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Params:
        """Return the next combination that was not tried; the last one again when all were."""
        if not self._tried.follows(study):
            self._next = 0
        tried = self._tried.besides(study, trial)
        while self._next < len(self._order) - 1 and self._key(self._next) in tried:
            self._next += 1
        combination = self._encoding.combination(self._order[self._next])
        return {name: combination[name] for name in search_space}

    def _key(self, place: int) -> str:
        combination = self._encoding.combination(self._order[place])
        return identity(self._encoding.config(combination))

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


class ParzenSampler(TPESampler):
    """Optuna's sampler, fitted to a bounded number of trials.

    Of each draw it takes all of them anew, and a choice takes up to dozens of draws.
    """

    _seen: _TrialsToLearnFrom | None = None

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Params:
        """Return a value for each dimension; nothing while there are too few trials."""
        return super().sample_relative(self._view(study, trial), trial, search_space)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return a value for one dimension."""
        view = self._view(study, trial)
        return super().sample_independent(view, trial, param_name, param_distribution)

    def _view(self, study: optuna.Study, trial: FrozenTrial) -> optuna.Study:
        """Return the same for every draw of one choice, between which nothing changes."""
        if self._seen is None or not self._seen.is_of(study, trial):
            self._seen = _TrialsToLearnFrom(study, most=PARZEN_MAX, chosen_for=trial)
        return cast(optuna.Study, self._seen)


class GaussianProcessSampler(GPSampler):
    """Optuna's sampler, fitted to a bounded number of trials and blind to those that lack a
    parameter of the space.

    Such a trial is a baseline outside the space, and Optuna's own would look for its parameters.
    """

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Params:
        """Return a value for each dimension; nothing while there are too few trials."""
        names = frozenset(search_space)
        view = _TrialsToLearnFrom(study, most=PROCESS_MAX, chosen_for=trial, names=names)
        return super().sample_relative(cast(optuna.Study, view), trial, search_space)


class _TrialsToLearnFrom:
    """A study with the trials that say most, and without those that lack a parameter."""

    def __init__(
        self,
        study: optuna.Study,
        *,
        most: int,
        chosen_for: FrozenTrial,
        names: frozenset[str] = frozenset(),
    ) -> None:
        self._study = study
        self._chosen_for = chosen_for
        self._known: dict[str, list[FrozenTrial]] = {}
        self._most = most
        self._names = names
        self._signs = [1.0 if d is StudyDirection.MAXIMIZE else -1.0 for d in study.directions]

    def _get_trials(self, *args: Any, **kwargs: Any) -> list[FrozenTrial]:
        """Stand in for the method that Optuna's samplers read trials with."""
        asked = repr((args, kwargs))
        if asked not in self._known:
            trials = self._study._get_trials(*args, **kwargs)
            whole = [trial for trial in trials if self._names <= trial.params.keys()]
            self._known[asked] = telling(whole, merits=self._merits, most=self._most)
        return self._known[asked]

    def is_of(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether a choice for a trial sees the same."""
        return self._study is study and self._chosen_for is trial

    def _merits(self, trial: FrozenTrial) -> tuple[float, ...]:
        """Return what a trial reached: what does not fit has the worst values there are."""
        if trial.state is not TrialState.COMPLETE:
            return ()
        values = trial.values or ()
        return tuple(sign * value for sign, value in zip(self._signs, values, strict=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)


def _identity_in(encoding: Encoding) -> Callable[[FrozenTrial], str | None]:
    """Return what says which configuration of a space a trial was of; None of one outside it."""

    def identity_of(trial: FrozenTrial) -> str | None:
        if not encoding.free.keys() <= trial.params.keys():
            return None
        known = mapping.known_record(trial)
        return identity(encoding.config(trial.params) if known is None else known.config)

    return identity_of
