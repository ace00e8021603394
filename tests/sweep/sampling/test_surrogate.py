"""What is believed of speeds and peaks, and what a trial is expected to gain by it."""

from __future__ import annotations

import numpy as np
import pytest

from qlora_sweep.sweep.sampling.surrogate import (
    Array,
    Column,
    Mixture,
    Observed,
    Peaks,
    SpeedSurrogate,
    chance_to_fit,
    expected_improvement,
    most_telling,
)
from tests.sweep.simulated_device import OneFactor


def speeds(count: int) -> Array:
    return np.random.default_rng(0).random(count)


def expected(mean: float, deviation: float) -> Mixture:
    """What is expected of one candidate."""
    return Mixture(np.ones(1), np.full((1, 1), mean), np.full((1, 1), deviation))


def test_the_expected_gain_is_that_of_draws_from_the_distribution() -> None:
    draws = np.exp(0.05 + 0.2 * np.random.default_rng(0).standard_normal(200_000))
    gains, chances = expected_improvement(expected(0.05, 0.2), np.array([0.5, 1.0, 0.9]))
    assert gains[0] == pytest.approx(np.maximum(draws - 1, 0).mean(), rel=0.01)
    assert chances[0] == pytest.approx((draws > 1).mean(), rel=0.01)


def test_no_gain_is_expected_beyond_what_a_trial_can_gain() -> None:
    gains, _ = expected_improvement(expected(0.0, 5.0), np.ones(1))
    assert 0.3 < gains[0] < 1.0


@pytest.mark.parametrize("count", [0, 1, 64, 65, 1000, 10_000])
def test_the_best_and_the_newest_are_learned_from(count: int) -> None:
    trials = speeds(count)
    kept = most_telling(trials, most=64)
    assert kept == sorted(set(kept))
    assert {*range(max(0, count - 16), count)} <= {*kept}
    if count:
        assert int(trials.argmax()) in kept
    # One trial more changes little, and where none reached anything they teach as well.
    assert len({*kept} & {*most_telling(trials[:-1], most=64)}) >= min(count, 64) - 4
    assert len(most_telling(np.full(count, -np.inf), most=64)) == min(count, 64)


def test_one_trial_more_never_makes_fewer_teach() -> None:
    trials = speeds(450)
    counts = [len(most_telling(trials[:count], most=200)) for count in range(190, 451)]
    assert counts == [min(count, 200) for count in range(190, 451)]


# Speed

KINDS = np.repeat([0, 1, 2], 8)
SIZES = np.tile(np.arange(8.0), 3)
LOG_TOKENS = np.log(1000.0) + 0.0 * SIZES
TRUTH = 9.0 + 0.08 * SIZES + np.array([0.0, 0.1, 0.25])[KINDS]


def a_surrogate(log_speed: Array) -> SpeedSurrogate:
    """A surrogate whose physical model forecasts so."""
    columns = [Column.of_numbers(SIZES, scale=2.0), Column.of_kinds(list(KINDS), common=0.5)]
    return SpeedSurrogate(columns, log_tokens=LOG_TOKENS, physics=OneFactor(LOG_TOKENS - log_speed))


def observed(*rows: int) -> Observed:
    at = np.array(rows, dtype=np.intp)
    return Observed(at, TRUTH[at], np.full(len(at), 0.01))


def test_one_trial_calibrates_a_forecast_that_is_off_by_a_factor() -> None:
    speed = a_surrogate(TRUTH - 0.3).posterior(observed(3))
    assert np.abs(speed.mean - TRUTH).max() < 0.03
    assert speed.weights.argmax() == 0


def test_a_reversed_forecast_loses_its_say_and_the_trials_decide() -> None:
    surrogate = a_surrogate(-TRUTH)
    speed = surrogate.posterior(observed(0, 7, 9, 14, 18))
    assert speed.weights[0] < 0.01
    assert TRUTH[int(speed.mean.argmax())] > TRUTH.max() - 0.1


