"""A worker's first seconds: bound to its parent's life, then importing what it needs alone.

Run as ``python -P -m sweep.running FD PARENT [RANK]``: FD is the pipe for the worker's messages,
PARENT the number of the process that started it, and RANK that of a worker which another one
started to train together with it.
"""

from __future__ import annotations

import contextlib
import io
import resource
import sys
from typing import Any

from sweep.processes import bind_to_parent, leave_a_guard


class _Printing(io.FileIO):
    """A file whose writes never fail, as a log is on a disk that may be full: what there is no room
    for is lost."""

    def write(self, data: Any, /) -> int:
        """Write what there is room for, and say that it was all."""
        with contextlib.suppress(OSError):
            super().write(data)
        return memoryview(data).nbytes


def print_without_fail() -> None:
    """Put streams in the place of this process's own that take whatever is printed, at once; before
    libraries take the streams as they find them."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw: Any = _Printing(descriptor, "w", closefd=False)
        text = io.TextIOWrapper(
            raw, encoding="utf-8", errors="backslashreplace", write_through=True
        )
        setattr(sys, name, text)


def begin(pipe: int, *, parent: int, is_first: bool = True) -> None:
    """Bind this process to its parent's life, before anything that takes time.

    Args:
        pipe: descriptor that it speaks through.
        parent: number of the process that started it, which may be killed at any moment.
        is_first: whether it has a process group of its own, and all in it end with it.
    """
    bind_to_parent(parent)
    if is_first:
        leave_a_guard(pipe)
    print_without_fail()
    # A dump of so much memory fills a disk, and keeps the process from ending meanwhile.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def main() -> None:
    """Import what a training takes and serve trials."""
    begin(int(sys.argv[1]), parent=int(sys.argv[2]), is_first=len(sys.argv) == 3)
    from sweep.training.lean_imports import OPTIONAL, compiling_later, lean_imports

    with lean_imports(*OPTIONAL):
        with compiling_later():
            import bitsandbytes  # noqa: F401
        from sweep.running import serving
    serving.main()


if __name__ == "__main__":
    main()
