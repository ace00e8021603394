"""Cases of a test as a table in text, where Python would say the same names on every line."""

from __future__ import annotations

from typing import Any

import yaml


def cases(table: str) -> list[tuple[Any, ...]]:
    """Return the cells of each line, which stand between bars, each read as YAML.

    A line that begins with ``#`` says something of those below it, one that begins with a bar
    continues the one above. Where the last cells of a line are left out, they are None.
    """
    rows: list[list[Any]] = []
    for line in map(str.strip, table.strip().splitlines()):
        if line.startswith("#"):
            continue
        if not line.startswith("|"):
            rows.append([])
        rows[-1] += [yaml.safe_load(cell) for cell in line.removeprefix("|").split(" |")]
    width = max(map(len, rows))
    return [tuple(row + [None] * (width - len(row))) for row in rows]


def column(table: str) -> list[Any]:
    """Return the values of a table with one cell a line."""
    return [value for (value,) in cases(table)]
