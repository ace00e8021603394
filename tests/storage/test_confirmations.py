"""Runs that measure a winner again: their pooled speed, its interval, the order they make."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.special import stdtrit

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.confirmations import T_975, Confirmations, Spread, pool
from storage.gain import compare
from storage.objectives import measured_of
from storage.ranking import Ranking, rank
from storage.records import (
    Crashed,
    Measured,
    Measurement,
    Outcome,
    OutOfMemory,
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
        values = {
            "number": 100 + len(self.records),
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
        spread = Spread.of(groups)
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
    spread = Spread.of([steady, steady, steady, wild])
    steady_low, steady_high = _ends(pool(steady, spread=spread))
    wild_low, wild_high = _ends(pool(wild, spread=spread))
    assert wild_high / wild_low > (steady_high / steady_low) ** 1.5


def test_runs_that_agree_are_no_surer_than_their_own_intervals() -> None:
    same = [a_measurement(1000.0, spread=0.04)] * 2
    low, high = _ends(pool(same, spread=Spread.of([same, same])))
    assert math.log(high / low) / 2 == pytest.approx(-math.log(0.96) / math.sqrt(2), rel=1e-6)


def test_runs_that_disagree_are_noisy_and_uneven_steps_alone_are_not() -> None:
    even = pool([a_measurement(1000.0, flags=("noisy", "emulated"))] * 2, spread=Spread(0.001, 4))
    assert even.flags == ("emulated",)
    assert not even.is_noisy
    busy = [a_measurement(1000.0), a_measurement(300.0)]
    assert pool(busy, spread=Spread.of([busy])).is_noisy


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


def test_a_gain_is_stated_once_both_were_confirmed() -> None:
    def reason(runs: Runs) -> str | None:
        found = compare(ranked(BASE, FAST, runs=runs))
        assert found is not None
        assert (found.gain is None) == (found.reason is not None)
        return found.reason

    runs = Runs()
    assert reason(runs) == "not_confirmed"
    assert reason(runs.runs(BASE, 100.0, 101.0)) == "not_confirmed"
    assert reason(runs.runs(FAST, 209.0, 210.0)) == "not_confirmed"
    assert reason(runs.soak(FAST)) is None
    only_winner = Runs().runs(FAST, 209.0, 210.0).soak(FAST)
    assert reason(only_winner) == "baseline_not_confirmed"


def test_on_a_machine_too_busy_to_tell_there_is_no_gain_and_no_winner() -> None:
    runs = Runs().runs(FAST, 210.0, 20.0, 300.0).runs(BASE, 100.0, 90.0, 8.0).soak(FAST)
    ranking = ranked(BASE, FAST, runs=runs)
    assert ranking.is_unclear
    assert not ranking.is_confirmed
    found = compare(ranking)
    assert found is not None
    assert (found.gain, found.reason) == (None, "noisy_both")


def test_of_what_cannot_be_told_apart_the_one_with_the_most_memory_left_is_recommended() -> None:
    runs = Runs().runs(FAST, 205.0, 206.0, peak=19 * GIB).runs(SLOW, 204.0, 205.5, peak=11 * GIB)
    ranking = ranked(BASE, SLOW, FAST, runs=runs)
    assert ranking.winner is not None
    assert ranking.winner.number == SLOW.number
    assert ranking.tied == (FAST.number,)


def test_what_only_noise_keeps_from_being_told_apart_is_no_tie_to_choose_from_by_memory() -> None:
    runs = Runs().runs(FAST, 150.0, 260.0, peak=19 * GIB).runs(SLOW, 130.0, 200.0, peak=5 * GIB)
    ranking = ranked(BASE, SLOW, FAST, runs=runs)
    assert ranking.is_unclear
    assert ranking.winner is not None
    assert ranking.winner.number == FAST.number


def test_a_faster_one_that_can_be_told_apart_is_recommended_whatever_it_needs() -> None:
    runs = Runs().runs(FAST, 230.0, 231.0, peak=19 * GIB).runs(SLOW, 204.0, 205.0, peak=11 * GIB)
    ranking = ranked(BASE, SLOW, FAST, runs=runs)
    assert ranking.winner is not None
    assert ranking.winner.number == FAST.number
    assert ranking.tied == ()


def test_an_allocator_that_gave_memory_back_in_the_soak_counts_against_a_tie() -> None:
    runs = Runs().runs(FAST, 205.0, 206.0, peak=19 * GIB).runs(SLOW, 204.0, 205.5, peak=11 * GIB)
    ranking = ranked(BASE, SLOW, FAST, runs=runs.soak(SLOW, allocator_retries=3))
    assert ranking.winner is not None
    assert ranking.winner.number == FAST.number
    slow = next(r for r in ranking.records if r.number == SLOW.number)
    assert measured_of(slow).allocator_retries == 3
    assert "allocator_retries" in measured_of(slow).flags


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


def test_a_machine_that_drifted_since_the_search_does_not_put_others_before_the_confirmed() -> None:
    third = trial(3, 195.0, spread=0.01)
    runs = Runs().runs(FAST, 180.0, 181.0).runs(SLOW, 170.0, 171.0)
    ranking = ranked(BASE, SLOW, FAST, third, runs=runs)
    assert [record.number for record in ranking.ranked] == [2, 1, 3, 0]
    # It was never told apart from the winner in one process.
    assert third.number in ranking.tied


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
