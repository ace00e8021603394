"""Owns the file into which everything goes that a worker and its libraries print: how large it may
become, and its end.

The worker writes into the file itself and not into a pipe, so that nothing that the tuner does, or
fails to do, can make a print wait or fail. Knows nothing of processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from search_spaces.errors import EnvironmentFault, words_of

BYTES_MAX = 10 * 2**20
"""Of the file; what was there before is kept in one of that size beside it."""
_TAIL_BYTES = 8192
_TAIL_LINES = 3
_TAIL_CHARACTERS = 600


class WorkerLog:
    """A log that is appended to by the worker, and kept small by whoever looks after it.

    Args:
        path: of the log; what is older is kept under the same name with ``.1`` behind it.

    Raises:
        EnvironmentFault: it cannot be written.
    """

    def __init__(self, path: Path, *, bytes_max: int = BYTES_MAX) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._descriptor = _opened(path)
        self._begins_at = self._size()

    def fileno(self) -> int:
        """Return the descriptor that the worker prints to."""
        return self._descriptor

    def note(self, words: str) -> None:
        """Write a line of the tuner's own, on what it did and why."""
        with contextlib.suppress(OSError):
            os.write(self._descriptor, f"sweep: {words}\n".encode(errors="replace"))

    def keep_small(self) -> None:
        """Where it is too large, put its end aside and begin anew.

        Whoever prints at this very moment may lose a line; nobody waits.
        """
        if self._size() <= self._bytes_max:
            return
        # Where there is no room for the copy, room is what is needed most.
        with contextlib.suppress(OSError):
            self._put_aside()
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        self._begins_at = 0

    def tail(self) -> str:
        """Return the last lines that were printed since this was opened; "" for none."""
        begin = max(self._begins_at, self._size() - _TAIL_BYTES)
        try:
            words = os.pread(self._descriptor, _TAIL_BYTES, begin).decode(errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in words.splitlines() if line.strip()]
        return " | ".join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]

    def close(self) -> None:
        """Free the descriptor. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _size(self) -> int:
        try:
            return os.fstat(self._descriptor).st_size
        except OSError:
            return 0

    def _put_aside(self) -> None:
        older = self.path.with_name(f"{self.path.name}.1")
        older.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(older, flags, 0o600), "wb") as file:
            size = self._size()
            file.write(os.pread(self._descriptor, self._bytes_max, max(0, size - self._bytes_max)))


def _opened(path: Path) -> int:
    """Return a descriptor that appends to a private file; of nothing, where the disk is full."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        raise _unusable(path, error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise EnvironmentFault(f"the worker's log {path} is no plain file: move it away")
    return descriptor


def _unusable(path: Path, error: OSError) -> EnvironmentFault:
    if error.errno == errno.ELOOP:
        return EnvironmentFault(f"the worker's log {path} is a link, which is not followed")
    cure = ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        cure = ": too few file descriptors; raise the limit, with `ulimit -n 4096` say"
    return EnvironmentFault(f"the worker's log cannot be written: {words_of(error)}{cure}")
