"""Measure every committed data file again on the GPU that is here, and say what moved.

    python -m tests.bench.remeasure OUTDIR [--only NAME]... [--seconds 540]

Beside each file stands ``NAME.meta.json``: command, GPU, driver, versions, date, and whether the
file is whole. A second call goes on where the first ran out of time. Nothing committed is changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.moved import Moved, Row, compare, read_rows
from tests.bench.stamp import OUT_OF_TIME, stamp

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tests" / "bench"
DATA = ROOT / "tests" / "data"
LEAST_SECONDS = 20.0
"""A command that has less is not started: its imports alone take that."""
_SWEEP = "from sweep.cli import main; main()"
STUDIES = ("steps-0", "steps-1")

Command = list[str]
Commands = Callable[[Path, float], list[Command]]
"""From a file to write and the seconds that are left to the commands that write it."""


@dataclass(frozen=True)
class Producer:
    """How one committed file is made."""

    committed: Path
    commands: Commands

    def written(self, folder: Path) -> Path:
        """Return where the new version is written."""
        return folder / self.committed.name


def _bench(script: str, *arguments: object) -> Command:
    return [sys.executable, str(BENCH / script), *map(str, arguments)]


def _table(out: Path, seconds: float, *more: object) -> list[Command]:
    return [_bench("measure_table.py", out, "--known", out, "--seconds", seconds, *more)]


def _edges(out: Path, seconds: float) -> list[Command]:
    configs = BENCH / "edges_a10.jsonl"
    return [_bench("edges.py", "a10", configs, out, "--seconds", seconds)]


def _study_steps(out: Path, seconds: float) -> list[Command]:
    """Two whole studies; each goes on where it stopped, and has its own time budget."""
    del seconds
    space, sweep = BENCH / "a10_rank16.yaml", [sys.executable, "-P", "-c", _SWEEP, "run"]
    runs = [
        [*sweep, str(space), "--study", study, "--seed", str(seed)]
        for seed, study in enumerate(STUDIES)
    ]
    return [*runs, _bench("study_steps.py", out, *STUDIES)]


def _studies(out: Path, seconds: float) -> list[Command]:
    """A study of an H100's own preset, and one of the A10's with memory capped."""
    del seconds
    asked = ["--rank", "16", "--target-modules", "attention"]
    runs = [
        [sys.executable, "-P", "-c", _SWEEP, "run", preset, *asked, "--study", preset]
        for preset in ("h100-80gb", "a10")
    ]
    return [*runs, _bench("study_steps.py", out, "h100-80gb", "a10")]


def _reference(out: Path, seconds: float) -> list[Command]:
    del seconds
    return [_bench("reference.py", "a10", out)]


PRODUCERS: dict[str, Producer] = {
    "reference": Producer(BENCH / "results" / "a10_reference.jsonl", _reference),
    "measurements": Producer(DATA / "measurements_h200.jsonl", _table),
    "edges": Producer(DATA / "edges_h200.jsonl", _edges),
    "held_out": Producer(
        DATA / "held_out_h200.jsonl",
        lambda out, seconds: _table(out, seconds, "--held-out", DATA / "models"),
    ),
    "compiled": Producer(
        DATA / "compiled_h200.jsonl",
        lambda out, seconds: [_bench("compiled_peaks.py", out, "--seconds", seconds)],
    ),
    "eight_bit": Producer(
        DATA / "eight_bit_h200.jsonl",
        lambda out, seconds: [
            _bench("compiled_peaks.py", out, "--seconds", seconds, "--rows", "eight_bit_h200.jsonl")
        ],
    ),
    "new_models": Producer(
        DATA / "new_models_h200.jsonl",
        lambda out, seconds: [_bench("new_models.py", "-o", out, "--seconds", seconds)],
    ),
    "packed": Producer(
        DATA / "packed_h200.jsonl",
        lambda out, seconds: [_bench("packed_rows.py", out, "--seconds", seconds)],
    ),
    "several_cards": Producer(
        DATA / "several_cards_h200.jsonl",
        lambda out, seconds: [_bench("several_cards.py", out, "--seconds", seconds)],
    ),
    "study_steps": Producer(DATA / "study_steps_h200.jsonl", _study_steps),
    "studies": Producer(DATA / "studies_h100.jsonl", _studies),
}


def run(commands: list[Command], *, deadline: float, log: Path) -> bool:
    """Run commands in order until the deadline; return whether all of them finished."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    for command in commands:
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            return False
        with log.open("ab") as output:
            try:
                done = subprocess.run(
                    command,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=left,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return False
        if done.returncode == OUT_OF_TIME:
            return False
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} exited {done.returncode}; see {log}")
    return True


def remeasure(name: str, folder: Path, *, deadline: float) -> Moved:
    """Measure one file again and write down where, with what, and what moved."""
    producer = PRODUCERS[name]
    out = producer.written(folder)
    # Whoever ends by itself keeps its last row whole; the deadline is for one that does not.
    seconds = deadline - time.monotonic() - LEAST_SECONDS
    is_complete = run(
        producer.commands(out, seconds), deadline=deadline, log=folder / f"{name}.log"
    )
    rows = read_rows(out)
    moved = compare(read_rows(producer.committed), rows)
    describe(out, rows, is_complete=is_complete, moved=moved)
    return moved


def describe(out: Path, rows: list[Row], *, is_complete: bool, moved: Moved) -> None:
    """Write what stands beside a file."""
    document: dict[str, Any] = {
        **stamp(),
        "file": out.name,
        "rows": len(rows),
        "is_complete": is_complete,
        "moved": asdict(moved),
    }
    path = out.with_suffix(".meta.json")
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path, metavar="OUTDIR")
    arguments.add_argument("--only", choices=PRODUCERS, action="append", metavar="NAME")
    arguments.add_argument("--seconds", type=float, default=540.0)
    options = arguments.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    for name in options.only or PRODUCERS:
        if deadline - time.monotonic() < LEAST_SECONDS:
            print(f"{name}: no time left; the same command goes on from here", flush=True)
            continue
        moved = remeasure(name, options.folder, deadline=deadline)
        print("\n".join(moved.lines(name)), flush=True)


if __name__ == "__main__":
    main()
