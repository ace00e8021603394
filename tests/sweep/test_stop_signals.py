from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qlora_sweep.sweep import stop_signals
from qlora_sweep.sweep.processes import STOP_SIGNALS
from tests.sweep.signals import handled_by


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    with handled_by(signal.SIG_DFL):
        yield


def raised_in_heard(number: signal.Signals) -> None:
    with stop_signals.heard():
        signal.raise_signal(number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_signal_interrupts_and_is_given_back_and_what_is_ignored_stays_so(
    number: signal.Signals,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        raised_in_heard(number)
    assert stop_signals.asked() == 1
    assert signal.getsignal(number) == signal.SIG_DFL
    signal.signal(number, signal.SIG_IGN)
    raised_in_heard(number)
    assert stop_signals.asked() == 0


def test_what_comes_while_an_object_is_freed_is_heard_a_moment_later(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Freed:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def work() -> None:
        with stop_signals.heard():
            freed = Freed()
            del freed
            time.sleep(60)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert time.monotonic() - began < 30
    assert capsys.readouterr().err == ""


PROGRAM = """
import signal
from qlora_sweep.sweep.stop_signals import heard
for n in (1, 2, 15): signal.signal(n, signal.SIG_DFL)
with heard():
    while True:
        try: signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt: print('swallowed', flush=True)
"""


def test_the_third_ends_the_process_whatever_it_is_at() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == stop_signals.INTERRUPTED
    assert (done.stdout.split(), done.stderr) == ([b"swallowed"] * 2, b"")
