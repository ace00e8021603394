"""What is shown while something takes long: on stderr, and never in the way of a result."""

from __future__ import annotations

import io
import sys

import pytest

from sweep.terminal import working as working_module
from sweep.terminal.working import fit_words, is_worth_a_line, replay_words, working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_only_tracing_is_said_and_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with working("predicting") as on_progress:
        for done in range(3):
            on_progress(done, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"tracing the model's memory: {done} of 2 structures" for done in range(3)
    ]


def test_a_terminal_shows_what_is_done_and_how_far_tracing_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with working("predicting") as on_progress:
        on_progress(3, 36)
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


def test_what_is_quick_is_not_said_where_each_time_takes_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with working("predicting") as told:
        for done in range(100):
            told(done, 100, words=fit_words)
    assert capsys.readouterr().err == ""


def test_what_takes_seconds_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working_module, "QUIET_SECONDS", 0.0)
    with working("predicting") as told:
        told(3, 7, words=replay_words)
    assert "3 of 7 steps" in capsys.readouterr().err
