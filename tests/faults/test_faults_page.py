"""The page says what the harness tries: nobody changes one of them alone."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.operations import OPERATIONS

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


def test_the_page_lists_every_operation_with_everything_that_befalls_it() -> None:
    rows = re.findall(r"^\| ([^|]+) \| \d+ \| ([^|]+) \| [^|]+ \|$", PAGE.read_text("utf-8"), re.M)
    listed = {
        operation: tuple(re.sub(r" \d+$", "", kind) for kind in kinds.split(", "))
        for operation, kinds in rows
    }
    assert listed == {name: known.kinds for name, known in OPERATIONS.items()}
