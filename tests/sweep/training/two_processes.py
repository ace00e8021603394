"""Runs a module of this directory as two processes that find each other by a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SECONDS = 180


def told_by_two(
    module: str, *, directory: Path, device: str, compiles: bool = False
) -> list[list[str]]:
    """Return the words of the last line that each of them prints."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment["TORCHDYNAMO_DISABLE"] = str(int(not compiles))
    command = [sys.executable, "-m", f"tests.sweep.training.{module}"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(directory / f"{module}-meeting"), device],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    return [lines.splitlines()[-1].split() for lines in said]
