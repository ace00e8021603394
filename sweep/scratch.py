"""Temporary directories that are removed also where their process was killed.

Each is locked for as long as it is used, and a lock ends with its process. Making the next
directory, or starting a study, removes those without a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = ".sweep-scratch-"


@contextmanager
def scratch(kind: str, *, parent: Path | None = None) -> Iterator[Path]:
    """Yield an empty directory for this process alone, and remove it afterwards.

    Args:
        kind: what it is for; a part of its name.
        parent: directory that it is made in; None for the system's temporary directory.

    Raises:
        OSError: it cannot be made.
    """
    place = parent or Path(tempfile.gettempdir())
    remove_left(place)
    path, lock = _made(place, kind)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_left(parent: Path | None = None) -> None:
    """Remove the directories of processes that were killed. Never raises.

    Args:
        parent: directory that they are in; None for the system's temporary directory.
    """
    place = parent or Path(tempfile.gettempdir())
    with suppress(OSError):
        for path in place.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                _remove_if_unused(path)


def _made(place: Path, kind: str) -> tuple[Path, int]:
    """Make a directory and lock it; return both."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-", dir=place))
        # Another process may find it before it is locked, and remove it.
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with suppress(OSError):
                # Where there are no locks, nothing is removed either.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                return path, descriptor
            os.close(descriptor)


def _remove_if_unused(path: Path) -> None:
    there = path.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid():
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
