from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from qlora_sweep.sweep.processes import STOP_SIGNALS
from qlora_sweep.sweep.study.events import (
    SETTLING_SECONDS,
    TELLING_SECONDS,
    Interruption,
    undisturbed,
)


def test_a_request_never_cuts_the_telling_short_at_once() -> None:
    interruption = Interruption()
    with interruption.settling():
        interruption.request()
        interruption.request()
    with pytest.raises(KeyboardInterrupt), interruption.interruptible():
        interruption.request()


def test_a_hangup_that_was_to_be_ignored_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interruption = Interruption()
        with interruption.handling_signals():
            signal.raise_signal(signal.SIGHUP)
        assert not interruption.is_requested()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def listening() -> Iterator[None]:
    """A shell ignores SIGINT on behalf of what it starts in the background, and nohup SIGHUP."""
    before = {n: signal.signal(n, signal.default_int_handler) for n in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_second_request_waits_for_nothing_whichever_signal_it_is(number: signal.Signals) -> None:
    cancelled: list[bool] = []
    interruption = Interruption(cancel=lambda: cancelled.append(True))
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with interruption.handling_signals():
        signal.raise_signal(number)
        assert interruption.is_requested()
        assert cancelled == [True]
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_result_is_given_the_time_to_reach_the_disk_and_no_more() -> None:
    now = [0.0]
    interruption = Interruption(clock=lambda: now[0])
    interruption.request()
    with interruption.settling():
        now[0] = SETTLING_SECONDS / 2
        interruption.request()
        now[0] = SETTLING_SECONDS
        with pytest.raises(KeyboardInterrupt):
            interruption.request()


@pytest.mark.usefixtures("listening")
def test_who_is_told_what_came_of_it_is_not_disturbed_unless_that_hangs() -> None:
    now = [0.0]
    with undisturbed(clock=lambda: now[0]):
        for number in STOP_SIGNALS:
            signal.raise_signal(number)
        now[0] = TELLING_SECONDS
        for number in STOP_SIGNALS:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
