"""What a new measurement says of an old one: which rows moved by more than their noise.

Memory repeats to the byte, so any other byte has moved. Speed has moved where the two rows' ranges
of steps do not meet.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig, parse_config

Row = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """One row that is not what it was."""

    what: str
    """Model and what of the configuration is not the default."""
    old: float | str
    new: float | str

    @property
    def ratio(self) -> float | None:
        """New over old; None for verdicts."""
        if isinstance(self.old, str) or isinstance(self.new, str):
            return None
        return self.new / self.old

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f" (x {self.ratio:.4f})"
        return f"{self.what}: {self.old} -> {self.new}{ratio}"


@dataclass
class Moved:
    """What moved between two versions of a file."""

    rows_old: int
    rows_new: int
    rows_common: int = 0
    allocated: list[Change] = field(default_factory=list)
    reserved: list[Change] = field(default_factory=list)
    seconds: list[Change] = field(default_factory=list)
    verdicts: list[Change] = field(default_factory=list)
    speed_ratio_median: float | None = None
    """Of the step's seconds, new over old, over all rows: the machine's own pace."""

    def lines(self, name: str) -> list[str]:
        """Return what a person reads: how many rows moved, and the worst of each kind."""
        pace = f", pace x {self.speed_ratio_median:.3f}" if self.speed_ratio_median else ""
        head = f"{name}: {self.rows_common} of {self.rows_old} rows measured again{pace}"
        result = [head]
        for kind in ("allocated", "reserved", "seconds", "verdicts"):
            changes: list[Change] = getattr(self, kind)
            worst = max(changes, key=_size, default=None)
            tail = "" if worst is None else f"; the most: {worst}"
            result.append(f"  {kind}: {len(changes)} moved{tail}")
        return result


def compare(old: Sequence[Row], new: Sequence[Row]) -> Moved:
    """Return what moved. Rows of one model and configuration are one, in their order."""
    result = Moved(rows_old=len(old), rows_new=len(new))
    waiting = _by_key(new)
    ratios = []
    for before in old:
        found = waiting.get(_key(before))
        if not found:
            continue
        after = found.pop(0)
        result.rows_common += 1
        what = _described(before)
        _note(result.verdicts, what, before, after, "verdict")
        _note(result.allocated, what, before, after, "peak_allocated_bytes")
        _note(result.reserved, what, before, after, "peak_reserved_bytes")
        if "step_seconds" in before and "step_seconds" in after:
            ratios.append(after["step_seconds"] / before["step_seconds"])
            if _are_apart(_range(before), _range(after)):
                _note(result.seconds, what, before, after, "step_seconds")
    result.speed_ratio_median = statistics.median(ratios) if ratios else None
    return result


def _note(into: list[Change], what: str, before: Row, after: Row, key: str) -> None:
    if key in before and key in after and before[key] != after[key]:
        into.append(Change(what, before[key], after[key]))


def _size(change: Change) -> float:
    return 0.0 if change.ratio is None else abs(change.ratio - 1.0)


def _range(row: Row) -> tuple[float, float]:
    times = row.get("step_times") or row.get("step_seconds_ci95") or [row["step_seconds"]]
    return min(times), max(times)


def _are_apart(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[1] < other[0] or other[1] < one[0]


def _by_key(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    result: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        result.setdefault(_key(row), []).append(row)
    return result


def _key(row: Row) -> tuple[str, str]:
    return row["model"], parse_config(row["config"]).key()


def _described(row: Row) -> str:
    config = parse_config(row["config"])
    changes = config.changes_from(TrialConfig())
    return f"{row['model']} {json.dumps(changes)}"


def read_rows(path: Path) -> list[Row]:
    """Return a file's documents, one a line; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
