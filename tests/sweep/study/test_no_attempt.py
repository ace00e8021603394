"""What ends a trial from outside is no attempt of its configuration, however often that happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import CardLost, EnvironmentFault
from storage.ledger import MAX_ATTEMPTS, attempts
from storage.records import Lost, Measured, Outcome, TrialRecord, Verdict
from storage.study import OpenStudy
from sweep.running.replay import ReplayRunner
from sweep.study.events import Event, Interruption, StopReason, TrialProgress, TrialStarted
from tests.sweep.simulated_device import a_study, train
from tests.sweep.study.driven import a_grid, drive
from tests.sweep.study.test_confirmation import SPACE, soaking
from tests.sweep.study.test_tuner import ONE

AGAIN = range(MAX_ATTEMPTS + 1)
"""So often that it would be given up, were it counted."""


def asked_in(study: OpenStudy, *, when: Callable[[Event], bool], times: int) -> StopReason:
    """Drive a study in which somebody asks to stop so often at once at an event."""
    runner = ReplayRunner(otherwise=train, soaking=soaking)
    interruption = Interruption(cancel=runner.cancel)

    def on_event(event: Event) -> None:
        if when(event) and not interruption.is_requested():
            for _ in range(times):
                interruption.request()

    try:
        return drive(study, runner, on_event=on_event, interruption=interruption)
    except KeyboardInterrupt:
        return StopReason.INTERRUPTED


def untried(records: tuple[TrialRecord, ...]) -> bool:
    return all(attempts(records, record.config) == 0 for record in records)


def is_measuring(event: Event) -> bool:
    return isinstance(event, TrialProgress) and event.progress.phase == "measure"


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize(
    "when", [is_measuring, lambda event: isinstance(event, TrialStarted)], ids=["runs", "begins"]
)
def test_a_trial_that_is_interrupted_again_and_again_is_tried_again(
    tmp_path: Path, times: int, when: Callable[[Event], bool]
) -> None:
    for _ in AGAIN:
        with a_study(tmp_path, **ONE) as study:
            assert asked_in(study, when=when, times=times) is StopReason.INTERRUPTED
    with a_study(tmp_path, **ONE) as study:
        drive(study)
        *interrupted, last = study.records()
    assert last.verdict is Verdict.FITS
    assert last.attempt == 1
    assert untried(tuple(interrupted))


@pytest.mark.parametrize("moment", [TrialStarted, TrialProgress])
@pytest.mark.parametrize("purpose", ["confirm", "soak"])
def test_a_run_of_a_confirmation_that_is_interrupted_again_and_again_is_run_again(
    tmp_path: Path, purpose: str, moment: type[Event]
) -> None:
    errands: list[str] = []

    def when(event: Event) -> bool:
        if isinstance(event, TrialStarted):
            errands.append(event.errand.purpose)
        return isinstance(event, moment) and errands[-1] == purpose

    for times in (1, 2, 3, 1):
        with a_grid(tmp_path, **SPACE) as study:
            assert asked_in(study, when=when, times=times) is StopReason.INTERRUPTED
    with a_grid(tmp_path, **SPACE) as study:
        drive(study, ReplayRunner(otherwise=train, soaking=soaking))
        known = study.confirmations()
    measured = [r for r in known if isinstance(r.outcome, Measured)]
    assert [r.config.micro_batch_size for r in measured] == [10, 8, 10, 8, 10]
    assert untried(tuple(r for r in known if r not in measured))


class FullCard(ReplayRunner):
    """A runner whose device is taken by somebody else, so often."""

    def __init__(self, fault: EnvironmentFault, *, after: int = 0) -> None:
        super().__init__(otherwise=self._answer, soaking=soaking)
        self._fault, self._left = fault, after

    def _answer(self, config: TrialConfig) -> Outcome:
        self._left -= 1
        if self._left < 0:
            raise self._fault
        return train(config)


NO_DEVICE = EnvironmentFault("the worker cannot use the device: all of it is taken")
LOST = CardLost("the worker did not end within 20 s of SIGKILL")


@pytest.mark.parametrize(("fault", "after"), [(NO_DEVICE, 0), (LOST, 0), (NO_DEVICE, 3)])
def test_a_device_that_is_not_to_be_had_costs_no_attempt(
    tmp_path: Path, fault: EnvironmentFault, after: int
) -> None:
    left = after
    for _ in AGAIN:
        with a_grid(tmp_path, **SPACE) as study:
            with pytest.raises(type(fault)) as raised:
                drive(study, FullCard(fault, after=left))
            assert raised.value is fault
        left = 0
    with a_grid(tmp_path, **SPACE) as study:
        study.recover()
        known = (*study.records(), *study.confirmations())
        assert untried(tuple(r for r in known if not isinstance(r.outcome, Measured)))
        drive(study, ReplayRunner(otherwise=train, soaking=soaking))
        again = [r for r in study.records() if r.verdict is not Verdict.LOST]
    assert sorted(r.config.micro_batch_size for r in again) == [4, 8, 10]
    assert {record.attempt for record in again} == {1}


def test_of_a_lost_card_the_trial_says_so_and_what_was_measured_stays(tmp_path: Path) -> None:
    with a_grid(tmp_path, **SPACE) as study:
        with pytest.raises(CardLost):
            drive(study, FullCard(LOST, after=1))
        first, last = study.records()
    assert first.verdict is Verdict.FITS
    assert isinstance(last.outcome, Lost)
    assert last.is_interrupted
    assert "the GPU was lost" in last.outcome.detail


def test_what_a_silent_database_does_not_hear_is_in_the_spool(tmp_path: Path) -> None:
    def away() -> None:
        raise EnvironmentFault("the database does not answer")

    for _ in AGAIN:
        with a_study(tmp_path, **ONE) as study:
            study._close_running = lambda besides: away()  # type: ignore[method-assign]
            with pytest.raises(EnvironmentFault):
                drive(study, FullCard(NO_DEVICE))
    with a_study(tmp_path, **ONE) as study:
        drive(study)
        *earlier, last = study.records()
    assert last.verdict is Verdict.FITS
    assert untried(tuple(earlier))


def test_a_driver_that_was_killed_is_still_counted(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def die(_: TrialConfig) -> Outcome:
        raise Killed

    for _ in range(MAX_ATTEMPTS):
        with a_study(tmp_path, **ONE) as study, pytest.raises(Killed):
            drive(study, die)
    with a_study(tmp_path, **ONE) as study:
        study.recover()
        records = study.records()
    assert attempts(records, records[0].config) == MAX_ATTEMPTS


def test_a_result_that_the_database_cannot_hear_at_once_is_in_the_spool(tmp_path: Path) -> None:
    """The second request cuts short the telling, once the spool has had the time to have it."""
    now = [0.0]
    runner = ReplayRunner(otherwise=train)
    interruption = Interruption(cancel=runner.cancel, clock=lambda: now[0])

    def silent(*_: object, **__: object) -> bool:
        now[0] += 10.0
        interruption.request()
        interruption.request()
        raise AssertionError("it was not cut short")

    with a_study(tmp_path, **ONE) as study:
        study._store = silent  # type: ignore[method-assign]
        reason = drive(study, runner, interruption=interruption)
    assert reason is StopReason.INTERRUPTED
    with a_study(tmp_path, **ONE) as study:
        study.recover()
        (record,) = study.records()
    assert record.verdict is Verdict.FITS
    assert len(runner.ran) == 1


def test_a_calendar_clock_that_jumps_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is waited for, spent and stopped by is counted by a clock that nobody sets."""
    jumps = iter(range(10**9, 10**10, 10**7))
    monkeypatch.setattr("time.time", lambda: next(jumps) * (-1) ** (next(jumps) // 10**7))
    with a_study(tmp_path, trials=3, time_budget_seconds=3600) as study:
        assert drive(study, clock=time.monotonic) is StopReason.TRIALS_SPENT
        assert all(0 <= r.wall_seconds < 60 for r in study.records())
        assert 0 <= study.wall_seconds() < 60
