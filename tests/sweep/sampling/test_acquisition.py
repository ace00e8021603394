from __future__ import annotations

import random
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import BaseSampler
from optuna.trial import TrialState, create_trial

from sweep.sampling.samplers import optunas_own, quiet_optuna
from sweep.sampling.surrogate import (
    Array,
    Goal,
    Mixture,
    expected_improvement,
    front,
    most_telling,
)

X = FloatDistribution(0.0, 1.0)


def speeds(count: int, *, of: int = 1, seed: int = 0) -> Array:
    return np.random.default_rng(seed).random((count, of))


def a_goal(mean: float, deviation: float) -> Goal:
    """One candidate, of which speed alone is asked for."""
    first = Mixture(np.ones(1), np.full((1, 1), mean), np.full((1, 1), deviation))
    return Goal(first, np.ones((1, 2)), np.zeros(2))


def test_the_expected_gain_is_that_of_draws_from_the_distribution() -> None:
    draws = np.exp(0.05 + 0.2 * np.random.default_rng(0).standard_normal(200_000))
    gains, chances = expected_improvement(a_goal(0.05, 0.2), np.array([[0.5], [1.0], [0.9]]))
    assert gains[0] == pytest.approx(np.maximum(draws - 1, 0).mean(), rel=0.01)
    assert chances[0] == pytest.approx((draws > 1).mean(), rel=0.01)


def test_no_gain_is_expected_beyond_what_a_trial_can_gain() -> None:
    gains, _ = expected_improvement(a_goal(0.0, 5.0), np.ones((1, 1)))
    assert 0.3 < gains[0] < 1.0


def test_the_expected_gain_of_several_objectives_is_that_of_the_dominated_volume() -> None:
    reached = np.array([[1.0, 2.0, 3.0], [1.1, 1.0, 1.0], [0.9, 3.0, 0.5], [0.8, 1.0, 1.0]])
    first = Mixture(np.ones(1), np.full((1, 1), 0.02), np.full((1, 1), 0.1))
    goal = Goal(first, np.array([[2.5, 2.0]]), np.zeros(2))
    gains, _ = expected_improvement(goal, reached)
    random_points = np.random.default_rng(0).random((20_000, 3)) * [2.0, 3.0, 3.0]
    is_under = (random_points[:, None] <= reached[None]).all(axis=2).any(axis=1)
    is_below = (random_points[:, 1:] <= goal.others[0]).all(axis=1)
    grown = []
    for speed in np.exp(0.02 + 0.1 * np.random.default_rng(1).standard_normal(300)):
        grown.append((~is_under & is_below & (random_points[:, 0] <= speed)).mean())
    assert gains[0] == pytest.approx(np.mean(grown) / is_under.mean(), rel=0.03)


def test_the_front_is_what_no_other_matches_in_everything() -> None:
    points = np.array([[1.0, 2.0], [2.0, 1.0], [1.0, 1.0], [2.0, 1.0], [0.5, 2.0]])
    assert [tuple(points[at]) for at in front(points)] == [(1.0, 2.0), (2.0, 1.0)]


@pytest.mark.parametrize("count", [0, 1, 64])
def test_few_trials_are_all_learned_from(count: int) -> None:
    assert most_telling(speeds(count), most=64) == list(range(count))


@pytest.mark.parametrize("count", [65, 1000, 10_000])
@pytest.mark.parametrize("objectives", [1, 2, 3])
def test_of_many_the_best_and_the_newest_are_among_those_learned_from(
    count: int, objectives: int
) -> None:
    trials = speeds(count, of=objectives)
    kept = most_telling(trials, most=64)
    assert kept == sorted(set(kept))
    assert {*range(count - 16, count)} <= {*kept}
    assert {*trials.argmax(axis=0)} <= {*kept}


@pytest.mark.parametrize("objectives", [1, 2])
def test_one_trial_more_never_makes_fewer_teach(objectives: int) -> None:
    trials = speeds(450, of=objectives)
    counts = [len(most_telling(trials[:count], most=200)) for count in range(190, 451)]
    assert counts == [min(count, 200) for count in range(190, 451)]


def test_one_more_trial_changes_little_of_what_is_learned_from() -> None:
    trials = speeds(1001)
    before = set(most_telling(trials[:-1], most=64))
    assert len(before & set(most_telling(trials, most=64))) >= 60


def test_trials_that_reached_nothing_are_learned_from_too() -> None:
    assert len(most_telling(np.full((500, 1), -np.inf), most=64)) == 64


@pytest.mark.parametrize(
    ("sampler", "count"),
    [
        (optunas_own("tpe", seed=0), 1000),
        pytest.param(optunas_own("gp", seed=0), 100, marks=pytest.mark.slow),
    ],
)
def test_a_model_of_many_trials_asks_for_what_is_like_the_best(
    sampler: BaseSampler, count: int
) -> None:
    quiet_optuna()
    study = optuna.create_study(direction="maximize", sampler=sampler)
    draw = random.Random(1)
    study.add_trials([a_trial(draw.random()) for _ in range(count)])
    asked = [study.ask({"x": X}).params["x"] for _ in range(8)]
    assert sum(abs(x - 0.3) < 0.1 for x in asked) >= 6


def a_trial(x: float) -> Any:
    params = {"params": {"x": x}, "distributions": {"x": X}}
    return create_trial(value=1.0 - (x - 0.3) ** 2, state=TrialState.COMPLETE, **params)
