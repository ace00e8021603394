"""The signals that ask a command to stop: Ctrl-C, a scheduler's SIGTERM, SIGUSR1 of a queue whose
time limit is near and SIGHUP of a terminal that is gone are one and the same.

Each cuts a command short by a `KeyboardInterrupt`; the driver of a study takes them as requests
instead (`sweep.study.events`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from qlora_sweep.sweep.processes import STOP_SIGNALS

INTERRUPTED = 130
"""Exit code of a command that was asked to stop."""
_PATIENCE = 3
"""So many signals end the process at once."""
_MOMENT_SECONDS = 0.05
_SHOW_CURSOR = "\x1b[?25h"

_asked = 0
_newest = signal.SIGINT.value


def asked() -> int:
    """Return how often this command was asked to stop.

    What raised a `KeyboardInterrupt` may have been swallowed by a library on the way, or have come
    out as an error of its own.
    """
    return _asked


@contextmanager
def handled(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Answer signals by these handlers inside the ``with``. Elsewhere than in the main thread,
    which signals are for, nothing happens."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {n: signal.signal(n, handler) for n, handler in handlers.items() if is_main}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def heard() -> Iterator[None]:
    """Raise `KeyboardInterrupt` at each signal inside the ``with``; the third ends the process.

    One that is ignored, as nohup has SIGHUP, stays so.
    """
    global _asked
    _asked = 0
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    # Where its end is ignored, none of a child can be told.
    handlers = {signal.SIGCHLD: signal.SIG_DFL, **dict.fromkeys(numbers, _interrupt)}
    with handled(handlers), _heard_in_finalizers():
        yield


@contextmanager
def _heard_in_finalizers() -> Iterator[None]:
    """Ask again, a moment later, where a `KeyboardInterrupt` was raised while an object was being
    freed: there Python prints it with a traceback and ignores it.
    """
    before = sys.unraisablehook
    again: list[threading.Timer] = []
    main = threading.get_ident()

    def hear(unraisable: Any) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            before(unraisable)
            return
        again.append(threading.Timer(_MOMENT_SECONDS, signal.pthread_kill, (main, _newest)))
        again[-1].daemon = True
        again[-1].start()

    sys.unraisablehook = hear
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in again:
            timer.cancel()


def _interrupt(number: int, _frame: FrameType | None) -> None:
    global _asked, _newest
    _asked += 1
    _newest = number
    if _asked >= _PATIENCE:
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), _SHOW_CURSOR.encode())
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt
