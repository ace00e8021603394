from __future__ import annotations

import random
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import BaseSampler
from optuna.trial import TrialState, create_trial

from sweep.sampling.samplers import (
    PARZEN_MAX,
    PROCESS_MAX,
    GaussianProcessSampler,
    ParzenSampler,
    quiet_optuna,
)
from sweep.sampling.telling import Merits, telling

X = FloatDistribution(0.0, 1.0)


def speeds(count: int, *, of: int = 1, seed: int = 0) -> list[Merits]:
    draw = random.Random(seed)
    return [tuple(draw.random() for _ in range(of)) for _ in range(count)]


def itself(merits: Merits) -> Merits:
    return merits


@pytest.mark.parametrize("count", [0, 1, 64])
def test_few_trials_are_all_learned_from(count: int) -> None:
    trials = speeds(count)
    assert telling(trials, merits=itself, most=64) == trials


@pytest.mark.parametrize("count", [65, 1000, 10_000])
@pytest.mark.parametrize("objectives", [1, 2, 3])
def test_of_many_the_best_and_the_newest_are_among_those_learned_from(
    count: int, objectives: int
) -> None:
    trials = speeds(count, of=objectives)
    kept = telling(trials, merits=itself, most=64)
    assert len(kept) <= 64
    assert kept == [trial for trial in trials if trial in set(kept)]
    assert set(trials[-16:]) <= set(kept)
    for objective in range(objectives):
        assert max(trials, key=lambda trial: trial[objective]) in kept


def test_one_more_trial_changes_little_of_what_is_learned_from() -> None:
    trials = speeds(1001)
    before = set(telling(trials[:-1], merits=itself, most=64))
    assert len(before & set(telling(trials, merits=itself, most=64))) >= 60


def test_trials_that_reached_nothing_are_learned_from_too() -> None:
    kept = telling([()] * 500, merits=itself, most=64)
    assert 40 <= len(kept) <= 64


@pytest.mark.parametrize(
    ("sampler", "most"),
    [
        (ParzenSampler(seed=0, multivariate=True), PARZEN_MAX),
        pytest.param(GaussianProcessSampler(seed=0), PROCESS_MAX, marks=pytest.mark.slow),
    ],
)
def test_a_model_of_thousands_of_trials_still_asks_for_what_is_like_the_best(
    sampler: BaseSampler, most: int
) -> None:
    quiet_optuna()
    study = optuna.create_study(direction="maximize", sampler=sampler)
    draw = random.Random(1)
    for _ in range(4 * most):
        x = draw.random()
        study.add_trial(a_trial(x))
    asked = [study.ask({"x": X}).params["x"] for _ in range(8)]
    assert sum(abs(x - 0.3) < 0.1 for x in asked) >= 6


def a_trial(x: float) -> Any:
    params = {"params": {"x": x}, "distributions": {"x": X}}
    return create_trial(value=1.0 - (x - 0.3) ** 2, state=TrialState.COMPLETE, **params)
