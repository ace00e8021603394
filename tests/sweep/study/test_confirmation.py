"""After a search its winner is measured again, beside its rivals, and soaked."""

from __future__ import annotations

import itertools
import json
import math
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from optuna.samplers import TPESampler

from search_spaces.config import TrialConfig
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
from storage.study import OpenStudy
from sweep.predict.forecast import Forecaster
from sweep.running.replay import ReplayRunner
from sweep.running.runner import Observer, keep_going
from sweep.running.wire import Progress, TrialRequest
from sweep.sampling.samplers import make_sampler
from sweep.study.driver import Driver
from sweep.study.events import ConfirmationStarted, Event, StopReason, TrialFinished
from sweep.study.tuner import tune
from tests.sweep.simulated_device import (
    BUDGET,
    MODEL,
    StopsWhen,
    a_measurement,
    a_record,
    a_study,
    train,
)

CONFIRM = {"seconds": 60.0, "repeats": 4, "soak_seconds": 15.0}
BATCHES = {"micro_batch_size": {"choices": [4, 8, 10]}}
SPACE: dict[str, Any] = {
    "dimensions": BATCHES,
    "fixed": {"kernels": "liger", "lora_rank": 16, "target_modules": "attention"},
    "trials": 10,
    "confirm": CONFIRM,
}
BASELINE = TrialConfig(kernels="liger", micro_batch_size=8)


