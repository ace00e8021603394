"""A training's output directory: whose it is, who writes there now, and whether there is room.

`run.json` says what is trained there, `training.json` that it is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reports import units
from search_spaces.errors import EnvironmentFault, InputError, quote, words_of
from storage import files
from storage.files import require_parent
from sweep.finetuning import checkpoints

RUN, TRAINING = "run.json", "training.json"
RESERVED = ".reserved"
"""Room that is kept for the last checkpoint and the adapter, whatever else fills the disk."""
_LOCK = ".lock"
_LEFT = {_LOCK, RESERVED, RUN, "training.log", "training.log.1"}
"""What a training leaves that has no checkpoint: none of it is lost to another one."""
_IN_FLIGHT = 3
"""Checkpoints: those that are kept, and the one that is being written."""
_BESIDE_BYTES = 32 * 2**20
"""A tokenizer, a page with plotly in it, logs."""


def is_empty(output: Path) -> bool:
    """Whether nothing is in a directory that anybody would miss, or there is none.

    Raises:
        InputError: it is a file, or in no directory that exists.
        EnvironmentFault: it cannot be looked into.
    """
    try:
        return all(path.name in _LEFT or checkpoints.is_left(path) for path in output.iterdir())
    except FileNotFoundError:
        require_parent(output)
        return True
    except NotADirectoryError as error:
        raise InputError(f"--output: {output} is a file: name a directory") from error
    except OSError as error:
        raise EnvironmentFault(f"--output: {words_of(error)}") from error


def known_run(output: Path) -> dict[str, Any] | None:
    """Return what is trained in a directory; None where nothing is.

    Raises:
        InputError: what says so cannot be read.
    """
    try:
        values = json.loads(files.read_bytes(output / RUN))
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise InputError(f"--output: {output} is a file: name a directory") from error
    except (OSError, ValueError) as error:
        raise InputError(
            f"{output / RUN} cannot be read: {words_of(error)}; choose another --output"
        ) from error
    if not isinstance(values, dict):
        raise InputError(f"{output / RUN} says nothing of a training; choose another --output")
    return values


def is_done(output: Path) -> bool:
    """Whether the training of a directory has ended with its adapter."""
    return (output / TRAINING).is_file()


def refuse_taken(output: Path) -> None:
    """Refuse a directory for a new training where something is in it.

    Raises:
        InputError: says what, and what to do.
    """
    if is_empty(output):
        return
    if known_run(output) is None:
        raise InputError(f"--output: {output} is not empty: name a new directory")
    if is_done(output):
        raise InputError(
            f"--output: {output} holds a training that is done: name another directory"
        )
    newest = next(iter(checkpoints.steps_of(output)), 0)
    raise InputError(
        f"--output: {output} holds a training that was begun (step {newest}): --resume goes on "
        "with it, or name another directory"
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, of: str = "") -> list[str]:
    """Return in words where a run that is to be resumed differs from what was typed."""
    found = []
    for key in sorted({*old, *new}):
        before, now = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            found += differences(before, now, of="" if key == "config" else f"{key} ")
        elif before != now:
            found.append(f"{of}{key} was {quote(before)} and is {quote(now)}")
    return found


def refuse_another(output: Path, run: Mapping[str, Any]) -> None:
    """Refuse to go on with a training as another one.

    Raises:
        InputError: nothing is there to go on with, or it differs, with what differs.
    """
    known = known_run(output)
    if known is None:
        reason = "is empty" if is_empty(output) else "holds no training"
        raise InputError(
            f"--resume: {output} {reason}, so there is nothing to go on with: leave --resume out"
        )
    differing = differences(known, run)
    if differing:
        raise InputError(
            f"--resume: {output} holds another training: {'; '.join(differing)}. Type what it was "
            "begun with, or name another directory"
        )


@contextlib.contextmanager
def held(output: Path) -> Iterator[None]:
    """Hold a directory, which is made where it is missing; nobody else trains there meanwhile.

    Raises:
        InputError: somebody else does.
        EnvironmentFault: it cannot be made or written.
    """
    try:
        output.mkdir(exist_ok=True)
        lock = files.open_append(output / _LOCK)
    except FileExistsError as error:
        raise InputError(f"--output: {output} is a file: name a directory") from error
    except OSError as error:
        raise EnvironmentFault(f"--output: {words_of(error)}") from error
    with lock:
        try:
            files.lock(lock.fileno())
        except BlockingIOError as error:
            raise InputError(f"--output: another training writes {output} now") from error
        yield


def begin(output: Path, run: Mapping[str, Any]) -> None:
    """Say what is trained in a directory, from now on.

    Raises:
        EnvironmentFault: it cannot be written.
    """
    try:
        files.replace(output / RUN, (json.dumps(run, indent=2) + "\n").encode())
    except OSError as error:
        raise EnvironmentFault(f"cannot write {output / RUN}: {words_of(error)}") from error


def reserve(output: Path, *, checkpoint_bytes: int) -> None:
    """Check that a disk has room for a training, and keep what its end takes.

    Raises:
        EnvironmentFault: it has not; says how much is needed.
    """
    (output / RESERVED).unlink(missing_ok=True)
    needed = _IN_FLIGHT * checkpoint_bytes + _BESIDE_BYTES
    free = shutil.disk_usage(output).free
    if free < needed:
        raise EnvironmentFault(
            f"--output: the disk of {output} has {units.gib(free)} free, and checkpoints and the "
            f"adapter take up to {units.gib(needed)}: free some space, or name another disk"
        )
    # A file system that cannot keep room has none kept.
    with contextlib.suppress(OSError), open(output / RESERVED, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, checkpoint_bytes + _BESIDE_BYTES)


def release(output: Path) -> None:
    """Give the room that was kept to what it was kept for."""
    (output / RESERVED).unlink(missing_ok=True)
