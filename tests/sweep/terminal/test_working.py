"""What is shown while something takes long: on stderr, and never in the way of a result."""

from __future__ import annotations

import io
import sys
import time
from itertools import pairwise

import pytest

from sweep.terminal import working as working_module
from sweep.terminal.working import working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize(("what", "first"), [("structures traced", 0), ("MB looked at", 2)])
def test_without_a_terminal_lines_say_how_far_it_is_and_in_time_more_seldom(
    what: str, first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within two seconds at first; what is sure to take longer is said at once, and once."""
    clock = Clock()
    with working("predicting", clock=clock) as progress:
        for second in range(130):
            for _ in range(2):
                progress(what)(second, 1000)
            clock.seconds += 1.0
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    seconds = [int(line.partition(" ")[0]) for line in lines]
    assert lines == [f"{second} of 1000 {what}" for second in seconds]
    assert seconds[0] == first
    assert max(after - before for before, after in pairwise([0, *seconds[:10]])) <= 2
    later = [after - before for before, after in pairwise(seconds[10:])]
    assert later == sorted(later)
    assert len(seconds) < 20


@pytest.mark.parametrize("of", [0, 3])
def test_what_is_done_at_once_is_not_worth_a_line(
    of: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with working("predicting", clock=Clock()) as progress:
        for done in range(of + 1):
            progress("steps replayed")(done, of)
    assert capsys.readouterr() == ("", "")


def test_a_silence_is_broken_by_what_goes_on_and_for_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(working_module, "SILENCE_SECONDS", 0.02)
    with working("predicting") as progress:
        time.sleep(0.2)
        progress("steps replayed")(3, 36)
        time.sleep(0.2)
    time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 4
    assert lines[0] == "predicting (0 s)"
    assert lines[-1] == "3 of 36 steps replayed (0 s)"
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_what_is_done_and_how_far_tracing_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with working("predicting") as progress:
        progress("structures traced")(3, 36)
    assert "3 of 36 structures" in terminal.getvalue()
    with working("predicting"):
        pass
    assert "predicting" in terminal.getvalue()
    assert capsys.readouterr().out == ""
