"""Runs that measure a winner again: their pooled speed, its interval, the order they make."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scipy.special import stdtrit

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.confirmations import T_975, Confirmations, Ratio, Spread, logarithms, pool, scaled
from storage.ranking import Ranking, measured_of, rank
from storage.records import (
    Crashed,
    Measured,
    Measurement,
    Outcome,
    OutOfMemory,
    PrunedSlow,
    SoakReport,
    TrialRecord,
)
from tests.storage.builders import a_definition, a_measurement, fits

SOAKED = SoakReport(
    steps=50,
    seconds=15.0,
    evaluation_loss=2.0,
    evaluation_seconds=0.5,
    checkpoint_bytes=1000,
    checkpoint_seconds=0.1,
)


def trial(number: int, speed: float, **changes: Any) -> TrialRecord:
    config = TrialConfig(micro_batch_size=2**number)
    outcome = fits(speed, **changes)
    return TrialRecord(number=number, config=config, outcome=outcome, is_baseline=number == 0)


class Runs:
    """Collects what measures trials again."""

    def __init__(self) -> None:
        self.records: list[TrialRecord] = []

    def add(self, of: TrialRecord, outcome: Outcome, *, purpose: str = "confirm", **changes: Any):  # type: ignore[no-untyped-def]
        ran = sum(r.config == of.config for r in self.records)
        values = {
            # In turns: the first runs of all come before the second ones.
            "number": 1000 * (1 + ran) + len(self.records),
            "config": of.config,
            "outcome": outcome,
            "purpose": purpose,
            "series": 1,
            "confirms": of.number,
            "device_seconds": 3.0,
        }
        self.records.append(TrialRecord.model_validate(values | changes))
        return self

    def runs(self, of: TrialRecord, *speeds: float, **changes: Any):  # type: ignore[no-untyped-def]
        series = changes.pop("series", 1)
        for speed in speeds:
            self.add(of, fits(speed, **changes), series=series)
        return self

    def soak(self, of: TrialRecord, outcome: Outcome | None = None, **changes: Any):  # type: ignore[no-untyped-def]
        default = Measured(measurement=a_measurement(soak=SOAKED, **changes))
        return self.add(of, outcome or default, purpose="soak")


def ranked(*records: TrialRecord, runs: Runs, **space: Any) -> Ranking:
    return rank(records, a_definition(**space), runs.records)


BASE, SLOW, FAST = trial(0, 100.0), trial(1, 200.0, spread=0.01), trial(2, 210.0, spread=0.01)


def test_students_t_is_the_tables() -> None:
    assert [round(float(stdtrit(n, 0.975)), 3) for n in range(1, 11)] == list(T_975)


def test_the_speed_of_several_runs_is_their_middle_and_what_made_it_the_winner_does_not_count() -> (
    None
):
    runs = Runs().runs(FAST, 190.0, 200.0, peak=11 * GIB)
    winner = ranked(SLOW, FAST, runs=runs).records[1]
    measured = measured_of(winner)
    assert measured.tokens_per_second == pytest.approx(math.sqrt(190.0 * 200.0))
    assert measured.step_seconds == pytest.approx(4096 / measured.tokens_per_second)
    assert measured.steps_measured == 12
    assert measured.peak_allocated_bytes == 11 * GIB


def test_one_run_confirms_nothing() -> None:
    ranking = ranked(FAST, runs=Runs().runs(FAST, 190.0))
    assert measured_of(ranking.records[0]).tokens_per_second == 210.0
    assert not ranking.is_measured_again(ranking.records[0])


def test_the_interval_covers_the_truth_between_runs_95_times_in_100() -> None:
    """Runs differ by 3 %, the steps within one by a tenth of that."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        groups = [_drawn(rng, runs=2) for _ in range(3)]
        spread = Spread.of(map(logarithms, groups))
        low, high = _ends(pool(groups[0], spread=spread))
        covered += low <= 4.096 <= high
    assert covered / 400 >= 0.94


def _drawn(rng: np.random.Generator, *, runs: int) -> list[Measurement]:
    return [
        a_measurement(1000.0 * math.exp(rng.normal(0, 0.03)), spread=0.003) for _ in range(runs)
    ]


def _ends(measured: Measurement) -> tuple[float, float]:
    assert measured.step_seconds_ci95 is not None
    return measured.step_seconds_ci95


