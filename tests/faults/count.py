"""Counts what the sweeps over the n-th operation try, for the page that says so.

Run as ``python -m tests.faults.count [CASES [OPERATION ...]]``: prints the page's table, with at
most so many cases of each kind of fault at each operation, spread over the study; else with all.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
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


def rows(cases: int | None, operations: Sequence[str]) -> Iterator[Row]:
    """Sweep operations and yield what came of each."""
    totals = {name: operations_in_a_study(name) for name in operations}
    # A driver is a fork of the process that sweeps, which may have no other thread.
    forking = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(os.cpu_count(), forking, initializer=adopt_orphans) as pool:
        asked = {
            name: [
                pool.submit(sweep, name, kind, stride=_stride(totals[name], cases))
                for kind in OPERATIONS[name].kinds
            ]
            for name in operations
        }
        for name, sweeps in asked.items():
            yield Row(name, totals[name], tuple(swept.result() for swept in sweeps))


def _stride(total: int, cases: int | None) -> int:
    """Return how many operations lie from one that is struck to the next; rounded up."""
    return 1 if cases is None else -(-total // cases)


def main() -> None:
    """Print the table, and below it what it was counted with."""
    adopt_orphans()
    cases = int(sys.argv[1]) if sys.argv[1:] else None
    print(HEAD, "|---|---|---|---|", sep="\n")
    total = 0
    for row in rows(cases, sys.argv[2:] or tuple(OPERATIONS)):
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
