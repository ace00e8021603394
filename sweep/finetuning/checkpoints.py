"""A training's checkpoints on the disk: a directory has its name once it is whole.

A checkpoint is written under a name that begins with a dot, waited for until the disk has it, and
renamed; so is one that goes, before it is removed. A kill at any moment leaves whole ones, and
leftovers that the next run removes. What a disk does to one afterwards is told by its digests.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from qlora_sweep.search_spaces.errors import EnvironmentFault, words_of
from qlora_sweep.storage import files

COURSE = "course.json"
"""What is known of the steps up to a checkpoint."""
DIGESTS = "sha256.json"
"""Of all files of a checkpoint, by their names."""
RESERVED = ".reserved"
"""Room that is kept for the last checkpoint and the adapter, whatever else fills the disk."""
_NAME = re.compile(r"checkpoint-(\d+)")
_STAGING = (".writing-", ".removing-")
_FULL = re.compile(
    r"No space left|os error (27|28|122)\b|File too large|PytorchStreamWriter|unexpected pos"
)
"""Words of a disk that takes no more: torch and safetensors write in C++ and in Rust."""
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def path_of(output: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return output / f"checkpoint-{step}"


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def steps_of(output: Path) -> list[int]:
    """Return the steps of the checkpoints that have their name, the newest first."""
    steps = []
    for path in output.glob("checkpoint-*"):
        name = _NAME.fullmatch(path.name)
        if name is not None and path.is_dir():
            steps.append(int(name[1]))
    return sorted(steps, reverse=True)


def newest(output: Path, *, warn: Callable[[str], None] = lambda _: None) -> Path | None:
    """Return the newest checkpoint whose files are as they were written; None for no checkpoint.

    Args:
        output: of the training.
        warn: told of each newer one what is damaged.

    Raises:
        EnvironmentFault: there are some, and all are damaged.
    """
    steps = steps_of(output)
    for step in steps:
        damage = _damage_of(path_of(output, step))
        if damage is None:
            return path_of(output, step)
        warn(f"the checkpoint of step {step:,} is damaged and is left out: {damage}")
    if steps:
        raise EnvironmentFault(
            f"{output}: all checkpoints are damaged, so the training cannot be resumed: begin it "
            "anew in another directory"
        )
    return None


@contextlib.contextmanager
def being_written(output: Path, *, step: int) -> Iterator[Path]:
    """Give the directory that a checkpoint is written into; it gets its name on leaving.

    Raises:
        OSError: the disk does not take it. Nothing is left of what was written.
    """
    staging = output / f"{_STAGING[0]}{step}"
    final = path_of(output, step)
    shutil.rmtree(staging, ignore_errors=True)
    directory = staging / final.name
    try:
        directory.mkdir(parents=True)
        yield directory
        digests = {path.name: _digest(path) for path in sorted(directory.iterdir())}
        (directory / DIGESTS).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
        files.synchronize(*directory.iterdir(), directory)
        shutil.rmtree(final, ignore_errors=True)
        directory.rename(final)
        files.synchronize(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _damage_of(checkpoint: Path) -> str | None:
    """Return which file of a checkpoint is not as it was written; None where all are."""
    try:
        digests = json.loads((checkpoint / DIGESTS).read_text(encoding="utf-8"))
        for name, digest in digests.items():
            if _digest(checkpoint / name) != digest:
                return f"{name} is not what was written"
    except OSError as error:
        return words_of(error)
    except (ValueError, AttributeError):
        return f"{DIGESTS} is not what was written"
    return None


def remove(output: Path, *, keep: Collection[int] = ()) -> None:
    """Remove checkpoints, and what a run left that was killed at it, as far as the disk lets it.

    Args:
        output: of the training.
        keep: the steps whose checkpoints stay.
    """
    with contextlib.suppress(OSError):
        for step in set(steps_of(output)) - set(keep):
            path_of(output, step).rename(output / f"{_STAGING[1]}{step}")
    for path in filter(is_left, output.glob(".*")):
        shutil.rmtree(path, ignore_errors=True)


def remove_old(output: Path) -> None:
    """Remove all checkpoints but the newest two."""
    remove(output, keep=steps_of(output)[:2])


def is_left(path: Path) -> bool:
    """Whether a run left this that was killed while it wrote or removed a checkpoint."""
    return path.name.startswith(_STAGING)


def release(output: Path) -> None:
    """Give the room that was kept to what it was kept for."""
    (output / RESERVED).unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_of_the_disk(error: BaseException) -> bool:
    """Whether an exception means that a disk does not take what is written."""
    if isinstance(error, OSError):
        return error.errno in _REFUSALS
    return _FULL.search(str(error)) is not None
