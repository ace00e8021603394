"""Where the command ``sweep`` starts: signals are heard before anything heavy is imported, and a
limit on memory too low for that is said.
"""

from __future__ import annotations

import atexit
import gc
import os
import resource
import signal
import sys

_ENVIRONMENT, _INTERRUPTED = 3, 130
_MEMORY_MIN = 2**29
"""Bytes of address space: `sweep run` itself failed with 410 MB and began with 460 (2026-11-28)."""
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_PATIENCE = 3
"""So many signals end the process, whatever it is at."""
_OBJECTS_PER_COLLECTION = 100_000


def main() -> int:
    """Run the command that was typed and return the exit code."""
    # Registered first, so it runs last: signals do not stop what the interpreter does after it.
    atexit.register(_hear_no_more)
    _hear_signals()
    # Most of what a command makes stays until it ends: to look for garbage in it took an eighth of
    # the time of a plan.
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    code = _INTERRUPTED
    try:
        code = _run()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
    finally:
        # All is printed and stored. A last garbage collection would look through a million objects,
        # of which none is freed, and take seconds.
        atexit.register(gc.freeze)
        for number in _STOP:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: os._exit(code))
    return code


def _run() -> int:
    """Import the commands, and run the one that was typed."""
    words = _memory_words()
    if words is None:
        try:
            from qlora_sweep.sweep.cli import main as run
        except ImportError as error:
            from qlora_sweep.sweep.installation import missing_words

            words = missing_words(error)
        else:
            return run()
    sys.stderr.write(f"error: {words}\n")
    raise SystemExit(_ENVIRONMENT)


def _memory_words() -> str | None:
    """Return what to say where the limit on this process's memory is too low; None where not.

    OpenBLAS takes some for each core, tries again and again where there is none, then ends the
    process: under a limit it begins with one thread.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if limit >= _MEMORY_MIN:
        return None
    return (
        f"the memory that a process may take (`ulimit -v {limit // 1024}`) is too little: raise "
        f"it, to {2 * _MEMORY_MIN // 1024} at least"
    )


_asked = 0


def _hear_signals() -> None:
    """Take what asks this process to stop as Ctrl-C, as `sweep.stop_signals` does, which is not
    there yet. One that is ignored, as nohup has SIGHUP, stays so.
    """
    for number in _STOP:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _interrupt)


def _interrupt(*_: object) -> None:
    """Interrupt once; the third signal ends the process."""
    global _asked
    _asked += 1
    if _asked == 1:
        raise KeyboardInterrupt
    if _asked >= _PATIENCE:
        os._exit(_INTERRUPTED)


def _hear_no_more() -> None:
    for number in _STOP:
        signal.signal(number, signal.SIG_IGN)
