"""Trials run beside each other, one study is told by one thread, and a lane that is lost costs only
the trial that ran on it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, GpuLost
from qlora_sweep.search_spaces.prices import load_prices
from qlora_sweep.storage.records import (
    NEIGHBOUR,
    RETRYABLE,
    Crashed,
    Measured,
    Outcome,
    TrialRecord,
    Verdict,
)
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.sweep.request import RunRequest
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.running.runner import Lane, Lanes
from qlora_sweep.sweep.study import session
from qlora_sweep.sweep.study.events import (
    Event,
    Interruption,
    LaneLost,
    Listener,
    StopReason,
    TrialFinished,
)
from qlora_sweep.sweep.study.prepared import prepare, prepare_again
from qlora_sweep.sweep.study.stopping import FAILURES_IN_A_ROW, Stopping
from tests.storage.builders import changed
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.simulated_device import at_speed, train
from tests.sweep.study.driven import (
    WAIT_SECONDS,
    StandingClock,
    WaitsForItsEnd,
    a_grid,
    drive,
)
from tests.sweep.study.test_confirmation import SPACE, soaking
from tests.sweep.study.test_quality_of_studies import SPACE as LEARNING
from tests.sweep.study.test_quality_of_studies import Learning, qualities, slower_by_rank
from tests.sweep.study.test_session import a_gpu, run, small_a10

EIGHT = {
    "dimensions": {
        "micro_batch_size": [1, 2, 4, 8],
        "checkpoint_fraction": [0.5, 1.0],
    },
    "fixed": {},
    "confirm": None,
}


Answer = Callable[[TrialConfig], Outcome]


def lanes(*answers: Answer) -> Lanes:
    runners = [ReplayRunner(otherwise=answer) for answer in answers]
    return Lanes([Lane(runner, f"GPU {at}") for at, runner in enumerate(runners)])


def eight(home: Path, **changes: Any) -> OpenStudy:
    return a_grid(home, **(EIGHT | changes))


def by_batch(config: TrialConfig) -> Outcome:
    return at_speed(config, 8_000.0 if config.micro_batch_size == 8 else 1_000.0)


def rendezvous(of: int) -> Answer:
    """Trials of which each waits until so many run at once."""
    barrier = threading.Barrier(of, timeout=WAIT_SECONDS)

    def answer(config: TrialConfig) -> Outcome:
        barrier.wait()
        return train(config)

    return answer


def concluded(records: Iterable[TrialRecord]) -> int:
    return len({r.config for r in records if r.verdict not in RETRYABLE})


def failing(times: int = 1, error: type[EnvironmentFault] = GpuLost) -> Answer:
    left = [times]

    def answer(config: TrialConfig) -> Outcome:
        left[0] -= 1
        if left[0] >= 0:
            raise error("it fell off the bus")
        return train(config)

    return answer


def test_trials_run_beside_each_other_and_each_configuration_once(tmp_path: Path) -> None:
    together, heard = rendezvous(2), set[int]()
    with eight(tmp_path, trials=6) as study:
        told = lambda _: heard.add(threading.get_ident())  # noqa: E731
        assert drive(study, lanes(together, together), on_event=told) is StopReason.TRIALS_SPENT
        records = study.records()
    assert [record.number for record in records] == list(range(6))
    assert len({record.config for record in records}) == 6
    assert Counter(record.ran_on for record in records) == {"GPU 0": 3, "GPU 1": 3}
    # The study is told by the thread that drives it, and no more runs than was asked for.
    assert heard == {threading.get_ident()}
    with eight(tmp_path / "few", trials=3) as study:
        drive(study, lanes(*[train] * 5))
        assert len(study.records()) == 3


@pytest.mark.parametrize("error", [GpuLost, EnvironmentFault])
def test_a_gpu_that_fails_retires_alone(tmp_path: Path, error: type[EnvironmentFault]) -> None:
    events: list[Event] = []
    with eight(tmp_path, trials=8) as study:
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


def test_a_gpu_on_which_every_trial_fails_retires_while_others_go_on(tmp_path: Path) -> None:
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
    with eight(tmp_path, trials=8) as study:
        drive(study, lanes(crash, slow))
        records = study.records()
    assert crashes[0] == FAILURES_IN_A_ROW
    assert concluded(records) == 8


def test_a_study_ends_with_its_last_gpu_and_goes_on_with_another(tmp_path: Path) -> None:
    with eight(tmp_path, trials=8) as study, pytest.raises(GpuLost):
        drive(study, lanes(failing(), failing()))
    with eight(tmp_path, trials=8) as study:
        assert drive(study, lanes(train)) is StopReason.TRIALS_SPENT
        assert concluded(study.records()) == 8


def assert_each_is_told_once(home: Path) -> None:
    """Go on with a study, after which each configuration that ran has one result."""
    with eight(home, trials=8) as study:
        assert drive(study) is StopReason.TRIALS_SPENT
        tried = Counter(r.config for r in study.records() if not r.is_interrupted)
    assert set(tried.values()) == {1}


def test_a_database_that_goes_away_costs_no_result_of_any_lane(tmp_path: Path) -> None:
    ended = threading.Event()
    measured: list[TrialConfig] = []

    def first(config: TrialConfig) -> Outcome:
        measured.append(config)
        return train(config)

    def second(config: TrialConfig) -> Outcome:
        measured.append(config)
        ended.wait(WAIT_SECONDS)
        return train(config)

    def away(event: Event) -> None:
        if isinstance(event, TrialFinished):
            ended.set()
            raise EnvironmentFault("the database is away")

    with eight(tmp_path, trials=8) as study, pytest.raises(EnvironmentFault, match="away"):
        drive(study, lanes(first, second), on_event=away)
    assert_each_is_told_once(tmp_path)


def test_what_ends_beside_a_trial_is_what_it_has_to_beat_from_then_on(tmp_path: Path) -> None:
    baseline_ended = threading.Event()

    def on_event(event: Event) -> None:
        if isinstance(event, TrialFinished) and event.record.is_baseline:
            baseline_ended.set()

    quick = ReplayRunner(otherwise=by_batch)
    slow = ReplayRunner(otherwise=by_batch, pause=lambda: baseline_ended.wait(WAIT_SECONDS))
    dimensions = {"micro_batch_size": [1, 8]}
    with eight(tmp_path, dimensions=dimensions, trials=2) as study:
        where = Lanes([Lane(quick, name="GPU 0"), Lane(slow, name="GPU 1")])
        drive(study, where, on_event=on_event)
        records = study.records()
    assert [(r.ran_on, r.verdict) for r in records] == [
        ("GPU 0", "fits"),
        ("GPU 1", "pruned_slow"),
    ]


def test_what_another_gpu_is_to_try_again_is_waited_for(tmp_path: Path) -> None:
    crashed = threading.Event()

    def crash_once(config: TrialConfig) -> Outcome:
        if crashed.is_set():
            return train(config)
        crashed.set()
        return Crashed(phase="warmup", detail="nobody knows why")

    def slow(config: TrialConfig) -> Outcome:
        crashed.wait(WAIT_SECONDS)
        return train(config)

    with eight(tmp_path, trials=100) as study:
        assert drive(study, lanes(crash_once, slow)) is StopReason.EXHAUSTED
        tried = Counter(r.config for r in study.records() if r.verdict not in RETRYABLE)
    assert set(tried.values()) == {1}
    assert len(tried) == 8


@pytest.mark.parametrize("count", [1, 2])
def test_a_gpu_that_a_neighbour_had_for_a_moment_is_not_lost(tmp_path: Path, count: int) -> None:
    runs = [0]

    def beside_a_neighbour(config: TrialConfig) -> Outcome:
        runs[0] += 1
        if runs[0] == 2:
            raise EnvironmentFault("the worker cannot use the device: no memory is free")
        outcome = by_batch(config)
        if runs[0] > 1 or not isinstance(outcome, Measured):
            return outcome
        flagged = changed(outcome.measurement, flags=(NEIGHBOUR,))
        return Measured(measurement=flagged)

    events: list[Event] = []
    with eight(tmp_path, trials=4) as study:
        where = lanes(beside_a_neighbour, *[train] * (count - 1))
        assert drive(study, where, on_event=events.append) is StopReason.TRIALS_SPENT
    assert len(where.working) == count
    assert not any(isinstance(event, LaneLost) for event in events)


def test_a_mistake_in_one_lane_is_raised_and_the_others_are_closed_at_once(tmp_path: Path) -> None:
    def mistaken(_: TrialConfig) -> Outcome:
        raise ValueError("a mistake")

    began = time.monotonic()
    where = lanes(mistaken, train)
    with eight(tmp_path, trials=8) as study, where, pytest.raises(ValueError, match="a mistake"):
        drive(study, where)
    # Its own end is waited for by nobody: that took half a minute.
    assert time.monotonic() - began < WAIT_SECONDS


def test_where_losses_are_asked_for_the_others_wait_for_the_first_speed(tmp_path: Path) -> None:
    runners = [Learning(otherwise=slower_by_rank) for _ in range(2)]
    with a_grid(tmp_path, **LEARNING) as study:
        drive(study, Lanes([Lane(r, name=f"GPU {at}") for at, r in enumerate(runners)]))
    asked = [command for runner in runners for command in qualities(runner)]
    assert sum(command is None for command in asked) == 1
    assert len({(c.tokens, c.seed) for c in asked if c is not None and c.seed == 0}) == 1


def test_what_one_gpu_measured_again_is_not_set_beside_what_another_did(tmp_path: Path) -> None:
    ran = [0]

    def dies_in_the_middle(config: TrialConfig) -> Outcome:
        ran[0] += 1
        if ran[0] == 8 + 3:
            raise GpuLost("it fell off the bus")
        return train(config)

    def lives(config: TrialConfig) -> Outcome:
        ran[0] += 1
        return train(config)

    with eight(tmp_path, trials=8, confirm={"seconds": 30}) as study:
        drive(study, lanes(dies_in_the_middle, lives))
        again = study.confirmations()
    places = {(r.series, r.ran_on) for r in again if r.verdict not in RETRYABLE}
    assert places == {(1, "GPU 0"), (2, "GPU 1")}


# What a study may cost holds for all that its command does, at the price of the GPU there is

A_DOLLAR_A_SECOND = 3600.0
DOLLARS = 1000.0


def driven(
    study: OpenStudy, runner: Any, clock: StandingClock, *, is_anew: bool = False
) -> StopReason:
    space = changed(study.definition.space, max_dollars=DOLLARS)
    study.definition = changed(study.definition, space=space)
    stopping = Stopping(space, usd_per_hour=A_DOLLAR_A_SECOND)
    return drive(study, runner, is_anew=is_anew, stopping=stopping, clock=clock)


def test_a_confirmation_ends_with_the_money_and_what_is_known_stays(tmp_path: Path) -> None:
    with a_grid(tmp_path, **SPACE) as study:
        clock = StandingClock()
        assert (
            driven(study, WaitsForItsEnd(3 + 2, clock, soaking=soaking), clock)
            is StopReason.DOLLARS_SPENT
        )
        known = study.confirmations()
        assert len(study.records()) == 3
    assert [r.config.micro_batch_size for r in known if r.measurement] == [10, 8]
    assert [r.is_interrupted for r in known] == [False, False, True]


@pytest.mark.parametrize("is_anew", [False, True])
def test_where_the_money_is_spent_nothing_is_measured_again(tmp_path: Path, is_anew: bool) -> None:
    runner = ReplayRunner(otherwise=train, soaking=soaking)
    with a_grid(tmp_path, **SPACE | {"confirm": False}) as study:
        drive(study, runner)
    with a_grid(tmp_path, **SPACE) as study:
        study.add_wall_seconds(DOLLARS)
        assert driven(study, runner, StandingClock(), is_anew=is_anew) is StopReason.DOLLARS_SPENT
        assert study.confirmations() == ()
    assert len(runner.ran) == 3


def test_money_is_of_the_gpu_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setattr(session, "predictor_here", lambda *_, **__: ImaginedPredictor())
    cheapest = {gpu: offers[0].usd_per_hour for gpu, offers in load_prices().items()}
    assert cheapest["h200"] > 2 * cheapest["a10"]

    @contextmanager
    def after_an_hour(study: OpenStudy, _: Interruption) -> Iterator[Listener]:
        study.add_wall_seconds(3600.0)
        yield lambda _event: None

    def after_an_hour_on(host: str) -> tuple[StopReason, int]:
        overrides = {"max_dollars": 2 * cheapest["a10"], "trials": 2, "confirm": False}
        gpu_here, runner = a_gpu(host), ReplayRunner(otherwise=train)
        request = RunRequest(space=small_a10(tmp_path), overrides=overrides, study=host)
        what = prepare(request, read_gpu=lambda: gpu_here)
        url = f"sqlite:///{tmp_path}/runs/sweep.db"
        reason = run(what, url, watch=after_an_hour, new_runner=lambda _: runner)
        return reason, len(runner.ran)

    assert after_an_hour_on("h200") == (StopReason.DOLLARS_SPENT, 0)
    assert after_an_hour_on("a10") == (StopReason.TRIALS_SPENT, 2)


def test_what_measuring_a_winner_again_may_cost_can_be_raised() -> None:
    gpu = a_gpu("a10")
    request = RunRequest(space="a10", overrides={"max_dollars": 1.0}, study="paid")
    stored = prepare(request, read_gpu=lambda: gpu)
    for typed, dollars in ((None, 1.0), (2.0, 2.0)):
        asked = {"confirm": {}, "max_dollars": typed, "read_gpu": lambda: gpu}
        assert prepare_again("paid", stored.definition, **asked).space.max_dollars == dollars
