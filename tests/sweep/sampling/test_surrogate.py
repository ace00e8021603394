"""What is believed of speeds and peaks, and what a trial is expected to gain by it."""

from __future__ import annotations

import numpy as np
import pytest

from qlora_sweep.sweep.sampling.surrogate import (
    Array,
    Column,
    Mixture,
    Observed,
    PredictedPeaks,
    SpeedSurrogate,
    chance_to_fit,
    expected_improvement,
    most_telling,
)
from tests.sweep.simulated_device import OneFactor


def test_the_expected_gain_is_that_of_draws_from_the_distribution() -> None:
    draws = np.exp(0.05 + 0.2 * np.random.default_rng(0).standard_normal(200_000))
    speed = Mixture(np.ones(1), np.full((1, 1), 0.05), np.full((1, 1), 0.2))
    gains, chances = expected_improvement(speed, np.array([0.5, 1.0, 0.9]))
    assert gains[0] == pytest.approx(np.maximum(draws - 1, 0).mean(), rel=0.01)
    assert chances[0] == pytest.approx((draws > 1).mean(), rel=0.01)


@pytest.mark.parametrize("count", [65, 1000])
def test_the_best_and_the_newest_trials_are_learned_from(count: int) -> None:
    trials = np.random.default_rng(0).random(count)
    kept = set(most_telling(trials, most=64))
    assert len(kept) == 64
    assert kept >= set(range(count - 16, count)) | set(np.argsort(trials)[-16:].tolist())
    # One trial more changes little.
    assert len(kept & set(most_telling(trials[:-1], most=64))) >= 60


# Speed


class HeldUpByLaunches(OneFactor):
    """All steps of the second kind take half as long again for the host's launches."""

    @property
    def launch_shares(self) -> Array:
        return np.where(KINDS == 1, 1 - 1.5**-4.0, 0.0)


KINDS = np.repeat([0, 1, 2], 8)
SIZES = np.tile(np.arange(8.0), 3)


def test_no_surprise_makes_a_step_faster_than_its_launches_allow() -> None:
    log_tokens = np.full(24, np.log(1000.0))
    truth = 9.0 + 0.08 * SIZES + np.array([0.0, 0.1, 0.25])[KINDS]
    columns = [Column.of_numbers(SIZES, scale=2.0), Column.of_kinds(list(KINDS), common=0.5)]
    physics = HeldUpByLaunches(log_tokens - truth + 0.8 * (KINDS == 1))
    surrogate = SpeedSurrogate(columns, log_tokens=log_tokens, physics=physics)
    measured = np.array([7, 23], dtype=np.intp)
    speed = surrogate.posterior(Observed(measured, truth[measured], np.full(2, 0.01)))
    gains, _ = expected_improvement(speed, np.exp([truth.max()]))
    # At best they are 2.2 times as slow as the fastest, over 1.5.
    assert gains[KINDS == 1].max() < 0.01
    held_up = (KINDS == 1) & (SIZES == 7)
    assert speed.deviation[held_up] > 2 * speed.deviation[(KINDS == 0) & (SIZES == 6)]


# Memory

BUDGET = float(np.log(20.0))


def test_the_chance_to_fit_falls_with_the_predicted_peak_and_is_certain_without_a_prediction() -> (
    None
):
    gibibytes = np.array([10.0, 15.0, 19.0, 19.9, 20.5, 24.0, 30.0, np.nan])
    peaks = PredictedPeaks(np.log(gibibytes), np.full(8, 0.015), np.zeros(8, dtype=np.intp))
    chance = chance_to_fit(peaks, [], log_budget=BUDGET)
    assert chance[0] > 0.95
    assert chance[6] < 0.1
    assert (np.diff(chance[:7]) < 0).all()
    assert chance[7] == 1.0


def test_a_compiled_trial_that_ran_out_says_nothing_of_eager_ones() -> None:
    kinds = np.array([0, 1], dtype=np.intp)
    peaks = PredictedPeaks(np.log([19.0, 19.0]), np.full(2, 0.015), kinds)
    chance = chance_to_fit(peaks, [(1, BUDGET, True)], log_budget=BUDGET)
    assert chance[0] > 0.9
    assert chance[1] < 0.5
