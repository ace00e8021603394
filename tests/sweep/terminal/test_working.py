"""What is shown while something takes long: on stderr, and never in the way of a result."""

from __future__ import annotations

import io
import sys
import time
from itertools import pairwise

import pytest

from sweep.terminal import console
from sweep.terminal.console import Rhythm, working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_wait_is_spoken_of_more_seldom_in_time() -> None:
    """Within two seconds at first, and at least once a minute."""
    now = 0.0
    rhythm, said = Rhythm(lambda: now), [0.0]
    for tenth in range(10 * 1200):
        now = tenth / 10
        if rhythm.is_due:
            rhythm.go_on()
            said.append(now)
    waits = [round(after - before, 1) for before, after in pairwise(said)]
    assert max(waits[:10]) <= 2
    assert waits[15:] == sorted(waits[15:])
    assert 59 <= waits[-1] <= 61
    assert len(said) < 45


def test_a_silence_is_broken_by_what_is_done_and_for_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with working("predicting") as progress:
        progress("steps replayed")(3, 36)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(console, "SILENCE_SECONDS", 0.02)
    with working("predicting") as progress:
        time.sleep(0.2)
        progress("steps replayed")(3, 36)
        time.sleep(0.2)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert len(lines) > 4
    assert lines[0] == "predicting (0 s)"
    assert lines[-1] == "3 of 36 steps replayed (0 s)"
    time.sleep(0.1)
    assert (out, capsys.readouterr().err) == ("", "")


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
