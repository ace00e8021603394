"""Files of rows as tests write and read them, and rows whose columns have their fields' names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qlora_sweep.sweep.data.files import Broken, DatasetSource
from qlora_sweep.sweep.data.kinds import KINDS, RowLayout

_OPTIONAL = ("prompt", "input", "system", "history", "tools", "chat_template_kwargs")


def layout_of(kind: str) -> RowLayout:
    return RowLayout(kind, {name: name for name in (*_OPTIONAL, *KINDS[kind])})


def written(path: Path, data: bytes | str) -> Path:
    """Write a file, in directories that may not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(data, str):
        data = data.encode()
    path.write_bytes(data)
    return path


def written_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as JSON lines."""
    return written(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def lines_of(path: Path) -> list[tuple[int, dict[str, Any] | Broken]]:
    """Return the rows of a file, each with its line."""
    return [(place.line, fields) for place, fields in DatasetSource(str(path))]
