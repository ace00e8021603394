"""Owns where the command ``sweep`` starts: at a name that nobody else will take.

A wheel carries this file as ``qlora_sweep.py`` beside the packages, an editable install far from
them. A foreign ``sweep`` may stand before ours on Python's path, so that `sweep.namesakes`, which
tells of it, is loaded by its place and not by its name.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import module_from_spec, spec_from_file_location

_INTERRUPTED = 130
_ALSO_STOP = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_NAMESAKES = os.path.join("sweep", "namesakes.py")


def main() -> int:
    """Run the command that was typed and return the exit code."""
    _hear_signals()
    code = _INTERRUPTED
    try:
        _refuse_namesakes()
        from sweep.cli import main as run

        code = run()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
    finally:
        # All is said and stored: whatever the interpreter still does is not worth a wait.
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


def _refuse_namesakes() -> None:
    candidates = (os.path.abspath(os.path.join(entry, _NAMESAKES)) for entry in sys.path)
    path = next(filter(os.path.exists, candidates), None)
    spec = path and spec_from_file_location("qlora_sweep_namesakes", path)
    if not spec or spec.loader is None:
        sys.stderr.write(
            f"error: qlora-sweep is incomplete: {_NAMESAKES} is nowhere on Python's path\n"
            "  -> pip install --force-reinstall --no-deps qlora-sweep\n"
        )
        raise SystemExit(3)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.refuse_namesakes()


if __name__ == "__main__":
    sys.exit(main())
