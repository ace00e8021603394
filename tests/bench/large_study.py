"""How long looking takes: at a study of many trials, and at a database of many studies.

    python -m tests.bench.large_study [--trials 10000] [--studies 200] [--repeats 3]
                                      [--against CHECKOUT]

Every command is a process of its own, imports included. Its processor time is stated beside the
wall clock, which on a machine with other work says little; of several runs the least counts. With
another checkout the same commands of that one read the same databases, turn by turn. What was tried
is stored in bulk, as a driver would have stored it trial by trial. Needs no device.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from storage.records import TrialRecord
from tests.bench.long_study import NAME, a_space, records, store
from tests.bench.stamp import stamp

TRIALS_EACH = 50
"""Of every study of the database with many."""
COMMAND = "import sys; from sweep.cli import main; sys.exit(main())"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Took:
    """What one process took."""

    wall_seconds: float
    cpu_seconds: float
    """In user and kernel mode."""


def took(arguments: Sequence[str], *, home: Path, checkout: Path) -> Took:
    """Run a command of a checkout and return what it took."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "SWEEP_HOME": str(home)}
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", COMMAND, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"sweep {' '.join(arguments)} ended with {process.returncode}: {said}")
    cpu = usage.ru_utime + usage.ru_stime
    return Took(time.perf_counter() - started, cpu)


def least(runs: Sequence[Took]) -> Took:
    """Return the run that the rest of the machine disturbed the least."""
    return min(runs, key=lambda run: run.cpu_seconds)


def main() -> None:
    """Print a line for each command and checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--studies", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path)
    asked = parser.parse_args()
    checkouts = {"here": ROOT} | ({"against": asked.against} if asked.against else {})
    print(json.dumps(stamp()))
    print(f"{'what':<28} {'command':<18} {'code':<8} {'CPU s':>6} {'wall s':>7}")
    with tempfile.TemporaryDirectory() as directory:
        one, many = Path(directory) / "one", Path(directory) / "many"
        known = list(records(a_space(), asked.trials))
        _store(one, {NAME: known})
        what = f"{asked.trials:,} trials, {_mib(one):.0f} MiB"
        for arguments in (
            ["status"],
            ["status", NAME],
            ["best", NAME],
            ["report", NAME, "-o", "-"],
        ):
            _show(what, arguments, one, checkouts, asked.repeats)
        few = known[:TRIALS_EACH]
        _store(many, {f"study-{number}": few for number in range(asked.studies)})
        _show(
            f"{asked.studies} studies, {_mib(many):.0f} MiB",
            ["status"],
            many,
            checkouts,
            asked.repeats,
        )


def _store(home: Path, studies: dict[str, list[TrialRecord]]) -> None:
    runs = home / "runs"
    runs.mkdir(parents=True)
    for name, known in studies.items():
        store(f"sqlite:///{runs / 'sweep.db'}", runs, a_space(), known, name=name)


def _as_an_earlier_version(home: Path) -> None:
    """Take from the records what an earlier checkout would not know: that no attempt is named."""
    with closing(sqlite3.connect(home / "runs" / "sweep.db")) as connection, connection:
        connection.execute(
            "UPDATE trial_user_attributes SET value_json = "
            "replace(value_json, '\"attempt_id\": null, ', '') WHERE key = 'record'"
        )


def _mib(home: Path) -> float:
    return (home / "runs" / "sweep.db").stat().st_size / 2**20


def _show(
    what: str, arguments: Sequence[str], home: Path, checkouts: dict[str, Path], repeats: int
) -> None:
    if len(checkouts) > 1:
        _as_an_earlier_version(home)
    runs: dict[str, list[Took]] = {name: [] for name in checkouts}
    for _ in range(repeats):
        for name, checkout in checkouts.items():
            runs[name].append(took(arguments, home=home, checkout=checkout))
    for name in checkouts:
        best = least(runs[name])
        command = " ".join(arguments)
        print(f"{what:<28} {command:<18} {name:<8} {best.cpu_seconds:>6.2f}", end="")
        print(f" {best.wall_seconds:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
