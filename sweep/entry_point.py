"""Where the command ``sweep`` starts, and what ``import qlora_sweep`` offers.

A wheel carries this file as ``qlora_sweep.py`` beside the packages, an editable install far from
them. A foreign ``sweep`` may stand before ours on Python's path, so that `sweep.namesakes`, which
tells of it, is loaded by its place and not by its name.
"""

from __future__ import annotations

import atexit
import gc
import os
import resource
import signal
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qlora_sweep.sweep.api import *  # noqa: F403

_ENVIRONMENT, _INTERRUPTED = 3, 130
_MEMORY_MIN = 2**29
"""Bytes of address space: `sweep run` itself failed with 410 MB and began with 460 (2026-11-28)."""
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_PATIENCE = 3
"""So many signals end the process, whatever it is at."""
_OBJECTS_PER_COLLECTION = 100_000
_NAMESAKES = os.path.join("sweep", "namesakes.py")


def main() -> int:
    """Run the command that was typed and return the exit code."""
    # Registered first, so it is done last: what the interpreter does behind it is nobody's to stop.
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
        # All is said and stored: whatever the interpreter still does is not worth a wait, and to
        # look through a million objects once more, of which none is freed, takes seconds.
        atexit.register(gc.freeze)
        for number in _STOP:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: os._exit(code))
    return code


def _run() -> int:
    """Import the commands, and run the one that was typed."""
    words = _memory_words() or _namesake()
    if words is None:
        try:
            from qlora_sweep.sweep.cli import main as run
        except ImportError as error:
            from qlora_sweep.sweep.namesakes import missing_words

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
    """Interrupt once: what ends then is not interrupted again, unless somebody insists."""
    global _asked
    _asked += 1
    if _asked == 1:
        raise KeyboardInterrupt
    if _asked >= _PATIENCE:
        os._exit(_INTERRUPTED)


def _hear_no_more() -> None:
    for number in _STOP:
        signal.signal(number, signal.SIG_IGN)


def _namesake() -> str | None:
    """Return what to say where one of our packages is missing or somebody else's."""
    candidates = (os.path.abspath(os.path.join(entry, _NAMESAKES)) for entry in sys.path)
    path = next(filter(os.path.exists, candidates), None)
    spec = path and spec_from_file_location("qlora_sweep_namesakes", path)
    if not spec or spec.loader is None:
        return (
            f"qlora-sweep is incomplete: {_NAMESAKES} is nowhere on Python's path\n"
            "  -> pip install --force-reinstall --no-deps qlora-sweep"
        )
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    words: str | None = next(module.namesakes(), None)
    return words


def __getattr__(name: str) -> Any:
    """Return what ``import qlora_sweep`` offers, imported when it is asked for.

    Raises:
        ImportError: one of our packages is missing or somebody else's; it says what to do.
    """
    if name == "__all__" or not name.startswith("_"):
        if (words := _namesake()) is not None:
            raise ImportError(words)
        from qlora_sweep.sweep import api

        if name in ("__all__", *api.__all__):
            return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]


if __name__ == "__main__":
    sys.exit(main())
