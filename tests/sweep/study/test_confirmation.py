"""After a search its winner is measured again, beside its rivals, and soaked."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from optuna.samplers import TPESampler

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.storage.ranking import Ranking, rank
from qlora_sweep.storage.records import (
    Crashed,
    Measured,
    Outcome,
    OutOfMemory,
    TrialRecord,
)
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.study.events import ConfirmationStarted, Event, StopReason, TrialFinished
from tests.storage.builders import SOAKED, changed
from tests.sweep.simulated_device import a_measurement, a_study, at_speed, train
from tests.sweep.study.driven import a_forecaster, a_grid, drive

CONFIRM = {"seconds": 60.0, "repeats": 4, "soak_seconds": 15.0}
SPACE: dict[str, Any] = {
    "dimensions": {"micro_batch_size": [4, 8, 10]},
    "fixed": {"kernels": "liger", "lora_rank": 16, "target_modules": "attention"},
    "trials": 10,
    "confirm": CONFIRM,
}
RANKS: dict[str, Any] = SPACE | {
    "dimensions": {"lora_rank": [8, 16], "micro_batch_size": [4, 8]},
    "fixed": {"kernels": "liger", "target_modules": "attention"},
    "baseline": {"lora_rank": 16, "micro_batch_size": 4},
}
LARGER = RANKS | {"dimensions": {"lora_rank": [8], "micro_batch_size": [10]}}
"""A space that has nothing of its baseline's class."""
OF_64 = RANKS | {
    "dimensions": {"lora_rank": [8, 64], "micro_batch_size": [4, 8]},
    "baseline": {"lora_rank": 64, "micro_batch_size": 4},
}
"""Its baseline is of another class than is recommended from."""
RECIPE = TrialConfig(kernels="liger", lora_rank=8, micro_batch_size=4)
Answer = Callable[[TrialConfig], Outcome]


def soaking(config: TrialConfig, **changes: Any) -> Outcome:
    return Measured(measurement=a_measurement(config, soak=SOAKED, **changes))


def a_runner(device: Answer = train, soak: Answer = soaking) -> ReplayRunner:
    return ReplayRunner(otherwise=device, soaking=soak)


def soaked(runner: ReplayRunner) -> list[int]:
    return [r.config.micro_batch_size for r in runner.requests if r.is_soak]


def ranking_of(study: OpenStudy) -> Ranking:
    return rank(study.records(), study.definition, study.confirmations())


def confirmed(
    home: Path, device: Answer = train, soak: Answer = soaking, **space: Any
) -> tuple[Ranking, list[int], list[int]]:
    """Drive a study; return its ranking, what was run again in turns, and what was soaked."""
    runner = a_runner(device, soak)
    with a_grid(home, **(SPACE | space)) as study:
        drive(study, runner)
        return ranking_of(study), batches(study.confirmations()), soaked(runner)


def by_batch(speeds: dict[int, Iterator[float]], **changes: Any) -> Answer:
    """A GPU whose speed is a function of the micro-batch and of how often it was asked."""
    return lambda config: at_speed(config, next(speeds[config.micro_batch_size]), **changes)


def all_equal() -> Answer:
    return by_batch({size: itertools.repeat(10_000.0) for size in (4, 6, 8, 10)}, spread=0.021)


def by_size(config: TrialConfig) -> Outcome:
    return at_speed(config, 1_000.0 * config.micro_batch_size)


def batches(records: Sequence[TrialRecord], purpose: str = "confirm") -> list[int]:
    return [r.config.micro_batch_size for r in records if r.purpose == purpose]


def test_winner_and_baseline_run_again_in_turns_and_the_winner_is_soaked(tmp_path: Path) -> None:
    runner, events = a_runner(), list[Event]()
    with a_grid(tmp_path, **SPACE) as study:
        assert drive(study, runner, on_event=events.append) is StopReason.EXHAUSTED
        records, ranking = study.records(), ranking_of(study)
        assert batches(study.confirmations()) == [10, 8, 8, 10]
        assert len(records) == study.ledger.trials_spent() == 3
    assert soaked(runner) == [10]
    assert ranking.is_confirmed
    assert ranking.gain.ratio is not None
    number = {r.config.micro_batch_size: r.number for r in records}
    begun = [event for event in events if isinstance(event, ConfirmationStarted)]
    assert begun == [ConfirmationStarted(series=1, numbers=(number[10], number[8]))]
    told = [e.record for e in events if isinstance(e, TrialFinished)]
    assert [r.number for r in told] == list(range(8))
    assert [r.purpose for r in told] == ["search"] * 3 + ["confirm"] * 4 + ["soak"]


