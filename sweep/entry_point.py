"""Where the command ``sweep`` starts, and what ``import qlora_sweep`` offers.

A wheel carries this file as ``qlora_sweep.py`` beside the packages, an editable install far from
them. A foreign ``sweep`` may stand before ours on Python's path, so that `sweep.namesakes`, which
tells of it, is loaded by its place and not by its name.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sweep.api import *  # noqa: F403

_ENVIRONMENT, _INTERRUPTED = 3, 130
_ALSO_STOP = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_OBJECTS_PER_COLLECTION = 100_000
_NAMESAKES = os.path.join("sweep", "namesakes.py")


def main() -> int:
    """Run the command that was typed and return the exit code."""
    _hear_signals()
    # Most of what a command makes stays until it ends: to look for garbage in it took an eighth of
    # the time of a plan.
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    code = _INTERRUPTED
    try:
        if (words := _namesake()) is not None:
            sys.stderr.write(f"error: {words}\n")
            raise SystemExit(_ENVIRONMENT)
        from sweep.cli import main as run

        code = run()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
    finally:
        # All is said and stored: whatever the interpreter still does is not worth a wait, and to
        # look through a million objects once more, of which none is freed, takes seconds.
        atexit.register(gc.freeze)
        for number in (signal.SIGINT, *_ALSO_STOP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: os._exit(code))
    return code


def _hear_signals() -> None:
    """Take what asks this process to stop as Ctrl-C, as `sweep.stop_signals` does, which is not
    there yet. One that is ignored, as nohup has SIGHUP, stays so.
    """
    for number in _ALSO_STOP:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


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
        from sweep import api

        if name in ("__all__", *api.__all__):
            return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]


if __name__ == "__main__":
    sys.exit(main())
