from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage.records import Lost, Verdict
from sweep.study.interruption import Interruption
from tests.sweep.simulated_device import a_study

ROOT = Path(__file__).parents[3]


@contextmanager
def a_slow_study(
    home: Path, *, beat_seconds: float, until: str = "1 attach", slow: str = "trial"
) -> Iterator[subprocess.Popen[str]]:
    """Start the program and wait until it says so: the trial's number and its phase."""
    command = [
        sys.executable,
        "-m",
        "tests.sweep.study.slow_study",
        str(home),
        str(beat_seconds),
        slow,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.strip() == until:
                    break
            yield process
        finally:
            process.kill()


def verdicts(home: Path) -> list[Verdict]:
    with a_study(home) as study:
        study.recover()
        return [record.verdict for record in study.records()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_lets_the_running_trial_finish(tmp_path: Path, number: signal.Signals) -> None:
    with a_slow_study(tmp_path, beat_seconds=0.02) as process:
        process.send_signal(number)
        assert process.wait(timeout=60) == 130
    assert Verdict.LOST not in verdicts(tmp_path)
    assert len(verdicts(tmp_path)) == 2


def test_two_signals_stop_at_once_and_the_study_can_go_on(tmp_path: Path) -> None:
    with a_slow_study(tmp_path, beat_seconds=0.5, until="0 attach") as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=5) == 130
    with a_study(tmp_path) as study:
        retried = study.recover()
        last = study.records()[-1]
    assert isinstance(last.outcome, Lost)
    assert retried == (last.config,)


@pytest.mark.parametrize(("slow", "until"), [("ask", "choosing"), ("check", "checking")])
def test_two_signals_stop_what_takes_long_between_trials(
    tmp_path: Path, slow: str, until: str
) -> None:
    with a_slow_study(tmp_path, beat_seconds=0.0, until=until, slow=slow) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
    with a_study(tmp_path) as study:
        study.recover()
        first = study.records()[0]
    assert first.verdict is not Verdict.LOST


def test_a_second_request_never_cuts_the_telling_short() -> None:
    cancelled: list[bool] = []
    interruption = Interruption(cancel=lambda: cancelled.append(True))
    with interruption.interruptible():
        interruption.request()
    interruption.request()
    assert cancelled == [True]
    with pytest.raises(KeyboardInterrupt), interruption.interruptible():
        interruption.request()


def test_a_hangup_that_was_to_be_ignored_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interruption = Interruption(cancel=lambda: None)
        with interruption.handling_signals():
            signal.raise_signal(signal.SIGHUP)
        assert not interruption.is_requested()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_driver_that_was_killed_leaves_a_study_that_can_go_on(tmp_path: Path) -> None:
    with a_slow_study(tmp_path, beat_seconds=0.1) as process:
        process.kill()
        process.wait(timeout=60)
    with a_study(tmp_path) as study:
        retried = study.recover()
        assert list(retried) == [study.records()[1].config]
        assert study.records()[1].verdict is Verdict.LOST


@pytest.fixture
def listening() -> Iterator[None]:
    """A shell ignores SIGINT on behalf of what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
def test_a_third_request_is_the_defaults_business() -> None:
    cancelled: list[bool] = []
    interruption = Interruption(cancel=lambda: cancelled.append(True))
    before = signal.getsignal(signal.SIGINT)
    with interruption.handling_signals():
        signal.raise_signal(signal.SIGINT)
        assert interruption.is_requested()
        assert not cancelled
        signal.raise_signal(signal.SIGINT)
        assert cancelled == [True]
        assert signal.getsignal(signal.SIGINT) is before
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_signals_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interruption(cancel=lambda: None).handling_signals():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
