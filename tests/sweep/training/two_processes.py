"""Runs a module of this directory as two processes that find each other by a file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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


def tell_as_one_of_two(words: Callable[[Any, Path], Iterable[Any]]) -> None:
    """Join the other process, as the command line says, and print what this one has to say.

    Args:
        words: of a device and the directory.
    """
    import torch

    from qlora_sweep.sweep.training.process_group import join, leave

    rank = int(sys.argv[1])
    rendezvous = Path(sys.argv[2])
    device = torch.device(sys.argv[3])
    if device.type == "cuda":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    join(rank, 2, rendezvous=rendezvous, device=device)
    print(*words(device, rendezvous.parent))
    leave()