def test_an_interval_of_one_run_would_have_missed_it_most_of_the_time() -> None:
    rng = np.random.default_rng(0)
    alone = [_ends(_drawn(rng, runs=1)[0]) for _ in range(400)]
    assert sum(low <= 4.096 <= high for low, high in alone) / 400 < 0.2


def test_what_spreads_more_than_the_others_keeps_its_own_spread() -> None:
    steady = [a_measurement(1000.0), a_measurement(1001.0)]
    wild = [a_measurement(900.0), a_measurement(1100.0)]
    spread = Spread.of(map(logarithms, [steady, steady, steady, wild]))
    steady_low, steady_high = _ends(pool(steady, spread=spread))
    wild_low, wild_high = _ends(pool(wild, spread=spread))
    assert wild_high / wild_low > (steady_high / steady_low) ** 1.5


def test_runs_that_agree_are_no_surer_than_their_own_intervals() -> None:
    same = [a_measurement(1000.0, spread=0.04)] * 2
    low, high = _ends(pool(same, spread=Spread.of(map(logarithms, [same, same]))))
    assert math.log(high / low) / 2 == pytest.approx(-math.log(0.96) / math.sqrt(2), rel=1e-6)


def test_runs_that_disagree_are_noisy_and_uneven_steps_alone_are_not() -> None:
    even = pool([a_measurement(1000.0, flags=("noisy", "emulated"))] * 2, spread=Spread(0.001, 4))
    assert even.flags == ("emulated",)
    assert not even.is_noisy
    busy = [a_measurement(1000.0), a_measurement(300.0)]
    assert pool(busy, spread=Spread.of([logarithms(busy)])).is_noisy


def test_energy_is_the_mean_of_the_runs_that_told_it() -> None:
    runs = [a_measurement(joules_per_token=0.04), a_measurement(joules_per_token=0.05)]
    assert pool(runs, spread=Spread(0.0, 1)).joules_per_token == pytest.approx(0.045)
    assert pool([a_measurement()] * 2, spread=Spread(0.0, 1)).joules_per_token is None


def test_what_was_spent_on_the_runs_adds_up() -> None:
    spent = {"setup_seconds": 2.0, "measured_seconds": 3.0, "training_seconds": 4.0}
    pooled = pool([a_measurement(**spent)] * 2, spread=Spread(0.0, 1))
    assert (pooled.setup_seconds, pooled.measured_seconds, pooled.training_seconds) == (4, 6, 8)
    assert pooled.compile_seconds is None
    compiled = [a_measurement(compile_seconds=seconds) for seconds in (5.0, 0.5)]
    assert pool(compiled, spread=Spread(0.0, 1)).compile_seconds == 5.5


def test_confirmed_is_measured_again_and_soaked() -> None:
    again = Runs().runs(FAST, 209.0, 210.0)
    assert not ranked(FAST, runs=again).is_confirmed
    assert ranked(FAST, runs=again, confirm={"soak_seconds": 0}).is_confirmed
    soaked = ranked(FAST, runs=again.soak(FAST))
    assert soaked.is_confirmed
    assert soaked.runs == 2
    assert soaked.soak is not None


NOISE = 0.02
CONFIGS = [TrialConfig(micro_batch_size=n) for n in range(1, 6)]
"""The first is twice as fast as the second."""


def in_turns(
    rng: np.random.Generator, *, configs: int, rounds: int, drift: float
) -> Iterator[TrialRecord]:
    """Runs of several configurations, whose speed drifts from round to round."""
    (run,) = Runs().runs(BASE, 1.0).records
    measured = measured_of(run)
    for n in range(rounds):
        drifted = rng.normal(0, drift)
        for config in CONFIGS[:configs]:
            faster = math.exp(drifted + rng.normal(0, NOISE)) * (1 + (config is CONFIGS[0]))
            outcome = Measured.model_construct(measurement=scaled(measured, faster))
            yield run.model_copy(update={"number": n, "config": config, "outcome": outcome})


def drawn_ratios(*, draws: int, **runs: Any) -> list[tuple[Ratio, float]]:
    """Ratios of the first over the second, each with the width of what their own intervals give."""
    rng, found = np.random.default_rng(0), []
    for _ in range(draws):
        known = Confirmations(tuple(in_turns(rng, **runs)))
        ratio = known.ratio(CONFIGS[0], CONFIGS[1])
        ends = [_ends(pooled) for c in CONFIGS[:2] if (pooled := known.pooled(c)) is not None]
        assert ratio is not None
        found.append((ratio, math.hypot(*(math.log(high / low) for low, high in ends))))
    return found


