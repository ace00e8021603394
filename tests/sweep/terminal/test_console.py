"""Text that fits where it is shown."""

from __future__ import annotations

import io
import time

import pytest

from sweep.terminal.console import announce_if_slow, folded, note, table, width_of
from tests.sweep.terminal.screen import Screen


def test_lines_are_folded_between_words_and_hang_below_their_beginning() -> None:
    text = folded("  - one two three four five six", 16, indent=2)
    assert text == "  - one two\n    three four\n    five six"
    assert folded("one two three", None) == "one two three"


def test_commands_and_paths_stay_whole_to_be_copied() -> None:
    command = "  sweep export a10 --format script --storage sqlite:///somewhere.db"
    assert folded(command, 20) == command
    path = "report: /a/rather/long/path/of/a/report.html"
    assert path.split()[1] in folded(path, 20).splitlines()[-1].split()


@pytest.mark.parametrize("width", range(12, 40))
def test_a_number_is_not_parted_from_its_unit(width: int) -> None:
    text = folded("fits, 7,006 tokens/s in 12 min, 6.65 GiB (93 %): 10 x 512, rank 8", width)
    flat = text.splitlines()
    for whole in ("7,006 tokens/s", "12 min", "6.65 GiB", "(93 %):", "10 x 512,"):
        assert any(whole in line for line in flat), text
    assert max(map(len, flat)) <= max(width, 15)


HEADER = ("study", "trials", "what was the best of it")
ROWS = [("night", "12", "a configuration that takes a whole sentence to describe"), ("b", "1", "x")]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_a_table_goes_into_the_width_that_there_is(width: int) -> None:
    lines = table(HEADER, ROWS, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert "describe" in " ".join(lines)


def test_a_table_without_a_limit_has_a_line_a_row() -> None:
    assert len(table(HEADER, ROWS).splitlines()) == 3
    assert width_of(io.StringIO()) is None
    assert isinstance(width_of(Screen(80)), int)


def test_only_a_long_silence_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    announce_if_slow("Loading ...", seconds=0.05)
    note("error: at once")
    time.sleep(0.1)
    assert capsys.readouterr().err == "error: at once\n"
    announce_if_slow("Loading ...", seconds=0.01)
    time.sleep(0.2)
    assert capsys.readouterr().err == "Loading ...\n"


def test_what_works_unseen_is_written_out() -> None:
    text = "a\x1b[2Jb\u202ec"
    assert folded(text, None) == folded(text, 80) == "a\\x1b[2Jb\\u202ec"
    assert "\x1b" not in table(("name",), [(text,)])