class Clock:
    """Gains a second each time it is read."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def a_forecaster() -> Forecaster:
    return Forecaster(model=MODEL, budget_bytes=BUDGET, violation=lambda _: None)


def soaking(config: TrialConfig, **changes: Any) -> Outcome:
    report = SoakReport(
        steps=60,
        seconds=16.0,
        evaluation_loss=2.0,
        evaluation_seconds=0.5,
        checkpoint_bytes=1000,
        checkpoint_seconds=0.2,
    )
    return Measured(measurement=a_measurement(config, soak=report, **changes))


def soaked(runner: ReplayRunner) -> list[TrialConfig]:
    return [request.config for request in runner.requests if request.is_soak]


def a_runner(
    device: Callable[[TrialConfig], Outcome] = train,
    soak: Callable[[TrialConfig], Outcome] = soaking,
) -> ReplayRunner:
    return ReplayRunner(otherwise=device, soaking=soak)


def opened(home: Path, **space: Any) -> OpenStudy:
    """Open the study, under a sampler that asks for each configuration once."""
    study = a_study(home, **space)
    study.study.sampler = make_sampler("grid", study.definition.space, seed=0)
    return study


def drive(study: OpenStudy, runner: ReplayRunner, **changes: Any) -> StopReason:
    return tune(Driver(study, runner=runner, forecaster=a_forecaster(), clock=Clock(), **changes))


def ranking_of(study: OpenStudy) -> Ranking:
    return rank(study.records(), study.definition, study.confirmations())


def at_speed(
    config: TrialConfig, speed: float, *, spread: float = 0.005, **changes: Any
) -> Measured:
    step = config.tokens_per_step / speed
    return Measured(
        measurement=a_measurement(
            config,
            tokens_per_second=speed,
            step_seconds=step,
            step_seconds_ci95=(step * (1 - spread), step * (1 + spread)),
            **changes,
        )
    )


def by_batch(
    speeds: dict[int, Iterator[float]], **changes: Any
) -> Callable[[TrialConfig], Outcome]:
    """A GPU whose speed is a function of the micro-batch and of how often it was asked."""
    return lambda config: at_speed(config, next(speeds[config.micro_batch_size]), **changes)


def batches(records: tuple[TrialRecord, ...], purpose: str = "confirm") -> list[int]:
    return [r.config.micro_batch_size for r in records if r.purpose == purpose]


def test_the_winner_and_the_baseline_are_run_again_in_turns_and_the_winner_is_soaked(
    tmp_path: Path,
) -> None:
    runner = a_runner()
    with opened(tmp_path, **SPACE) as study:
        assert drive(study, runner) is StopReason.EXHAUSTED
        assert batches(study.confirmations()) == [10, 8, 10, 8]
        assert [config.micro_batch_size for config in soaked(runner)] == [10]
        ranking = ranking_of(study)
    assert runner.renewals == 1
    assert ranking.is_confirmed
    assert ranking.runs == 2
    gain = ranking.gain
    assert gain.ratio is not None


def test_it_is_no_trial_of_the_search(tmp_path: Path) -> None:
    with opened(tmp_path, **SPACE) as study:
        drive(study, a_runner())
        assert len(study.records()) == study.ledger.trials_spent() == 3
        numbers = [record.number for record in (*study.records(), *study.confirmations())]
        seen = study.study.get_trials(deepcopy=False)
    assert numbers == list(range(8))
    # What failed is no sampler's business, and has no parameters to learn from.
    assert [trial.state.name == "FAIL" for trial in seen] == [False] * 3 + [True] * 5
    assert all(not trial.params for trial in seen[3:])


def test_a_search_that_goes_on_asks_what_it_would_have_asked_anyway(tmp_path: Path) -> None:
    def asked(home: Path, **changes: Any) -> list[TrialConfig]:
        for trials in (6, 12):
            with a_study(home, **({"trials": trials} | changes)) as study:
                study.study.sampler = TPESampler(seed=trials, n_startup_trials=4)
                drive(study, a_runner())
                configs = [record.config for record in study.records()]
        return configs

    with_it = asked(tmp_path / "confirmed", confirm=CONFIRM)
    assert with_it == asked(tmp_path / "not", confirm=False)
    assert len(with_it) == 12


def test_switched_off_nothing_is_run_again(tmp_path: Path) -> None:
    for off in (False, 0):
        runner = a_runner()
        with opened(tmp_path, **(SPACE | {"confirm": off})) as study:
            drive(study, runner)
            assert study.confirmations() == ()
            assert not ranking_of(study).is_confirmed
        assert runner.renewals == 0


def test_without_a_soak_the_repeats_confirm(tmp_path: Path) -> None:
    runner = a_runner()
    with opened(tmp_path, **(SPACE | {"confirm": CONFIRM | {"soak_seconds": 0}})) as study:
        drive(study, runner)
        assert ranking_of(study).is_confirmed
    assert soaked(runner) == []


def test_an_interrupted_study_is_not_confirmed_and_one_resumed_later_is(tmp_path: Path) -> None:
    runner = a_runner()
    with opened(tmp_path, **SPACE) as study:
        stop = drive(study, runner, interruption=StopsWhen(lambda: len(runner.ran) >= 2))
        assert stop is StopReason.INTERRUPTED
        assert study.confirmations() == ()
    with opened(tmp_path, **SPACE) as study:
        drive(study, runner)
        assert ranking_of(study).is_confirmed


def test_interrupted_between_two_runs_the_rest_is_run_next_time(tmp_path: Path) -> None:
    runner = a_runner()
    with opened(tmp_path, **SPACE) as study:
        stop = drive(study, runner, interruption=StopsWhen(lambda: len(runner.ran) >= 5))
        assert stop is StopReason.INTERRUPTED
        assert batches(study.confirmations()) == [10, 8]
    with opened(tmp_path, **SPACE) as study:
        assert drive(study, runner) is StopReason.EXHAUSTED
        assert batches(study.confirmations()) == [10, 8, 10, 8]
        assert len(runner.ran) == 3 + 4 + 1
        drive(study, runner)
    assert len(runner.ran) == 3 + 4 + 1


class Killed(BaseException):
    """The driver is gone from one moment to the next."""


@pytest.mark.parametrize("moment", range(1, 6))
def test_killed_in_any_run_it_goes_on_and_repeats_nothing(tmp_path: Path, moment: int) -> None:
    runner = a_runner()
    left = [3 + moment]

    def die(_: Progress | None = None) -> None:
        left[0] -= 1
        if not left[0]:
            raise Killed

    def dying(config: TrialConfig) -> Outcome:
        die()
        return train(config)

    def dying_soak(config: TrialConfig) -> Outcome:
        die()
        return soaking(config)

    runner = a_runner(dying, dying_soak)
    with opened(tmp_path, **SPACE) as study, pytest.raises(Killed):
        drive(study, runner)
    with opened(tmp_path, **SPACE) as study:
        drive(study, runner)
        measured = [r for r in study.confirmations() if isinstance(r.outcome, Measured)]
        lost = [r for r in study.confirmations() if not isinstance(r.outcome, Measured)]
        assert batches(tuple(measured)) == [10, 8, 10, 8]
        assert batches(tuple(measured), "soak") == [10]
        assert [r.verdict for r in lost] == ["lost"]
        assert lost[0].series == 1
        assert len(study.records()) == 3
        assert ranking_of(study).is_confirmed


def _without_what_is_new(stored: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(stored)
    for part in (values, values.get("space", {}), values.get("outcome", {}).get("measurement", {})):
        for key in ("purpose", "series", "confirms", "joules_per_token", "soak", "confirm"):
            part.pop(key, None)
    return values


def test_a_study_of_before_is_confirmed_when_it_is_resumed(tmp_path: Path) -> None:
    """What an earlier version stored says nothing of purposes, nor its space of confirming."""
    with opened(tmp_path, **(SPACE | {"confirm": False})) as study:
        drive(study, a_runner())
    database = sqlite3.connect(tmp_path / "sweep.db")
    for table, key in (("trial", "record"), ("study", "definition")):
        query = f"SELECT rowid, value_json FROM {table}_user_attributes WHERE key = ?"
        for row, stored in database.execute(query, (key,)).fetchall():
            update = f"UPDATE {table}_user_attributes SET value_json = ? WHERE rowid = ?"
            database.execute(update, (json.dumps(_without_what_is_new(stored)), row))
    database.commit()
    database.close()
    runner = a_runner()
    with opened(tmp_path, **SPACE) as study:
        assert len(study.records()) == 3
        drive(study, runner)
        assert ranking_of(study).is_confirmed
    assert len(runner.ran) == 5


def test_ties_are_run_again_until_they_separate(tmp_path: Path) -> None:
    """10 is 3 % faster than 8 and looked as fast in the search; three runs of each tell."""
    card = by_batch(
        {
            4: itertools.repeat(5_000.0),
            8: iter((10_300.0, 9_900.0, 10_100.0, 9_950.0)),
            10: iter((10_310.0, 10_250.0, 10_500.0, 10_350.0)),
        },
        spread=0.02,
    )
    with opened(tmp_path, **(SPACE | {"baseline": {"micro_batch_size": 4}})) as study:
        drive(study, a_runner(card))
        ranking = ranking_of(study)
        order = batches(study.confirmations())
    assert ranking.is_confirmed
    assert ranking.winner is not None
    assert ranking.winner.config.micro_batch_size == 10
    assert ranking.tied == ()
    # What the gain is over goes second: cut short, that is known first.
    assert order[:3] == [10, 4, 8]
    assert Counter(order) == {10: 3, 8: 3, 4: 2}


def test_ties_that_remain_are_ties_and_the_smaller_one_is_recommended(tmp_path: Path) -> None:
    card = by_batch(
        {size: itertools.repeat(10_000.0) for size in (4, 8, 10)},
        spread=0.01,
    )
    runner = a_runner(card)
    with opened(tmp_path, **SPACE) as study:
        drive(study, runner)
        ranking = ranking_of(study)
        counted = Counter(batches(study.confirmations()))
    assert ranking.winner is not None
    assert ranking.winner.config.micro_batch_size == 4
    assert len(ranking.tied) == 2
    assert counted == {4: 4, 8: 4, 10: 4}
    assert [config.micro_batch_size for config in soaked(runner)] == [4]


def test_past_its_budget_only_the_winner_and_the_baseline_are_run(tmp_path: Path) -> None:
    card = by_batch({size: itertools.repeat(10_000.0) for size in (4, 8, 10)}, spread=0.01)
    with opened(tmp_path, **(SPACE | {"confirm": CONFIRM | {"seconds": 2.0}})) as study:
        drive(study, a_runner(card))
        counted = Counter(batches(study.confirmations()))
        assert ranking_of(study).is_confirmed
    # All were as fast in the search, and the first to be measured again was the first by number.
    assert counted[8] == 2
    assert sum(counted.values()) <= 6


def test_what_was_begun_before_the_budget_was_spent_is_run_often_enough_to_count(
    tmp_path: Path,
) -> None:
    """The baseline's runs are needed and spend nothing of it; a single run is for nothing."""
    card = by_batch(
        {size: itertools.repeat(10_000.0) for size in (4, 6, 8)} | {2: itertools.repeat(100.0)},
        spread=0.01,
    )
    run_seconds = 1.0 + 12 * 4 * 512 / 10_000.0
    space = SPACE | {
        "dimensions": {"micro_batch_size": {"choices": [4, 6, 8]}},
        "baseline": {"micro_batch_size": 2},
        "confirm": CONFIRM | {"seconds": 1.1 * run_seconds, "soak_seconds": 0.0},
    }
    with opened(tmp_path, **space) as study:
        drive(study, a_runner(card))
        order = batches(study.confirmations())
        tied = ranking_of(study).tied
    assert order == [4, 2, 6, 4, 2, 6]
    assert tied != ()


