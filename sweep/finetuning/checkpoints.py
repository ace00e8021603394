"""Owns a training's checkpoints on the disk: a directory has its name once it is whole.

A checkpoint is written under a name that begins with a dot, waited for until the disk has it, and
renamed; so is one that goes, before it is removed. A kill at any moment leaves whole ones, and
leftovers that the next run removes. Knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
COURSE = "course.json"
"""What is known of the steps up to a checkpoint."""
KEPT = 2
_NAME = re.compile(r"checkpoint-(\d+)")
_WRITING, _REMOVING = ".writing-", ".removing-"


def path_of(output: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return output / f"checkpoint-{step}"


def steps_of(output: Path) -> list[int]:
    """Return the steps of the whole checkpoints, the newest first."""
    if not output.is_dir():
        return []
    found = [_NAME.fullmatch(path.name) for path in output.iterdir() if path.is_dir()]
    return sorted((int(name[1]) for name in found if name is not None), reverse=True)


def newest(output: Path) -> Path | None:
    """Return the newest whole checkpoint; None where there is none."""
    return next((path_of(output, step) for step in steps_of(output)), None)


@contextlib.contextmanager
def being_written(output: Path, *, step: int) -> Iterator[Path]:
    """Give the directory that a checkpoint is written into; it gets its name on leaving.

    Raises:
        OSError: the disk does not take it. Nothing is left of what was written.
    """
    staging = output / f"{_WRITING}{step}"
    shutil.rmtree(staging, ignore_errors=True)
    directory = staging / path_of(output, step).name
    try:
        directory.mkdir(parents=True)
        yield directory
        synchronize(directory)
        shutil.rmtree(path_of(output, step), ignore_errors=True)
        directory.rename(path_of(output, step))
        synchronize_names(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def remove_old(output: Path) -> None:
    """Remove all checkpoints but the newest."""
    for step in steps_of(output)[KEPT:]:
        going = output / f"{_REMOVING}{step}"
        # What cannot be removed now is tried again with the next one.
        with contextlib.suppress(OSError):
            path_of(output, step).rename(going)
        shutil.rmtree(going, ignore_errors=True)


def remove_leftovers(output: Path) -> None:
    """Remove what a run left that was killed while it wrote or removed a checkpoint."""
    for path in output.iterdir() if output.is_dir() else ():
        if path.name.startswith((_WRITING, _REMOVING)):
            shutil.rmtree(path, ignore_errors=True)


def synchronize(directory: Path) -> None:
    """Wait until the disk has all files below a directory, and their names.

    Raises:
        OSError: it does not take them.
    """
    for parent, _, names in os.walk(directory):
        for name in names:
            _fsync(Path(parent, name), os.O_RDONLY)
        synchronize_names(Path(parent))


def synchronize_names(directory: Path) -> None:
    """Wait until the disk has a directory's names; not every file system can be asked to."""
    with contextlib.suppress(OSError):
        _fsync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
