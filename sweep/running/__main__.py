"""A worker's first seconds: bound to its parent's life, then importing what it needs alone.

Run as ``python -P -m qlora_sweep.sweep.running FD PARENT [RANK]``: FD is the pipe for the worker's
messages, PARENT the number of the process that started it, and RANK that of a worker which another
one started to train together with it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
import traceback
from importlib import import_module
from typing import Any

from qlora_sweep.sweep.installation import missing_words
from qlora_sweep.sweep.processes import bind_to_parent, leave_a_guard


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


def main(module: str = "qlora_sweep.sweep.running.worker") -> None:
    """Bind this process to its parent's life, before anything that takes time; then import what a
    training takes, and what is to be done here."""
    bind_to_parent(int(sys.argv[2]))
    if len(sys.argv) == 3:
        # It has a process group of its own, and all in it end with it.
        leave_a_guard(int(sys.argv[1]))
    print_without_fail()
    # A dump of so much memory fills a disk, and keeps the process from ending meanwhile.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    from qlora_sweep.sweep.training.libraries import OPTIONAL, compiling_later, lean_imports

    try:
        with lean_imports(*OPTIONAL):
            with compiling_later():
                import bitsandbytes  # noqa: F401
            child = import_module(module)
    except ImportError as error:
        traceback.print_exc()
        _refuse(int(sys.argv[1]), missing_words(error))
        return
    child.main()


def _refuse(messages: int, reason: str) -> None:
    """Say that nothing can be done here, as `wire.Unusable` does, which may not be importable."""
    # The supervisor has written the settings by then.
    sys.stdin.buffer.readline()
    os.write(messages, json.dumps({"kind": "unusable", "reason": reason}).encode() + b"\n")


if __name__ == "__main__":
    main()
