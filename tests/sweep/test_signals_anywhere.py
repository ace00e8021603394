"""A signal at any moment of a short study, from the first line of the command to its last.

The moments are calls of our own functions, counted, so that a failure can be repeated. The GPU is
simulated; whatever else the command does it does for real.
"""

from __future__ import annotations

import itertools
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from qlora_sweep.storage.ledger import attempts
from qlora_sweep.storage.reading import read_study
from qlora_sweep.storage.records import Measured
from qlora_sweep.sweep import cli
from qlora_sweep.sweep.processes import STOP_SIGNALS
from tests.sweep.signals import handled_by
from tests.sweep.simulated_drive import simulate

ROOT = str(Path(cli.__file__).parents[1])
RUN = ("run", "cpu-demo", "--trials", "2", "--sampler", "random")
CALLS = 60_000
"""Of our functions while such a study runs, or fewer: then it ends before the signal."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    simulate(monkeypatch)
    with handled_by(signal.default_int_handler):
        yield tmp_path


def signalled(arguments: Sequence[str], at: Sequence[int], number: signal.Signals) -> int:
    """Run a command that gets a signal at some of its calls; return the exit code."""
    calls, moments = 0, set(at)

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(ROOT) or file == __file__:
            return
        calls += 1
        if calls in moments:
            signal.raise_signal(number)

    sys.setprofile(count)
    try:
        return cli.main(arguments)
    finally:
        sys.setprofile(None)


def moments(seed: int, count: int) -> list[tuple[int, signal.Signals, int]]:
    """Return when how many of which signal come: as many early moments as late ones.

    Before a study is opened the third would end this process, as it should.
    """
    chosen = random.Random(seed)
    early = [int(10 ** chosen.uniform(1.3, 3.6)) for _ in range(count // 2)]
    late = [int(chosen.uniform(4_000, CALLS)) for _ in range(count - count // 2)]
    return [
        (begin, chosen.choice(STOP_SIGNALS), chosen.choice((1, 2, 3) if begin in late else (1, 2)))
        for begin in (*early, *late)
    ]


@pytest.mark.parametrize(
    ("begin", "number", "times"),
    [
        *moments(1, 4),
        *(pytest.param(*moment, marks=pytest.mark.faults) for moment in moments(2, 100)),
    ],
)
def test_a_signal_at_any_moment_costs_nothing(
    home: Path, begin: int, number: signal.Signals, times: int
) -> None:
    at = [begin + 40 * more for more in range(times)]
    assert signalled(RUN, at, number) in (0, 130)
    assert signalled(RUN, (), number) == 0
    study = read_study("cpu-demo", url=f"sqlite:///{home}/runs/sweep.db", home=home / "runs")
    assert (study.running, study.holder) == ((), None)
    records = study.records
    concluded = [r for r in records if isinstance(r.outcome, Measured)]
    assert {attempts(records, r.config) for r in records} == {0}
    assert {r.attempt for r in concluded} == {1}
    assert len({r.config for r in records}) == 2


COMMANDS: tuple[tuple[str, ...], ...] = (
    ("best", "cpu-demo"),
    ("report", "cpu-demo"),
    ("export", "cpu-demo"),
    ("status", "cpu-demo"),
    ("presets",),
    ("init", "-o", "-"),
    ("plan", "a10", "--exact"),
)


def test_every_command_hears_every_signal(home: Path) -> None:
    assert signalled(RUN, (), signal.SIGINT) == 0
    for arguments, number in zip(COMMANDS, itertools.cycle(STOP_SIGNALS), strict=False):
        for begin in (3, 60):
            assert signalled(arguments, (begin,), number) in (0, 130), arguments
        assert signalled(arguments, (20,), number) == 130, arguments