def test_cut_short_after_two_rounds_of_two_the_gain_is_known_or_next(tmp_path: Path) -> None:
    """Six are to be measured again; what the winner's gain is over is the second of them."""
    dimensions = {"lora_rank": {"choices": [8, 16]}, "micro_batch_size": {"choices": [6, 8, 10]}}
    fixed = {"kernels": "liger", "target_modules": "attention"}
    space = SPACE | {"dimensions": dimensions, "fixed": fixed}
    space |= {"baseline": {"lora_rank": 16, "micro_batch_size": 4}}

    def card(config: TrialConfig) -> Outcome:
        return at_speed(config, 10_000.0 - 2_000.0 * (config.lora_rank == 16), spread=0.01)

    with opened(tmp_path, **space) as study:
        drive(study, a_runner(card))
        runs = [r for r in study.confirmations() if r.purpose == "confirm"]
        ranking = rank(study.records(), study.definition, runs[:8])
    asked = [(r.config.lora_rank, r.config.micro_batch_size) for r in runs[:8]]
    assert asked == [(8, 6), (8, 4), (8, 8), (8, 10), (16, 6), (16, 4), (8, 6), (8, 4)]
    assert ranking.winner is not None
    assert ranking.reference_for(ranking.winner.config) is not None


def test_a_card_that_slows_down_slows_down_for_all_and_the_better_still_wins(
    tmp_path: Path,
) -> None:
    """It lost 20 % since the search and loses another 3 % over the runs: they are interleaved."""
    runs = itertools.count()

    def drifting(config: TrialConfig) -> Outcome:
        number = next(runs)
        speed = {4: 5_000.0, 8: 10_000.0, 10: 10_400.0}[config.micro_batch_size]
        factor = 1.0 if number < 3 else 0.8 * (1 - 0.004 * (number - 3))
        return at_speed(config, speed * factor, spread=0.02)

    with opened(tmp_path, **(SPACE | {"baseline": {"micro_batch_size": 4}})) as study:
        drive(study, a_runner(drifting))
        ranking = ranking_of(study)
    assert ranking.winner is not None
    assert ranking.winner.config.micro_batch_size == 10
    gain = ranking.gain
    assert gain.ratio is not None
    assert gain.ratio.low <= 2.08 <= gain.ratio.high


