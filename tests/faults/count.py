"""Counts what the sweeps over the n-th operation try, for the page that says so.

Run as ``python -m tests.faults.count [CASES]``: prints the page's table, with at most about so many
cases of each kind of fault at each operation, spread over the study; without it, with all.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata

from tests.faults.kinds import Fault
from tests.faults.nth_operation import (
    Swept,
    adopt_orphans,
    drive,
    in_a_process,
    new_place,
    sweep,
)
from tests.faults.operations import OPERATIONS

HEAD = "| operation | in a study | what goes wrong, and in how many runs | broken promises |"
_NEVER = 10**9


@dataclass(frozen=True)
class Row:
    """One operation with all that befell it."""

    operation: str
    in_a_study: int
    sweeps: tuple[Swept, ...]

    def __str__(self) -> str:
        kinds = ", ".join(f"{swept.kind} {swept.cases}" for swept in self.sweeps)
        broken = sum(len(swept.broken) for swept in self.sweeps)
        return f"| {self.operation} | {self.in_a_study} | {kinds} | {broken} |"


def operations_in_a_study(operation: str) -> int:
    """Return how many there are where nothing goes wrong."""
    fault = Fault(operation, OPERATIONS[operation].kinds[0], _NEVER)
    with new_place(operation) as place:
        in_a_process(place, lambda: drive(place, fault))
        return len(place.said("message")) or int(place.said("counted")[0][0])


def rows(cases: int | None) -> Iterator[Row]:
    """Sweep every operation and yield what came of it."""
    for operation, known in OPERATIONS.items():
        total = operations_in_a_study(operation)
        stride = 1 if cases is None else max(1, total // cases)
        sweeps = tuple(sweep(operation, kind, stride=stride) for kind in known.kinds)
        yield Row(operation, total, sweeps)


def main() -> None:
    """Print the table, and below it what it was counted with."""
    adopt_orphans()
    cases = int(sys.argv[1]) if sys.argv[1:] else None
    print(HEAD, "|---|---|---|---|", sep="\n")
    total = 0
    for row in rows(cases):
        total += sum(swept.cases for swept in row.sweeps)
        print(row, flush=True)
        for swept in row.sweeps:
            print(*swept.broken, sep="\n", file=sys.stderr)
    versions = [f"{name} {metadata.version(name)}" for name in ("optuna", "SQLAlchemy")]
    print(
        f"\nCounted on {datetime.now(UTC):%Y-%m-%d}: {total} runs in all; "
        f"Python {platform.python_version()}, {', '.join(versions)}, {platform.system()} "
        f"{platform.machine()}."
    )


if __name__ == "__main__":
    main()
