"""Cases of a test as a table in text, where Python would say the same names on every line."""

from __future__ import annotations

from typing import Any

import yaml


def cases(table: str) -> list[tuple[Any, ...]]:
    """Return the cells of each line, which stand between bars, each read as YAML.

    A line that begins with ``#`` says something of those below it. Where the last cells of a line
    are left out, they are None.
    """
    rows: list[list[Any]] = []
    for line in table.strip().splitlines():
        if not line.startswith("#"):
            rows.append([yaml.safe_load(cell) for cell in line.split(" |")])
    width = max(map(len, rows))
    return [tuple(row + [None] * (width - len(row))) for row in rows]
