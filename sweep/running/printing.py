"""Owns that nothing fails because it prints: a worker's log is on a disk that may be full.

For a worker's first lines, before libraries take the streams as they find them. Knows nothing of
what is printed.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any


class _Printing(io.FileIO):
    """A file whose writes never fail: what there is no room for is lost, and whoever printed it
    goes on."""

    def write(self, data: Any, /) -> int:
        """Write what there is room for, and say that it was all."""
        with contextlib.suppress(OSError):
            super().write(data)
        return memoryview(data).nbytes


def print_without_fail() -> None:
    """Put streams in the place of this process's own that take whatever is printed, at once."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw: Any = _Printing(descriptor, "w", closefd=False)
        text = io.TextIOWrapper(
            raw, encoding="utf-8", errors="backslashreplace", write_through=True
        )
        setattr(sys, name, text)