@pytest.mark.parametrize(("noise", "runs"), [(0.01, 2), (0.06, 4)])
def test_what_noise_leaves_unsure_is_run_more_often_and_what_repeats_is_not(
    tmp_path: Path, noise: float, runs: int
) -> None:
    luck = random.Random(0)

    def card(config: TrialConfig) -> Outcome:
        speed = {4: 5_000.0, 8: 7_000.0, 10: 10_000.0}[config.micro_batch_size]
        return at_speed(config, speed * math.exp(luck.gauss(0, noise)))

    with opened(tmp_path, **SPACE) as study:
        drive(study, a_runner(card))
        assert Counter(batches(study.confirmations())) == {10: runs, 8: runs}


def test_on_a_busy_machine_runs_end_after_the_repeats_and_confirm(tmp_path: Path) -> None:
    luck = itertools.cycle((1.0, 0.3, 0.05, 0.7, 0.02))

    def busy(config: TrialConfig) -> Outcome:
        return at_speed(config, 10_000.0 * next(luck), spread=0.5, flags=("noisy",))

    with opened(tmp_path, **SPACE) as study:
        drive(study, a_runner(busy))
        ranking = ranking_of(study)
        counted = Counter(batches(study.confirmations()))
    assert ranking.is_confirmed
    assert max(counted.values()) == CONFIRM["repeats"]