def width(ratio: Ratio) -> float:
    assert ratio.low is not None
    assert ratio.high is not None
    return math.log(ratio.high / ratio.low)


@pytest.mark.parametrize(
    ("configs", "rounds", "drift"),
    [
        *((2, 2, 0.0), (2, 2, 3 * NOISE), (2, 3, 3 * NOISE), (2, 4, NOISE)),
        *((3, 2, NOISE), (3, 3, 0.0), (4, 2, 3 * NOISE), (5, 2, 0.0), (5, 4, 3 * NOISE)),
    ],
)
def test_the_interval_of_a_ratio_covers_the_truth_95_times_in_100(
    configs: int, rounds: int, drift: float
) -> None:
    found = drawn_ratios(draws=300, configs=configs, rounds=rounds, drift=drift)
    covered = sum(ratio.low <= 2.0 <= ratio.high for ratio, _ in found)  # type: ignore[operator]
    assert covered / len(found) >= 0.93


@pytest.mark.parametrize(("configs", "rounds"), [(2, 3), (3, 2), (5, 4)])
def test_rounds_that_drift_leave_a_ratio_narrower_than_the_intervals_of_both(
    configs: int, rounds: int
) -> None:
    found = drawn_ratios(draws=100, configs=configs, rounds=rounds, drift=3 * NOISE)
    assert np.median([width(ratio) for ratio, _ in found]) < 0.8 * np.median([w for _, w in found])


def test_two_rounds_on_a_quiet_card_tell_a_gain_closely() -> None:
    found = [r for r, _ in drawn_ratios(draws=100, configs=2, rounds=2, drift=0.0)]
    assert np.quantile([width(ratio) for ratio in found], 0.9) < 16 * NOISE


def test_what_joins_later_is_paired_with_what_ran_beside_it() -> None:
    """The GPU is half as fast from the third round on."""
    runs = Runs().runs(FAST, 200.0, 202.0, 101.0, 100.0).runs(BASE, 100.0, 100.0)
    third, fourth = (r.number for r in runs.records[2:4])
    for number, speed in ((third, 80.0), (fourth, 81.0)):
        runs.add(SLOW, fits(speed), number=number + 500)
    known = Confirmations(tuple(sorted(runs.records, key=lambda r: r.number)))
    beside, before = known.ratio(FAST.config, SLOW.config), known.ratio(BASE.config, SLOW.config)
    assert beside is not None
    assert beside.value == pytest.approx(100.5 / 80.5, rel=1e-3)
    assert before is None
    # They never ran in one round: all that drifted is in the interval of their speeds.
    ranking = ranked(BASE, SLOW, FAST, runs=runs)
    apart = ranking.ratio(ranking.records[0], ranking.records[1])
    assert apart.is_open


def test_noise_takes_no_gain_away_that_is_sure() -> None:
    runs = Runs().runs(FAST, 210.0, 130.0, 300.0).runs(BASE, 20.0, 11.0, 26.0).soak(FAST)
    ranking = ranked(BASE, FAST, runs=runs)
    assert measured_of(ranking.ranked[0]).is_noisy
    assert ranking.is_confirmed
    ratio = ranking.gain.ratio
    assert ratio is not None
    assert ratio.low is not None
    assert 5.0 < ratio.low < 10.0 < ratio.value


def test_what_may_be_as_fast_as_the_baseline_has_no_gain() -> None:
    runs = Runs().runs(FAST, 210.0, 20.0, 300.0).runs(BASE, 100.0, 90.0, 8.0).soak(FAST)
    ranking = ranked(BASE, FAST, runs=runs)
    assert ranking.is_confirmed
    assert ranking.tied == (BASE.number,)
    assert (ranking.gain.ratio, ranking.gain.reason) == (None, "not_shown")


def test_the_fastest_is_recommended_and_what_is_as_fast_is_a_tie() -> None:
    runs = Runs().runs(FAST, 205.0, 206.0, peak=19 * GIB).runs(SLOW, 204.0, 206.5, peak=11 * GIB)
    ranking = ranked(BASE, SLOW, FAST, runs=runs)
    assert ranking.winner is not None
    assert ranking.winner.number == FAST.number
    assert ranking.tied == (SLOW.number,)


def test_a_faster_one_that_can_be_told_apart_is_recommended_whatever_it_needs() -> None:
    runs = Runs().runs(FAST, 230.0, 231.0, peak=19 * GIB).runs(SLOW, 204.0, 205.0, peak=11 * GIB)
    ranking = ranked(BASE, SLOW, FAST, runs=runs)
    assert ranking.winner is not None
    assert ranking.winner.number == FAST.number
    assert ranking.tied == ()