def test_a_search_that_goes_on_asks_what_it_would_have_asked_anyway(tmp_path: Path) -> None:
    def asked(home: Path, **changes: Any) -> list[TrialConfig]:
        for trials in (4, 7):
            with a_study(home, **({"trials": trials} | changes)) as study:
                study.study.sampler = TPESampler(seed=trials, n_startup_trials=2)
                drive(study, a_runner())
                configs = [record.config for record in study.records()]
        return configs

    with_it = asked(tmp_path / "confirmed", confirm=CONFIRM)
    assert with_it == asked(tmp_path / "not", confirm=False)
    assert len(with_it) == 7


@pytest.mark.parametrize(
    ("section", "device", "runs"),
    [
        (False, train, 0),
        (0, train, 0),
        (CONFIRM, lambda _: OutOfMemory(stage="forward"), 0),
        (CONFIRM | {"soak_seconds": 0}, train, 4),
    ],
    ids=["off", "zero", "nothing fits", "no soak"],
)
def test_what_nobody_asked_for(tmp_path: Path, section: Any, device: Answer, runs: int) -> None:
    ranking, order, soaks = confirmed(tmp_path, device, confirm=section)
    assert (len(order), ranking.is_confirmed, soaks) == (runs, runs > 0, [])


class Killed(BaseException):
    """The driver is gone from one moment to the next."""


@pytest.mark.parametrize(
    ("space", "device", "searched", "runs", "moment"),
    [
        *((SPACE, train, 3, [10, 8, 8, 10], moment) for moment in range(1, 6)),
        (LARGER, by_size, 2, [10, 4, 4, 10], 3),
    ],
)
def test_killed_in_any_run_it_goes_on_and_repeats_nothing(
    tmp_path: Path, space: Any, device: Answer, searched: int, runs: list[int], moment: int
) -> None:
    left = itertools.count(searched + moment - 1, -1)

    def dying(answer: Answer) -> Answer:
        def answered(config: TrialConfig) -> Outcome:
            if next(left) == 0:
                raise Killed
            return answer(config)

        return answered

    with a_grid(tmp_path, **space) as study, pytest.raises(Killed):
        drive(study, a_runner(dying(device), dying(soaking)))
    with a_grid(tmp_path, **space) as study:
        drive(study, a_runner(device))
        measured = [r for r in study.confirmations() if r.measurement]
        (lost,) = [r for r in study.confirmations() if not r.measurement]
        assert sorted(batches(measured)) == sorted(runs)
        assert batches(measured, "soak") == [10]
        assert (lost.verdict, lost.series) == ("lost", 1)
        assert len(study.records()) == searched
        ranking = ranking_of(study)
    assert ranking.is_confirmed
    assert ranking.gain.ratio is not None


def test_ties_are_run_again_until_they_separate(tmp_path: Path) -> None:
    """10 is 3 % faster than 8 and looked as fast in the search; three runs of all tell."""
    gpu = by_batch(
        {
            4: itertools.repeat(5_000.0),
            8: iter((10_300.0, 9_900.0, 10_100.0, 9_950.0)),
            10: iter((10_310.0, 10_250.0, 10_500.0, 10_350.0)),
        },
        spread=0.021,
    )
    ranking, order, _ = confirmed(tmp_path, gpu, baseline={"micro_batch_size": 4})
    assert (ranking.is_confirmed, ranking.tied) == (True, ())
    assert ranking.winner.config.micro_batch_size == 10
    # What the gain is over goes second: cut short, that is known first.
    assert order[:3] == [8, 4, 10]
    assert Counter(order) == {10: 3, 8: 3, 4: 3}


@pytest.mark.parametrize(("spread", "runs"), [(0.021, 2), (0.019, 0)])
def test_what_is_a_tie_even_at_its_best_is_not_measured_again(
    tmp_path: Path, spread: float, runs: int
) -> None:
    """However unsure the winner's own speed is."""

    def gpu(config: TrialConfig) -> Outcome:
        is_best = config.micro_batch_size == 8
        return at_speed(config, 10_001.0 if is_best else 10_000.0, spread=0.1 * is_best or spread)

    changes = {"repeats": 2, "soak_seconds": 0.0}
    baseline, choices = {"micro_batch_size": 4, "kernels": "hf"}, [8, 10]
    dimensions = {"micro_batch_size": choices}
    _, order, _ = confirmed(
        tmp_path, gpu, baseline=baseline, dimensions=dimensions, confirm=CONFIRM | changes
    )
    assert order.count(10) == runs


