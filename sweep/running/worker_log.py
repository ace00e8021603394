"""The file into which everything goes that a worker and its libraries print.

The worker writes into the file itself and not into a pipe, so that nothing that the tuner does, or
fails to do, can make a print wait or fail.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path
from typing import IO

from search_spaces.errors import MORE_DESCRIPTORS, EnvironmentFault, words_of
from search_spaces.redaction import shown
from storage import files

BYTES_MAX = 10 * 2**20
"""Of the file; what was there before is kept in one of that size beside it."""
_TAIL_BYTES = 65536
"""Thirty frames of C++ with their templates take ten thousand and more."""
_TOLD_CHARACTERS = 8192
_TAIL_LINES = 3
_TAIL_CHARACTERS = 600
_REASON_CHARACTERS = 300
_REASON_LINES = 12
"""From the end, among which an error is the one that ended the process, and no earlier one."""
_PLACE = re.compile(
    r"frame #\d+:"
    r"|File \".*\", line \d+"
    r"|(?:Current thread|Thread) 0x\w+.*:$"
    r"|Extension modules:"
    r"|Exception raised from .* \(most recent call first\):"
    r"|(?:CUDA|HIP) kernel errors might be asynchronously reported"
    r"|For debugging consider passing"
    r"|Compile with `TORCH_USE_"
    r"|Search for `\w+' in https:"
    r"|[\^~]+$"
)
"""Begins a line that says where in the code it was, or how to look for it, and never what went
wrong."""
_NOISE = re.compile(
    r"USDT:"
    r"|\[W.*\] Memory block of unknown size was allocated before the profiling started"
    r"|Failed to load CPU gemm_4bit_forward "
)
"""Begins a line that torch's profiler and bitsandbytes always print, whatever becomes of them."""
_REASON = re.compile(r"what\(\): |(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception)\b: ")
"""Begins a line that names an error, as C++ and Python print one that nobody caught."""


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
        self._file = _opened(path)
        self._begins_at = self._size()
        self._before = b""
        """The end of what was put aside last."""

    def fileno(self) -> int:
        """Return the descriptor that the worker prints to."""
        return self._file.fileno()

    def keep_small(self) -> None:
        """Where it is too large, put its end aside and begin anew.

        Whoever prints at this very moment may lose a line; nobody waits.
        """
        if self._size() <= self._bytes_max:
            return
        # Where there is no room for the copy, room is what is needed most.
        with contextlib.suppress(OSError):
            begin = self._size() - self._bytes_max
            kept = os.pread(self._file.fileno(), self._bytes_max, begin)
            files.replace(self.path.with_name(f"{self.path.name}.1"), kept, is_durable=False)
        # Last of all: these may be the worker's last words.
        self._before = self._end()
        with contextlib.suppress(OSError):
            os.ftruncate(self._file.fileno(), 0)
        self._begins_at = 0

    def tail(self) -> str:
        """Return the last lines that were printed since this was opened, as they may be shown.

        Those that say where in the code it happened are left out unless there are no others, and
        the error that they follow comes first. Of a log of any size a few thousand bytes are read.
        """
        printed = (self._before + self._end()).decode(errors="replace").splitlines()
        printed = [line for line in printed if _NOISE.match(line.strip()) is None]
        told = [line for line in printed if _PLACE.match(line.strip()) is None]
        # These and nothing else say more than nothing.
        words = "\n".join(told if any(map(str.strip, told)) else printed)
        # Before it is cut any further: half a password is found by nobody.
        shortened = shown(words[-_TOLD_CHARACTERS:]).splitlines()
        lines = [line.strip() for line in shortened if line.strip()]
        last = " | ".join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]
        named = (line for line in reversed(lines[-_REASON_LINES:]) if _REASON.match(line))
        reason = next(named, "")[:_REASON_CHARACTERS]
        if reason in last:
            return last
        return f"{reason} | {last[-(_TAIL_CHARACTERS - len(reason)) :]}"

    def close(self) -> None:
        """Free the descriptor, once nobody prints any more. Idempotent."""
        if not self._file.closed:
            self.keep_small()
            self._file.close()

    def _end(self) -> bytes:
        begin = max(self._begins_at, self._size() - _TAIL_BYTES)
        try:
            return os.pread(self._file.fileno(), _TAIL_BYTES, begin)
        except OSError:
            return b""

    def _size(self) -> int:
        try:
            return os.fstat(self._file.fileno()).st_size
        except OSError:
            return 0


def _opened(path: Path) -> IO[bytes]:
    """Return a private file that is appended to; nothing's, where the disk is full."""
    try:
        return files.open_append(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return open(os.devnull, "r+b", buffering=0)
        cure = f": too few file descriptors; {MORE_DESCRIPTORS}"
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            cure = ""
        reason = f"the worker's log cannot be written: {words_of(error)}{cure}"
        raise EnvironmentFault(reason) from error