def test_an_allocator_that_gave_memory_back_in_the_soak_counts_against_a_tie() -> None:
    runs = Runs().runs(FAST, 205.0, 206.0).runs(SLOW, 204.0, 206.5)
    ranking = ranked(BASE, SLOW, FAST, runs=runs.soak(FAST, allocator_retries=3))
    assert [record.number for record in ranking.ranked] == [SLOW.number, FAST.number, BASE.number]
    assert ranking.tied == (FAST.number,)
    fast = measured_of(ranking.ranked[1])
    assert fast.allocator_retries == 3
    assert "allocator_retries" in fast.flags


def test_what_runs_out_in_its_soak_does_not_fit_and_loses_to_the_next() -> None:
    runs = Runs().runs(FAST, 230.0, 231.0).runs(SLOW, 204.0, 205.0)
    runs.soak(FAST, OutOfMemory(stage="forward", detail="in an evaluation pass: full"))
    runs.runs(FAST, 230.0)
    ranking = ranked(BASE, SLOW, FAST, runs=runs)
    assert ranking.winner is not None
    assert ranking.winner.number == SLOW.number
    assert [record.number for record in ranking.ranked] == [SLOW.number, BASE.number]
    assert list(ranking.fallen) == [FAST.number]


def test_a_crash_of_the_machine_takes_nothing_away() -> None:
    runs = Runs().runs(FAST, 209.0, 210.0).soak(FAST, Crashed(phase="measure"))
    ranking = ranked(FAST, runs=runs)
    assert ranking.winner is not None
    assert not ranking.fallen
    assert not ranking.is_confirmed


def test_on_a_machine_that_got_slower_all_speeds_are_of_the_confirmation() -> None:
    third, slow = trial(3, 205.0, spread=0.01), trial(4, 413.0)
    stopped = slow.model_copy(update={"outcome": PrunedSlow(measurement=measured_of(slow))})
    runs = Runs().runs(FAST, 104.0, 106.0).runs(SLOW, 99.0, 100.0)
    ranking = ranked(BASE, SLOW, FAST, third, stopped, runs=runs)
    assert [record.number for record in ranking.ranked] == [2, 1, 3, 0]
    speeds = {r.number: measured_of(r).tokens_per_second for r in ranking.records}
    expected = {0: 50.0, 1: 99.5, 2: 105.0, 3: 102.5, 4: 206.5}
    assert speeds == pytest.approx(expected, rel=1e-3)
    # It was never measured beside the winner, and the search told them apart.
    assert ranking.tied == ()
    assert ranking.close == ()


def test_the_scale_is_that_of_the_fastest_of_the_space_and_not_of_a_faster_baseline() -> None:
    outside = trial(0, 300.0).model_copy(update={"config": TrialConfig(micro_batch_size=64)})
    other = trial(1, 190.0)
    runs = Runs().runs(FAST, 105.0, 105.0).runs(outside, 300.0, 300.0)
    ranking = ranked(outside, other, FAST, runs=runs)
    assert ranking.scale == pytest.approx(0.5)
    assert [record.number for record in ranking.ranked] == [2, 1]


def test_what_a_further_search_finds_faster_wins_until_it_is_measured_again() -> None:
    faster = trial(3, 220.0)
    runs = Runs().runs(FAST, 205.0, 206.0).soak(FAST)
    ranking = ranked(BASE, FAST, faster, runs=runs)
    assert ranking.winner is not None
    assert ranking.winner.number == faster.number
    assert not ranking.is_confirmed


def test_speeds_are_those_of_the_newest_series_in_which_anything_ran_twice() -> None:
    runs = Runs().runs(FAST, 205.0, 206.0).runs(FAST, 150.0, series=2)
    assert Confirmations(tuple(runs.records)).series == 1
    runs.runs(FAST, 152.0, series=2)
    known = Confirmations(tuple(runs.records))
    assert known.series == known.newest == 2
    pooled = known.pooled(FAST.config)
    assert pooled is not None
    assert pooled.tokens_per_second == pytest.approx(math.sqrt(150.0 * 152.0))


def test_running_out_in_an_earlier_series_still_counts() -> None:
    runs = Runs().soak(FAST, OutOfMemory(stage="backward")).runs(SLOW, 1.0, 1.0, series=2)
    assert ranked(SLOW, FAST, runs=runs).fallen.keys() == {FAST.number}