def test_ties_that_remain_are_ties_and_the_smaller_one_is_recommended(tmp_path: Path) -> None:
    ranking, order, soaks = confirmed(tmp_path, all_equal())
    # That none is 2 % faster is enough.
    assert Counter(order) == {4: 2, 8: 2, 10: 2}
    assert ranking.winner.config.micro_batch_size == 4
    assert (len(ranking.tied), soaks) == (2, [4])


def test_what_was_begun_before_the_budget_was_spent_runs_twice(tmp_path: Path) -> None:
    """The baseline's runs are needed and spend nothing of it; a single run is for nothing."""
    speeds = {size: itertools.repeat(10_000.0) for size in (4, 6, 8)}
    gpu = by_batch(speeds | {2: itertools.repeat(100.0)}, spread=0.021)
    run_seconds = 1.0 + 12 * 4 * 512 / 10_000.0
    space = {
        "dimensions": {"micro_batch_size": [4, 6, 8]},
        "baseline": {"micro_batch_size": 2},
        "confirm": CONFIRM | {"seconds": 1.1 * run_seconds, "soak_seconds": 0.0},
    }
    ranking, order, _ = confirmed(tmp_path, gpu, **space)
    assert order == [4, 2, 6, 2, 4, 6]
    assert ranking.tied != ()


@pytest.mark.parametrize(("noise", "runs"), [(0.003, 2), (0.06, 4)])
def test_what_noise_leaves_open_is_run_more(tmp_path: Path, noise: float, runs: int) -> None:
    luck = random.Random(0)

    def gpu(config: TrialConfig) -> Outcome:
        speed = {4: 5_000.0, 8: 7_000.0, 10: 10_000.0}[config.micro_batch_size]
        return at_speed(config, speed * math.exp(luck.gauss(0, noise)))

    assert Counter(confirmed(tmp_path, gpu)[1]) == {10: runs, 8: runs}


@pytest.mark.parametrize(("seconds", "runs"), [(20.0, 2), (27.0, 3)])
def test_a_further_round_is_whole_or_does_not_take_place(
    tmp_path: Path, seconds: float, runs: int
) -> None:
    """Two runs of the winner take 13.4 s, and a round of both 12.4 s."""
    luck = random.Random(0)

    def gpu(config: TrialConfig) -> Outcome:
        speed = {4: 5_000.0, 8: 24_000.0, 10: 80_000.0}[config.micro_batch_size]
        return at_speed(config, speed * math.exp(luck.gauss(0, 0.06)))

    section = CONFIRM | {"seconds": seconds, "repeats": 3}
    again = confirmed(tmp_path, gpu, confirm=section, gpu="h200")[1]
    assert Counter(again) == {10: runs, 8: runs}


def test_what_runs_out_in_its_soak_loses_and_what_is_larger_is_not_tried(tmp_path: Path) -> None:
    def tight(config: TrialConfig) -> Outcome:
        is_large = config.micro_batch_size == 10
        return OutOfMemory(stage="backward") if is_large else soaking(config)

    runner, larger = a_runner(soak=tight), changed(RECIPE, micro_batch_size=12)
    # Known to a study that is resumed, too.
    for forecaster in (a_forecaster(), a_forecaster()):
        with a_grid(tmp_path, **(SPACE | {"fixed": LARGER["fixed"] | {"lora_rank": 8}})) as study:
            drive(study, runner, forecaster=forecaster)
            ranking = ranking_of(study)
        assert forecaster.verdict_unpredicted(larger) is not None
    assert soaked(runner) == [10, 8]
    assert ranking.winner.config.micro_batch_size == 8
    assert ranking.is_confirmed
    assert len(ranking.fallen) == 1


def test_retries_of_the_allocator_count_against_a_tie(tmp_path: Path) -> None:
    def straining(config: TrialConfig) -> Outcome:
        return soaking(config, allocator_retries=2 if config.micro_batch_size == 4 else 0)

    ranking, _, soaks = confirmed(tmp_path, all_equal(), straining)
    assert soaks in ([4, 8], [4, 10])
    assert ranking.winner.config.micro_batch_size == soaks[1]
    (retried,) = (t for t in ranking.trials.values() if t.config.micro_batch_size == 4)
    assert "allocator_retries" in retried.measurement.flags


def test_a_soak_that_keeps_crashing_is_given_up_until_the_next_run(tmp_path: Path) -> None:
    runner = a_runner(soak=lambda _: Crashed(phase="measure", detail="no space left on device"))
    with a_grid(tmp_path, **SPACE) as study:
        drive(study, runner)
        assert not ranking_of(study).is_confirmed
        assert len(soaked(runner)) == 3
    runner = a_runner()
    with a_grid(tmp_path, **SPACE) as study:
        drive(study, runner)
        assert ranking_of(study).is_confirmed
    assert len(runner.ran) == 1


