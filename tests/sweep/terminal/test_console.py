"""Text that fits where it is shown, and what is shown while something takes long."""

from __future__ import annotations

import sys
import time

import pytest

from qlora_sweep.sweep.terminal import console
from qlora_sweep.sweep.terminal.console import (
    announce_if_slow,
    folded,
    note,
    working,
)
from qlora_sweep.sweep.terminal.drawing import table
from tests.sweep.terminal.screen import Screen

COMMAND = "  sweep export a10 --format script --storage sqlite:///somewhere.db"
PATH = "report: /a/rather/long/path/of/a/report.html"


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("one two three", None, "one two three"),
        # Lines hang below their beginning; commands and paths stay whole to be copied.
        ("  - one two three four five six", 16, "  - one two\n    three four\n    five six"),
        (COMMAND, 20, COMMAND),
        (PATH, 20, PATH.replace(" ", "\n  ")),
        # What works unseen is written out.
        ("a\x1b[2Jb\u202ec", 80, "a\\x1b[2Jb\\u202ec"),
    ],
)
def test_lines_are_folded_between_words(text: str, width: int | None, shown: str) -> None:
    assert folded(text, width, indent=2) == shown


ROWS = [("night", "12", "a configuration that takes a whole sentence to describe"), ("b", "1", "x")]


@pytest.mark.parametrize("width", [30, 200, None])
def test_a_table_goes_into_the_width_that_there_is(width: int | None) -> None:
    lines = table(("study", "trials", "what was the best of it"), ROWS, width=width).splitlines()
    assert "describe" in " ".join(lines)
    if width is None:
        assert len(lines) == 3
    else:
        assert max(map(len, lines)) <= width


def test_only_a_long_silence_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    announce_if_slow("Loading ...", seconds=0.05)
    note("error: at once")
    time.sleep(0.1)
    assert capsys.readouterr().err == "error: at once\n"
    announce_if_slow("Loading ...", seconds=0.01)
    time.sleep(0.2)
    assert capsys.readouterr().err == "Loading ...\n"


def test_a_silence_is_broken_by_what_is_done_and_for_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with working("predicting") as progress:
        progress("steps replayed")(3, 36)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.02)
    with working("predicting") as progress:
        time.sleep(0.2)
        progress("steps replayed")(3, 36)
        time.sleep(0.2)
    out, err = capsys.readouterr()
    first, *_, last = err.splitlines()
    assert out == ""
    assert "predicting" in first
    assert "3 of 36 steps replayed" in last
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_what_is_done_and_how_far_tracing_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen(80))
    with working("predicting") as progress:
        progress("structures traced")(3, 36)
    with working("predicting"):
        pass
    assert "predicting" in screen.getvalue()
    assert "3 of 36 structures" in screen.getvalue()
    assert capsys.readouterr().out == ""