def test_what_runs_out_in_its_soak_loses_to_the_next_which_is_soaked_too(tmp_path: Path) -> None:
    def tight(config: TrialConfig) -> Outcome:
        if config.micro_batch_size == 10:
            return OutOfMemory(stage="forward", detail="in an evaluation pass: full")
        return soaking(config)

    runner = a_runner(soak=tight)
    forecaster = a_forecaster()
    with opened(tmp_path, **SPACE) as study:
        tune(Driver(study, runner=runner, forecaster=forecaster, clock=Clock()))
        ranking = ranking_of(study)
    assert [config.micro_batch_size for config in soaked(runner)] == [10, 8]
    assert ranking.winner is not None
    assert ranking.winner.config.micro_batch_size == 8
    assert ranking.is_confirmed
    assert len(ranking.fallen) == 1
    # What is larger still is not tried any more.
    assert forecaster.ruled_out(BASELINE.model_copy(update={"micro_batch_size": 12})) is not None


def test_a_study_that_is_resumed_remembers_what_ran_out_in_a_soak(tmp_path: Path) -> None:
    def tight(config: TrialConfig) -> Outcome:
        is_large = config.micro_batch_size == 10
        return OutOfMemory(stage="backward") if is_large else soaking(config)

    with opened(tmp_path, **SPACE) as study:
        drive(study, a_runner(soak=tight))
    forecaster = a_forecaster()
    with opened(tmp_path, **SPACE) as study:
        tune(Driver(study, runner=a_runner(), forecaster=forecaster, clock=Clock()))
    larger = BASELINE.model_copy(update={"micro_batch_size": 12})
    assert forecaster.ruled_out(larger) is not None


def test_retries_of_the_allocator_count_against_a_tie_and_the_other_is_soaked(
    tmp_path: Path,
) -> None:
    def straining(config: TrialConfig) -> Outcome:
        return soaking(config, allocator_retries=2 if config.micro_batch_size == 4 else 0)

    card = by_batch({size: itertools.repeat(10_000.0) for size in (4, 8, 10)}, spread=0.01)
    runner = a_runner(card, straining)
    with opened(tmp_path, **SPACE) as study:
        drive(study, runner)
        ranking = ranking_of(study)
    first, second = (config.micro_batch_size for config in soaked(runner))
    assert (first, second) in ((4, 8), (4, 10))
    assert ranking.winner is not None
    assert ranking.winner.config.micro_batch_size == second