def test_what_one_structure_has_over_its_forecast_is_believed_of_its_like() -> None:
    flat = TRUTH - np.array([0.0, 0.0, 0.25])[KINDS]
    speed = a_surrogate(flat).posterior(observed(0, 4, 10, 16, 20))
    others = speed.mean - flat
    assert others[KINDS == 2].mean() > others[KINDS == 0].mean() + 0.1


class HeldUp(OneFactor):
    """All steps of the second kind take half as long again for the host's launches."""

    @property
    def launch_shares(self) -> Array:
        return np.where(KINDS == 1, 1 - 1.5**-4.0, 0.0)


def test_no_surprise_makes_a_step_faster_than_its_launches_allow() -> None:
    log_speed = TRUTH - 0.8 * (KINDS == 1)
    columns = [Column.of_numbers(SIZES, scale=2.0), Column.of_kinds(list(KINDS), common=0.5)]
    physics = HeldUp(LOG_TOKENS - log_speed)
    speed = SpeedSurrogate(columns, log_tokens=LOG_TOKENS, physics=physics).posterior(
        observed(7, 23)
    )
    gains, _ = expected_improvement(speed, np.exp([TRUTH.max()]))
    # At best they are 2.2 times as slow as the fastest, over 1.5.
    assert gains[KINDS == 1].max() < 0.01
    held_up = (KINDS == 1) & (SIZES == 7)
    assert speed.deviation[held_up] > 2 * speed.deviation[(KINDS == 0) & (SIZES == 6)]


def test_uncertainty_falls_where_something_was_measured() -> None:
    before = a_surrogate(TRUTH).posterior(observed())
    assert np.abs(before.mean - TRUTH).max() < 0.1, "as forecast"
    after = a_surrogate(TRUTH).posterior(observed(3))
    assert after.deviation[3] < 0.3 * before.deviation[3]
    assert after.deviation[3] < after.deviation[20] < before.deviation[20]


# Memory

BUDGET = float(np.log(20.0))
PREDICTED = np.log([10.0, 15.0, 19.0, 19.9, 20.5, 24.0, 30.0])


def chances(*seen: tuple[int, float, bool]) -> Array:
    """The chances to fit 20, given rows, logarithms of bytes, and whether each is but a bound."""
    peaks = Peaks(PREDICTED, np.full(7, 0.015), np.zeros(7, dtype=np.intp))
    return chance_to_fit(peaks, seen, log_budget=BUDGET)


def test_what_is_predicted_well_below_the_budget_fits_and_well_above_does_not() -> None:
    chance = chances()
    assert chance[0] > 0.95
    assert chance[6] < 0.1
    assert (np.diff(chance) < 0).all()
    # What is not predicted is left to the device.
    peaks = Peaks(np.array([np.nan, 3.0]), np.full(2, 0.015), np.zeros(2, dtype=np.intp))
    assert chance_to_fit(peaks, [], log_budget=BUDGET)[0] == 1.0


def test_a_prediction_that_is_too_high_loosens_once_a_peak_is_measured() -> None:
    chance = chances((0, float(PREDICTED[0] - np.log(1.3)), False))
    assert chance[5] > 0.9
    assert chance[6] < 0.1


def test_a_prediction_that_is_too_low_tightens_once_something_ran_out() -> None:
    assert chances((1, BUDGET, True))[2] < 0.3
    assert chances((1, float(PREDICTED[1] + np.log(1.4)), False))[2] < 0.02


def test_compiled_layers_say_nothing_of_eager_ones() -> None:
    kinds = np.array([0, 1], dtype=np.intp)
    peaks = Peaks(np.log([19.0, 19.0]), np.full(2, 0.015), kinds)
    chance = chance_to_fit(peaks, [(1, BUDGET, True)], log_budget=BUDGET)
    assert chance[0] > 0.9
    assert chance[1] < 0.5
