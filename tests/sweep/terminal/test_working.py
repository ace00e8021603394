"""What is shown while something takes long: on stderr, and never in the way of a result."""

from __future__ import annotations

import io
import sys

import pytest

from sweep.terminal.working import is_worth_a_line, working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_only_tracing_is_said_and_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with working("predicting") as progress:
        for done in range(3):
            progress("structures traced")(done, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"{done} of 2 structures traced" for done in range(3)]


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


@pytest.mark.parametrize("of", [1, 2, 3, 7, 100])
def test_the_lines_are_few_and_hold_the_first_and_the_last(of: int) -> None:
    said = [done for done in range(of + 1) if is_worth_a_line(done, of)]
    assert said[0] == 0
    assert said[-1] == of
    assert len(said) <= 5