def test_a_soak_that_keeps_crashing_is_given_up_and_confirms_nothing(tmp_path: Path) -> None:
    runner = a_runner(soak=lambda _: Crashed(phase="measure", detail="no space left on device"))
    with opened(tmp_path, **SPACE) as study:
        drive(study, runner)
        assert not ranking_of(study).is_confirmed
        assert len(soaked(runner)) == 3
    # A later run tries it anew.
    runner = a_runner()
    with opened(tmp_path, **SPACE) as study:
        drive(study, runner)
        assert ranking_of(study).is_confirmed
    assert len(runner.ran) == 1


def test_every_run_of_a_confirmation_crashing_is_an_end_and_no_loop(tmp_path: Path) -> None:
    ran = itertools.count()

    def breaking(config: TrialConfig) -> Outcome:
        return train(config) if next(ran) < 3 else Crashed(phase="attach")

    runner = a_runner(breaking)
    with opened(tmp_path, **SPACE) as study:
        drive(study, runner)
        assert not ranking_of(study).is_confirmed
    # Without the winner there is nothing to be measured beside.
    assert len(runner.ran) == 3 + 3


def test_speeds_of_a_broken_clock_are_failures_and_no_loop(tmp_path: Path) -> None:
    runner = _BrokenClock(otherwise=train, soaking=soaking)
    with opened(tmp_path, **SPACE) as study:
        assert drive(study, runner) is StopReason.EXHAUSTED
        assert {record.verdict for record in study.confirmations()} == {"crashed"}
        assert not ranking_of(study).is_confirmed


class _BrokenClock(ReplayRunner):
    """After the search, time stands still."""

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        assert len(self.ran) < 40, "it goes on for ever"
        outcome = super().run(request, observe=observe)
        if not self.renewals or not isinstance(outcome, Measured):
            return outcome
        endless = {"tokens_per_second": float("inf"), "samples_per_second": float("inf")}
        return Measured(measurement=outcome.measurement.model_copy(update=endless))


def test_where_nothing_fits_nothing_is_confirmed(tmp_path: Path) -> None:
    runner = a_runner(lambda _: OutOfMemory(stage="forward"))
    with opened(tmp_path, **SPACE) as study:
        drive(study, runner)
        assert study.confirmations() == ()
    assert runner.renewals == 0


def test_a_further_search_that_finds_a_faster_one_begins_a_series_of_its_own(
    tmp_path: Path,
) -> None:
    space = SPACE | {"trials": 2, "baseline": {"micro_batch_size": 4}}
    runner = a_runner()
    with opened(tmp_path, **space) as study:
        drive(study, runner)
        first = ranking_of(study).winner
        assert {r.series for r in study.confirmations()} == {1}
    with opened(tmp_path, **(space | {"trials": 3})) as study:
        drive(study, runner)
        ranking = ranking_of(study)
        last = {r.series for r in study.confirmations()}
    assert ranking.winner is not None
    assert first is not None
    assert last == ({1, 2} if ranking.winner.number != first.number else {1})
    assert ranking.is_confirmed


def test_anew_it_is_all_measured_once_more_also_where_the_space_says_no(tmp_path: Path) -> None:
    runner = a_runner()
    for confirm_section, series in ((CONFIRM, {1}), (CONFIRM, {1, 2}), (False, {1, 2, 3})):
        with opened(tmp_path, **(SPACE | {"confirm": confirm_section})) as study:
            study.recover()
            if series == {1}:
                drive(study, runner)
            else:
                again = Driver(study, runner=runner, forecaster=a_forecaster(), clock=Clock())
                assert tune(again, is_anew=True) is StopReason.CONFIRMED
            assert {r.series for r in study.confirmations()} == series
            assert len(batches(study.confirmations(), "soak")) == len(series)


