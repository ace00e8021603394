"""Owns the worker's first seconds: bound to its parent's life, then importing what it needs alone.

Run as ``python -P -m sweep.running FD``, where FD is the pipe for the worker's messages. Knows
nothing of what it does then.
"""

from __future__ import annotations

import ctypes
import signal

from sweep.training.lean_imports import OPTIONAL, compiling_later, lean_imports

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Import what a training takes and serve trials."""
    _die_with_parent()
    # Ctrl-C in the terminal is the tuner's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with lean_imports(*OPTIONAL):
        with compiling_later():
            import bitsandbytes  # noqa: F401
        from sweep.running import worker
    worker.main()


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the tuner's dies, however it dies (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
