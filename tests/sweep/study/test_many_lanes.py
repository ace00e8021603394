"""Trials run beside each other, one study is told by one thread, and a lane that is lost costs only
the trial that ran on it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import Trial

from search_spaces.config import TrialConfig
from search_spaces.errors import CardLost, EnvironmentFault
from storage.records import (
    NEIGHBOUR,
    RETRYABLE,
    Crashed,
    Measured,
    Outcome,
    TrialRecord,
    Verdict,
)
from storage.study import OpenStudy
from sweep.running.replay import ReplayRunner
from sweep.running.runner import Lane, Lanes
from sweep.sampling.samplers import make_sampler
from sweep.study.driver import Driver
from sweep.study.events import (
    Event,
    Interruption,
    LaneLost,
    StopReason,
    TrialFinished,
    TrialStarted,
)
from sweep.study.stopping import FAILURES_IN_A_ROW
from sweep.study.tuner import tune
from tests.sweep.simulated_device import StopsWhen, a_measurement, a_study, train
from tests.sweep.study.test_quality_of_studies import Learning, qualities, slower_by_rank
from tests.sweep.study.test_quality_of_studies import opened as opened_for_losses
from tests.sweep.study.test_tuner import a_forecaster

EIGHT = {
    "dimensions": {
        "micro_batch_size": {"choices": [1, 2, 4, 8]},
        "checkpoint_fraction": {"choices": [0.5, 1.0]},
    },
    "fixed": {},
    "confirm": None,
}
SECONDS = 20.0
"""No test waits so long unless it fails."""

Answer = Callable[[TrialConfig], Outcome]


def lanes(*answers: Answer) -> Lanes:
    runners = [ReplayRunner(otherwise=answer) for answer in answers]
    return Lanes([Lane(runner, f"GPU {at}") for at, runner in enumerate(runners)])


def a_grid(home: Path, **changes: Any) -> OpenStudy:
    study = a_study(home, **(EIGHT | changes))
    study.study.sampler = make_sampler("grid", study.definition.space, seed=0)
    return study


def drive(study: OpenStudy, where: Lanes, **changes: Any) -> StopReason:
    return tune(Driver(study, runner=where, forecaster=a_forecaster(), **changes))


def meeting(of: int) -> Answer:
    """Trials of which each waits until so many run at once."""
    barrier = threading.Barrier(of, timeout=SECONDS)

    def answer(config: TrialConfig) -> Outcome:
        barrier.wait()
        return train(config)

    return answer


def concluded(records: Iterable[TrialRecord]) -> int:
    return len({r.config for r in records if r.verdict not in RETRYABLE})


def failing(times: int = 1, error: type[EnvironmentFault] = CardLost) -> Answer:
    left = [times]

    def answer(config: TrialConfig) -> Outcome:
        left[0] -= 1
        if left[0] >= 0:
            raise error("it fell off the bus")
        return train(config)

    return answer


def test_trials_run_beside_each_other_and_each_configuration_once(tmp_path: Path) -> None:
    together = meeting(2)
    with a_grid(tmp_path, trials=8) as study:
        where = lanes(together, together)
        assert drive(study, where) is StopReason.TRIALS_SPENT
        records = study.records()
    assert [record.number for record in records] == list(range(8))
    assert len({record.config for record in records}) == 8
    assert Counter(record.ran_on for record in records) == {"GPU 0": 4, "GPU 1": 4}


def test_a_study_is_told_by_the_thread_that_drives_it_whatever_its_lanes_say(
    tmp_path: Path,
) -> None:
    heard: set[int] = set()

    def on_event(_: Event) -> None:
        heard.add(threading.get_ident())

    with a_grid(tmp_path, trials=8) as study:
        drive(study, lanes(train, train, train), on_event=on_event)
    assert heard == {threading.get_ident()}


def test_no_more_trials_run_than_were_asked_for_however_many_lanes_there_are(
    tmp_path: Path,
) -> None:
    with a_grid(tmp_path, trials=3) as study:
        drive(study, lanes(*[train] * 5))
        assert len(study.records()) == 3


def test_the_baseline_is_tried_once_also_where_several_lanes_begin_at_once(tmp_path: Path) -> None:
    with a_grid(tmp_path, trials=6) as study:
        drive(study, lanes(train, train, train))
        assert sum(record.is_baseline for record in study.records()) == 1


@pytest.mark.parametrize("error", [CardLost, EnvironmentFault])
def test_a_card_that_fails_retires_alone_and_its_trial_is_tried_elsewhere(
    tmp_path: Path, error: type[EnvironmentFault]
) -> None:
    events: list[Event] = []
    with a_grid(tmp_path, trials=8) as study:
        where = lanes(failing(error=error), train)
        drive(study, where, on_event=events.append)
        records = study.records()
    (lost,) = [r for r in records if r.verdict is Verdict.LOST]
    assert lost.is_interrupted
    assert lost.ran_on == "GPU 0"
    assert [r.ran_on for r in records if r.config == lost.config] == ["GPU 0", "GPU 1"]
    assert concluded(records) == 8
    (said,) = [event for event in events if isinstance(event, LaneLost)]
    assert (said.name, said.left) == ("GPU 0", 1)
    assert "fell off the bus" in said.reason


def test_a_card_on_which_every_trial_fails_retires_while_others_go_on(tmp_path: Path) -> None:
    crashes = [0]

    def crash(_: TrialConfig) -> Outcome:
        crashes[0] += 1
        return Crashed(phase="warmup", detail="nobody knows why")

    def slow(config: TrialConfig) -> Outcome:
        # The other GPU has had its chance by then.
        while crashes[0] < FAILURES_IN_A_ROW:
            pause.wait(0.005)
        return train(config)

    pause = threading.Event()
    with a_grid(tmp_path, trials=8) as study:
        drive(study, lanes(crash, slow))
        records = study.records()
    assert crashes[0] == FAILURES_IN_A_ROW
    assert concluded(records) == 8


def test_a_study_ends_with_its_last_card_and_goes_on_with_another(tmp_path: Path) -> None:
    with a_grid(tmp_path, trials=8) as study, pytest.raises(CardLost):
        drive(study, lanes(failing(), failing()))
    with a_grid(tmp_path, trials=8) as study:
        assert drive(study, lanes(train)) is StopReason.TRIALS_SPENT
        assert concluded(study.records()) == 8


def test_who_asks_to_stop_ends_all_that_runs_and_a_resume_tries_it_again(tmp_path: Path) -> None:
    began = threading.Barrier(3, timeout=SECONDS)
    released = threading.Event()

    class Waiting(ReplayRunner):
        def cancel(self) -> None:
            super().cancel()
            released.set()

    def wait(config: TrialConfig) -> Outcome:
        began.wait()
        released.wait(SECONDS)
        return train(config)

    where = Lanes([Lane(Waiting(otherwise=wait), name=f"GPU {at}") for at in range(2)])
    interruption = Interruption(cancel=where.cancel)

    def ask() -> None:
        began.wait()
        interruption.request()

    with a_grid(tmp_path, trials=8) as study:
        asking = threading.Thread(target=ask)
        asking.start()
        reason = drive(study, where, interruption=interruption)
        asking.join()
        assert reason is StopReason.INTERRUPTED
        assert all(r.is_interrupted for r in study.records())
        assert len(study.records()) == 2
    with a_grid(tmp_path, trials=8) as study:
        assert drive(study, lanes(train, train)) is StopReason.TRIALS_SPENT


def test_a_database_that_goes_away_costs_no_result_of_any_lane(tmp_path: Path) -> None:
    ended = threading.Event()
    measured: list[TrialConfig] = []

    def first(config: TrialConfig) -> Outcome:
        measured.append(config)
        return train(config)

    def second(config: TrialConfig) -> Outcome:
        measured.append(config)
        ended.wait(SECONDS)
        return train(config)

    def away(event: Event) -> None:
        if isinstance(event, TrialFinished):
            ended.set()
            raise EnvironmentFault("the database is away")

    with a_grid(tmp_path, trials=8) as study, pytest.raises(EnvironmentFault, match="away"):
        drive(study, lanes(first, second), on_event=away)
    with a_grid(tmp_path, trials=8) as study:
        assert drive(study, lanes(train)) is StopReason.TRIALS_SPENT
        tried = Counter(r.config for r in study.records() if not r.is_interrupted)
    assert set(tried.values()) == {1}


def at_speed(config: TrialConfig) -> Outcome:
    step = config.tokens_per_step / (8_000.0 if config.micro_batch_size == 8 else 1_000.0)
    return Measured(
        measurement=a_measurement(
            config,
            tokens_per_second=config.tokens_per_step / step,
            step_seconds=step,
            step_seconds_ci95=(step * 0.999, step * 1.001),
        )
    )


def test_what_ends_beside_a_trial_is_what_it_has_to_beat_from_then_on(tmp_path: Path) -> None:
    baseline_ended = threading.Event()

    def on_event(event: Event) -> None:
        if isinstance(event, TrialFinished) and event.record.is_baseline:
            baseline_ended.set()

    quick = ReplayRunner(otherwise=at_speed)
    slow = ReplayRunner(otherwise=at_speed, pause=lambda: baseline_ended.wait(SECONDS))
    dimensions = {"micro_batch_size": {"choices": [1, 8]}}
    with a_grid(tmp_path, dimensions=dimensions, trials=2) as study:
        where = Lanes([Lane(quick, name="GPU 0"), Lane(slow, name="GPU 1")])
        drive(study, where, on_event=on_event)
        records = study.records()
    assert [(r.ran_on, r.verdict) for r in records] == [
        ("GPU 0", "fits"),
        ("GPU 1", "pruned_slow"),
    ]


def test_what_is_left_for_another_card_to_try_again_is_waited_for_and_nothing_tried_twice(
    tmp_path: Path,
) -> None:
    """Nothing else is left to try, and trials are left: whoever is idle waits."""
    crashed = threading.Event()

    def crash_once(config: TrialConfig) -> Outcome:
        if crashed.is_set():
            return train(config)
        crashed.set()
        return Crashed(phase="warmup", detail="nobody knows why")

    def slow(config: TrialConfig) -> Outcome:
        crashed.wait(SECONDS)
        return train(config)

    with a_grid(tmp_path, trials=100) as study:
        assert drive(study, lanes(crash_once, slow)) is StopReason.EXHAUSTED
        tried = Counter(r.config for r in study.records() if r.verdict not in RETRYABLE)
    assert set(tried.values()) == {1}
    assert len(tried) == 8


@pytest.mark.parametrize("count", [1, 2])
def test_a_card_that_a_neighbour_had_for_a_moment_is_not_lost(tmp_path: Path, count: int) -> None:
    runs = [0]

    def beside_a_neighbour(config: TrialConfig) -> Outcome:
        runs[0] += 1
        if runs[0] == 2:
            raise EnvironmentFault("the worker cannot use the device: no memory is free")
        outcome = at_speed(config)
        if runs[0] > 1 or not isinstance(outcome, Measured):
            return outcome
        flagged = outcome.measurement.model_copy(update={"flags": (NEIGHBOUR,)})
        return Measured(measurement=flagged)

    events: list[Event] = []
    with a_grid(tmp_path, trials=4) as study:
        where = lanes(beside_a_neighbour, *[train] * (count - 1))
        assert drive(study, where, on_event=events.append) is StopReason.TRIALS_SPENT
    assert len(where.working) == count
    assert not any(isinstance(event, LaneLost) for event in events)


def test_a_mistake_in_one_lane_is_raised_and_the_others_are_closed_at_once(tmp_path: Path) -> None:
    def mistaken(_: TrialConfig) -> Outcome:
        raise ValueError("a mistake")

    began = time.monotonic()
    where = lanes(mistaken, train)
    with a_grid(tmp_path, trials=8) as study, where, pytest.raises(ValueError, match="a mistake"):
        drive(study, where)
    # Its own end is waited for by nobody: that took half a minute.
    assert time.monotonic() - began < SECONDS


def test_a_database_that_goes_away_while_others_are_awaited_costs_no_result(
    tmp_path: Path,
) -> None:
    asked, released = threading.Event(), threading.Event()

    def wait(config: TrialConfig) -> Outcome:
        released.wait(SECONDS)
        return train(config)

    with a_grid(tmp_path, trials=8) as study:
        keep = study.tell

        def away(trial: Trial, record: TrialRecord) -> TrialRecord:
            study.spool(record)
            raise EnvironmentFault("the database is away")

        def on_event(event: Event) -> None:
            if isinstance(event, TrialStarted) and event.number == 2:
                asked.set()
                study.tell = away  # type: ignore[method-assign]
                released.set()

        with pytest.raises(EnvironmentFault, match="away"):
            drive(
                study,
                lanes(wait, wait, train),
                interruption=StopsWhen(asked.is_set),
                on_event=on_event,
            )
        study.tell = keep  # type: ignore[method-assign]
    with a_grid(tmp_path, trials=8) as study:
        assert drive(study, lanes(train)) is StopReason.TRIALS_SPENT
        counts = Counter(r.config for r in study.records() if not r.is_interrupted)
    assert set(counts.values()) == {1}


def test_dollars_are_those_of_every_card_that_a_run_had(tmp_path: Path) -> None:
    with a_grid(tmp_path) as study:
        study.cards = 4
        study.add_wall_seconds(100.0)
    with a_grid(tmp_path) as study:
        study.add_wall_seconds(10.0)
        assert study.wall_seconds() == 110.0
        assert study.card_seconds() == 410.0
    with a_grid(tmp_path) as study:
        assert (study.wall_seconds(), study.card_seconds()) == (110.0, 410.0)


def test_where_losses_are_asked_for_the_others_wait_for_the_first_speed(tmp_path: Path) -> None:
    runners = [Learning(otherwise=slower_by_rank) for _ in range(2)]
    with opened_for_losses(tmp_path) as study:
        drive(study, Lanes([Lane(r, name=f"GPU {at}") for at, r in enumerate(runners)]))
    asked = [command for runner in runners for command in qualities(runner)]
    assert sum(command is None for command in asked) == 1
    assert len({(c.tokens, c.seed) for c in asked if c is not None and c.seed == 0}) == 1


def test_a_guided_search_does_not_ask_for_what_runs(tmp_path: Path) -> None:
    together = meeting(2)
    with a_study(tmp_path, **(EIGHT | {"trials": 8, "stop_below_gain": 0.0})) as study:
        space = study.definition.space
        study.study.sampler = make_sampler("guided", space, seed=0, forecaster=a_forecaster())
        drive(study, lanes(together, together))
        assert len({r.config for r in study.records()}) == 8


def test_the_winner_is_measured_again_on_one_card_while_the_others_idle(tmp_path: Path) -> None:
    where = lanes(train, train)
    with a_grid(tmp_path, trials=8, confirm={"seconds": 30}) as study:
        drive(study, where)
        assert study.confirmations()
        assert {record.ran_on for record in study.confirmations()} == {"GPU 0"}


def test_what_one_card_measured_again_is_not_set_beside_what_another_did(tmp_path: Path) -> None:
    ran = [0]

    def dies_in_the_middle(config: TrialConfig) -> Outcome:
        ran[0] += 1
        if ran[0] == 8 + 3:
            raise CardLost("it fell off the bus")
        return train(config)

    def lives(config: TrialConfig) -> Outcome:
        ran[0] += 1
        return train(config)

    with a_grid(tmp_path, trials=8, confirm={"seconds": 30}) as study:
        drive(study, lanes(dies_in_the_middle, lives))
        again = study.confirmations()
    places = {(r.series, r.ran_on) for r in again if r.verdict not in RETRYABLE}
    assert places == {(1, "GPU 0"), (2, "GPU 1")}