def test_in_another_class_the_fastest_of_the_baselines_own_is_confirmed_too(
    tmp_path: Path,
) -> None:
    dimensions = {"lora_rank": {"choices": [8, 16]}, "micro_batch_size": {"choices": [4, 8]}}
    fixed = {"kernels": "liger", "target_modules": "attention"}

    def card(config: TrialConfig) -> Outcome:
        speed = 1_000.0 * config.micro_batch_size * (1.5 if config.lora_rank == 8 else 1.0)
        return at_speed(config, speed)

    space = SPACE | {"dimensions": dimensions, "fixed": fixed}
    space |= {"baseline": {"lora_rank": 16, "micro_batch_size": 4}}
    with opened(tmp_path, **space) as study:
        drive(study, a_runner(card))
        ranking = ranking_of(study)
    assert ranking.fastest_of_baselines_class is not None
    of_class, gain = ranking.gain_of(ranking.fastest_of_baselines_class), ranking.gain
    assert of_class.ratio is not None
    assert of_class.ratio.value == pytest.approx(2.0)
    # The winner's own gain is over what the recipe reaches at its rank.
    assert gain.ratio is not None
    assert gain.ratio.value == pytest.approx(2.0)
    assert gain.over is not None
    assert gain.over.config.lora_rank == 8


LARGER: dict[str, Any] = SPACE | {
    "dimensions": {"lora_rank": {"choices": [8]}, "micro_batch_size": {"choices": [10]}},
    "fixed": {"kernels": "liger", "target_modules": "attention"},
    "baseline": {"lora_rank": 16, "micro_batch_size": 4},
}
"""A space that has nothing of its baseline's class."""
RECIPE = TrialConfig(kernels="liger", lora_rank=8, micro_batch_size=4)


def half(config: TrialConfig) -> Outcome:
    return at_speed(config, 1_000.0 * config.micro_batch_size)


def test_the_recipe_in_the_winners_class_is_run_in_turns_with_it_and_is_no_trial(
    tmp_path: Path,
) -> None:
    events: list[Event] = []
    with opened(tmp_path, **LARGER) as study:
        drive(study, a_runner(half), on_event=events.append)
        runs = [r for r in study.confirmations() if r.purpose == "confirm"]
        assert [r.config.micro_batch_size for r in runs] == [10, 4, 10, 4]
        assert [r.confirms for r in runs] == [1, None, 1, None]
        assert {r.config for r in runs[1::2]} == {RECIPE}
        assert len(study.records()) == 2
        gain = ranking_of(study).gain
        # Nothing more is to be run.
        assert drive(study, a_runner(half)) is StopReason.EXHAUSTED
        assert len(study.confirmations()) == 5
    assert gain.ratio is not None
    assert gain.ratio.value == pytest.approx(2.5)
    (begun,) = [event for event in events if isinstance(event, ConfirmationStarted)]
    assert (begun.numbers, begun.recipe) == ((1,), RECIPE)


def test_a_recipe_that_does_not_fit_in_the_winners_class_is_run_once(tmp_path: Path) -> None:
    def card(config: TrialConfig) -> Outcome:
        return OutOfMemory(stage="forward") if config == RECIPE else half(config)

    with opened(tmp_path, **LARGER) as study:
        drive(study, a_runner(card))
        assert batches(study.confirmations()) == [10, 4, 10]
        ranking = ranking_of(study)
        gain = ranking.gain
    assert ranking.is_confirmed
    assert (gain.ratio, gain.reason) == (None, "did_not_fit")


def test_a_recipe_that_crashes_is_given_up_for_this_run_and_keeps_nothing_from_an_end(
    tmp_path: Path,
) -> None:
    def card(config: TrialConfig) -> Outcome:
        return Crashed(phase="measure") if config == RECIPE else half(config)

    with opened(tmp_path, **LARGER) as study:
        drive(study, a_runner(card))
        assert batches(study.confirmations()).count(4) == 3
        assert ranking_of(study).is_confirmed
    with opened(tmp_path, **LARGER) as study:
        drive(study, a_runner(half))
        assert {r.series for r in study.confirmations()} == {1}
        assert ranking_of(study).gain.ratio is not None


