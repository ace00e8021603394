"""Owns the worker's first seconds: bound to its parent's life, then importing what it needs alone.

Run as ``python -P -m sweep.running FD PARENT``, where FD is the pipe for the worker's messages and
PARENT the number of the process that started it. Knows nothing of what it does then.
"""

from __future__ import annotations

import resource
import sys

from sweep.processes import bind_to_parent, leave_a_guard
from sweep.running.printing import print_without_fail


def begin(pipe: int, *, parent: int) -> None:
    """Bind this process to its parent's life, before anything that takes time.

    Args:
        pipe: descriptor that it speaks through.
        parent: number of the process that started it, which may be killed at any moment.
    """
    bind_to_parent(parent)
    leave_a_guard(pipe)
    print_without_fail()
    # A dump of so much memory fills a disk, and keeps the process from ending meanwhile.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def main() -> None:
    """Import what a training takes and serve trials."""
    begin(int(sys.argv[1]), parent=int(sys.argv[2]))
    from sweep.training.lean_imports import OPTIONAL, compiling_later, lean_imports

    with lean_imports(*OPTIONAL):
        with compiling_later():
            import bitsandbytes  # noqa: F401
        from sweep.running import serving
    serving.main()


if __name__ == "__main__":
    main()