def test_every_run_of_a_confirmation_crashing_is_an_end_and_no_loop(tmp_path: Path) -> None:
    ran = itertools.count()
    crash = Crashed(phase="attach")
    ranking, order, _ = confirmed(tmp_path, lambda c: train(c) if next(ran) < 3 else crash)
    # Without the winner there is nothing to be measured beside.
    assert (ranking.is_confirmed, len(order)) == (False, 3)


def test_a_further_search_that_finds_a_faster_one_begins_a_series(tmp_path: Path) -> None:
    speeds: dict[TrialConfig, float] = {}

    def later_is_faster(config: TrialConfig) -> Outcome:
        return at_speed(config, speeds.setdefault(config, 5_000.0 * (len(speeds) + 1)))

    for trials, series in ((2, {1}), (3, {1, 2})):
        with a_grid(tmp_path, **(SPACE | {"trials": trials})) as study:
            drive(study, a_runner(later_is_faster))
            assert {r.series for r in study.confirmations()} == series
            assert ranking_of(study).is_confirmed


def test_the_fastest_of_the_baselines_own_class_is_confirmed_too(tmp_path: Path) -> None:
    def gpu(config: TrialConfig) -> Outcome:
        speed = 1_000.0 * config.micro_batch_size * (1.5 if config.lora_rank == 8 else 1.0)
        return at_speed(config, speed)

    ranking, *_ = confirmed(tmp_path, gpu, **OF_64)
    assert ranking.gain_of(ranking.fastest_of_baselines_class).ratio.value == pytest.approx(2.0)
    # The winner's own gain is over what the recipe reaches at its rank.
    assert ranking.gain.ratio.value == pytest.approx(2.0)
    assert ranking.gain.over.config.lora_rank == 8


def test_a_baseline_that_outruns_the_winner_becomes_a_trial_and_wins(tmp_path: Path) -> None:
    def gpu(config: TrialConfig) -> Outcome:
        return at_speed(config, 9_000.0 if config.micro_batch_size == 4 else 5_000.0)

    space = LARGER | {
        "dimensions": {"lora_rank": [8], "micro_batch_size": [4, 8, 10]},
        "trials": 2,
    }
    with a_grid(tmp_path, **space) as study:
        drive(study, a_runner(gpu))
        assert [r.config.micro_batch_size for r in study.records()][1] != 4, "it is not foreseen"
        ranking = ranking_of(study)
        assert canonical(ranking.winner.config) == canonical(RECIPE)
        assert ranking.is_confirmed
        stored = len(study.records()), len(study.confirmations())
        drive(study, a_runner(gpu))
        assert (len(study.records()), len(study.confirmations())) == stored


@pytest.mark.parametrize(
    ("ended", "runs", "reason"),
    [
        (OutOfMemory(stage="forward"), [10, 4, 10], "did_not_fit"),
        (Crashed(phase="measure"), [10, 4, 10, 4, 4], None),
    ],
)
def test_recipe_fails(tmp_path: Path, ended: Outcome, runs: list[int], reason: str | None) -> None:
    with a_grid(tmp_path, **LARGER) as study:
        drive(study, a_runner(lambda c: ended if c == RECIPE else by_size(c)))
        assert sorted(batches(study.confirmations())) == sorted(runs)
        ranking = ranking_of(study)
        assert (ranking.is_confirmed, ranking.gain.ratio) == (True, None)
        if reason is not None:
            assert ranking.gain.reason == reason
            return
    # What crashed is tried anew by the next run.
    with a_grid(tmp_path, **LARGER) as study:
        drive(study, a_runner(by_size))
        assert {r.series for r in study.confirmations()} == {1}
        assert ranking_of(study).gain.ratio is not None


@pytest.mark.parametrize("objectives", [[], ["peak_memory"]], ids=["speed", "two"])
def test_a_slower_machine_measures_few_again(tmp_path: Path, objectives: list[str]) -> None:
    """Whatever is measured again falls behind all that was not, by half."""
    ran: Counter[TrialConfig] = Counter()

    def slowing(config: TrialConfig) -> Outcome:
        ran[config] += 1
        speed = 1_000.0 * config.micro_batch_size + 5_000.0 - config.lora_rank
        return at_speed(config, speed * (1.0 if ran[config] == 1 else 0.5))

    space = {"micro_batch_size": list(range(1, 13))}
    both = ["tokens_per_second", *objectives]
    confirmed(tmp_path, slowing, dimensions=space, objectives=both, trials=12)
    again = Counter({config: runs - 1 for config, runs in ran.items() if runs > 1})
    assert len(again) <= 8
    assert max(again.values()) <= CONFIRM["repeats"] + 1