@pytest.mark.parametrize("killed_at", range(6))
def test_a_confirmation_with_a_recipe_goes_on_wherever_it_was_killed(
    tmp_path: Path, killed_at: int
) -> None:
    ran: list[TrialConfig] = []

    def dying(config: TrialConfig) -> Outcome:
        ran.append(config)
        if len(ran) == 3 + killed_at:
            raise KeyboardInterrupt
        return half(config)

    with opened(tmp_path, **LARGER) as study, suppress(KeyboardInterrupt):
        drive(study, a_runner(dying))
    with opened(tmp_path, **LARGER) as study:
        drive(study, a_runner(half))
        fitted = tuple(r for r in study.confirmations() if r.measurement is not None)
        assert {r.series for r in fitted} == {1}
        assert sorted(batches(fitted)) == [4, 4, 10, 10]
        assert ranking_of(study).gain.ratio is not None


def test_of_several_objectives_the_knee_is_confirmed(tmp_path: Path) -> None:
    objectives = {"objectives": ["tokens_per_second", "peak_memory"]}
    with opened(tmp_path, **(SPACE | objectives)) as study:
        drive(study, a_runner())
        ranking = ranking_of(study)
    assert ranking.is_confirmed
    assert len(ranking.front) > 1


def test_a_machine_that_got_slower_does_not_have_the_whole_space_measured_again(
    tmp_path: Path,
) -> None:
    """Whatever is measured again falls behind all that was not, by half."""
    ran: Counter[TrialConfig] = Counter()

    def slowing(config: TrialConfig) -> Outcome:
        ran[config] += 1
        speed = 1_000.0 * config.micro_batch_size + 5_000.0 - config.lora_rank
        return at_speed(config, speed * (1.0 if ran[config] == 1 else 0.5))

    dimensions = {
        "lora_rank": {"choices": [8, 16]},
        "micro_batch_size": {"choices": list(range(1, 13))},
    }
    fixed = {"kernels": "liger", "target_modules": "attention"}
    for objectives in (["tokens_per_second"], ["tokens_per_second", "peak_memory"]):
        space = SPACE | {"dimensions": dimensions, "fixed": fixed, "trials": 24}
        with opened(tmp_path / str(len(objectives)), **space, objectives=objectives) as study:
            ran.clear()
            drive(study, a_runner(slowing))
            again = Counter(record.config for record in study.confirmations())
        assert len(again) <= 8
        assert max(again.values()) <= CONFIRM["repeats"] + 1


def test_it_says_what_is_measured_again(tmp_path: Path) -> None:
    events: list[Event] = []
    with opened(tmp_path, **SPACE) as study:
        drive(study, a_runner(), on_event=events.append)
        by_size = {r.config.micro_batch_size: r.number for r in study.records()}
    begun = [event for event in events if isinstance(event, ConfirmationStarted)]
    assert begun == [ConfirmationStarted(series=1, numbers=(by_size[10], by_size[8]))]
    finished = [e.record for e in events if isinstance(e, TrialFinished)]
    assert [r.purpose for r in finished] == ["search"] * 3 + ["confirm"] * 4 + ["soak"]
    assert finished[-1].confirms == by_size[10]


def test_a_measured_value_round_trips(tmp_path: Path) -> None:
    with opened(tmp_path, **SPACE) as study:
        drive(study, a_runner())
        told = study.confirmations()
    with opened(tmp_path, **SPACE) as study:
        assert study.confirmations() == told
    soaked = told[-1].measurement
    assert isinstance(soaked, Measurement)
    assert soaked.soak is not None


def test_the_smallest_record_is_one_of_the_search() -> None:
    assert a_record(BASELINE).purpose == "search"
