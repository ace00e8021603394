"""The samplers by name: the guided one, and Optuna's kept from repeats and hopeless draws."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import SamplerName, SearchSpace
from qlora_sweep.sweep.predict.forecast import Forecaster
from qlora_sweep.sweep.sampling.encoding import (
    Candidates,
    Params,
    ShortlistedCandidates,
    SpaceCandidates,
    identity,
)
from qlora_sweep.sweep.sampling.guided import SETTLED_BELOW, CandidateSampler, GuidedSampler

REFUSALS_MAX = 1024
"""Refused draws and combinations before one of them is let through: one in a hundred is found."""
LONG = 256
"""Trials from which on most draws repeat one, and fewer are taken for one choice."""
ATTEMPTS_LONG = 6
GRID_MAX = 1_000_000
"""Combinations that a grid may have; more than anybody waits for."""


def make_sampler(
    name: SamplerName,
    space: SearchSpace,
    *,
    seed: int,
    forecaster: Forecaster | None = None,
    model: ModelSpec | None = None,
    lanes: int = 1,
) -> BaseSampler:
    """Return the sampler that a space or a person names.

    Args:
        name: ``guided`` (the default: everything that is predicted and measured decides), ``tpe``
            (Optuna's default for few trials), ``gp`` (imports torch in this process), ``random``,
            ``grid``.
        space: what may be tried.
        seed: makes the draws repeatable.
        forecaster: what it refuses is not asked for as long as something else is left, but by the
            grid, which asks for everything. ``guided`` cannot do without one, and searches for one
            objective.
        model: what is trained; the guided sampler, asked for speed alone, has the capacity class
            first that is recommended of it. None where all classes compete.
        lanes: trials that run at a time.

    Raises:
        InputError: a grid over a continuous dimension, or over far too many combinations.
    """
    is_valid = (lambda _: True) if forecaster is None else forecaster.is_valid
    candidates = SpaceCandidates(space, is_valid=is_valid, seed=seed)
    if name == "grid":
        # Every combination once, in random order; Optuna's own grid cannot be asked and told.
        if candidates.size is None or candidates.size > GRID_MAX:
            why = "needs a step for every range"
            if candidates.size is not None:
                why = f"of {candidates.size:,} combinations is too large"
            raise InputError(f"space '{space.name}': a grid {why}; use --sampler guided")
        return WithoutRepeats(RandomSampler(), candidates, forecaster=None, attempts=0)
    if name == "guided":
        assert forecaster is not None, "what is predicted guides it"
        (objective,) = space.objectives
        is_of_speed = objective == "tokens_per_second"
        if is_of_speed and not candidates.is_listed and forecaster.predicts_speed:
            candidates = ShortlistedCandidates(space, forecaster=forecaster, seed=seed)
        return GuidedSampler(
            candidates,
            forecaster=forecaster,
            objective=objective,
            steps=space.steps,
            seed=seed,
            model=model,
            settled_below=None if space.stop_below_gain else SETTLED_BELOW,
        )
    # Each draw of gp is an optimization of its own, and most come out the same.
    attempts = 32
    if name == "gp":
        attempts = 3
    inner = optunas_own(name, seed=seed, lanes=lanes)
    return WithoutRepeats(inner, candidates, forecaster=forecaster, attempts=attempts)


def optunas_own(name: Literal["tpe", "gp", "random"], *, seed: int, lanes: int = 1) -> BaseSampler:
    """Return one of Optuna's samplers, as it is of most use to a study of few trials."""
    if name == "random":
        return RandomSampler(seed=seed)
    if name == "gp":
        return _OfWholeTrials(GPSampler(seed=seed))
    return TPESampler(
        seed=seed,
        multivariate=True,
        # What runs beside a trial counts as slow, so that its like is not asked for as well.
        constant_liar=lanes > 1,
    )


def quiet_optuna() -> None:
    """Keep Optuna's log lines and notes on experimental features off the terminal."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


class _OfWholeTrials(BaseSampler):
    """One of Optuna's samplers, asked in a study that has the trials with every parameter alone.

    Its Gaussian process fails where a trial lacks one: a baseline outside the space has none.
    """

    def __init__(self, inner: BaseSampler) -> None:
        self._inner = inner

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return what the sampler would draw together."""
        return self._inner.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Params:
        """Draw all parameters at once."""
        states = (TrialState.COMPLETE, TrialState.RUNNING)
        whole = optuna.create_study(sampler=self._inner, directions=study.directions)
        for known in study.get_trials(deepcopy=False, states=states):
            if known.number != trial.number and search_space.keys() <= known.params.keys():
                whole.add_trial(known)
        return whole.ask(search_space).params

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Draw one parameter alone."""
        return self._inner.sample_independent(study, trial, param_name, param_distribution)


class WithoutRepeats(CandidateSampler):
    """A sampler of Optuna's, kept from what was tried already and from what is hopeless.

    A draw of either kind is thrown away and drawn again a few times. Then what the candidates offer
    instead is gone through. Failing that a hopeless one passes: it gets its verdict without the
    device, and the sampler learns from it.
    """

    def __init__(
        self,
        inner: BaseSampler,
        candidates: Candidates,
        *,
        forecaster: Forecaster | None,
        attempts: int,
    ) -> None:
        super().__init__(candidates, inner=inner)
        self._forecaster = forecaster
        self._attempts = attempts

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Params:
        """Draw all parameters at once."""
        tried = self._read(study, besides=trial.number).tried
        hopeless: list[Params] = []
        drawn: Params = {}
        for drawn in self._drawn(study, trial, search_space):
            config = self._candidates.config(drawn)
            if config is None or identity(config) in tried:
                continue
            if self._forecaster is None or not self._forecaster.expect(config).is_refused:
                return drawn
            hopeless.append(drawn)
            if len(hopeless) >= REFUSALS_MAX:
                break
        return hopeless[0] if hopeless else drawn

    def _drawn(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Iterator[Params]:
        """Yield draws, and then what may be asked for instead of the first."""
        first: Params = {}
        most = self._attempts
        if trial.number > LONG:
            most = min(most, ATTEMPTS_LONG)
        for _ in range(most):
            params = self._inner.sample_relative(study, trial, search_space)
            for name, distribution in search_space.items():
                if name not in params:
                    drawn = self._inner.sample_independent(study, trial, name, distribution)
                    params[name] = drawn
            first = first or params
            yield self._candidates.repaired(params)
        yield from self._candidates.instead_of(first)
