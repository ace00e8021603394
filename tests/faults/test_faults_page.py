"""The page says what the harness tries: nobody changes one of them alone."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.operations import OPERATIONS

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
ROWS = re.findall(r"^\| ([^|]+) \| (\d+) \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text("utf-8"), re.M)


def test_the_page_lists_every_operation_with_everything_that_befalls_it() -> None:
    listed = {
        operation: tuple(re.sub(r" \d+$", "", kind) for kind in kinds.split(", "))
        for operation, _, kinds, _ in ROWS
    }
    assert listed == {name: known.kinds for name, known in OPERATIONS.items()}


def test_everything_on_the_page_was_counted_and_nothing_is_broken() -> None:
    for operation, in_a_study, kinds, broken in ROWS:
        assert int(in_a_study) > 0, operation
        assert all(re.search(r" [1-9]\d*$", kind) for kind in kinds.split(", ")), operation
        assert broken == "0", operation


def test_the_sum_on_the_page_is_that_of_its_rows() -> None:
    cases = sum(int(number) for _, _, kinds, _ in ROWS for number in re.findall(r"\d+", kinds))
    assert f"{cases} runs in all" in PAGE.read_text("utf-8")
