"""Owns what Ctrl-C means: once, stop after the running trial; twice, stop now.

Knows nothing of studies or runners: what to stop is handed in.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""From the keyboard; from a scheduler or a spot market that wants the machine back; from a terminal
that is gone."""


class Interruption:
    """Counts requests to stop.

    Args:
        cancel: ends the running trial at once; called from a signal handler at the second request.
    """

    def __init__(self, *, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._requests = 0
        self._is_interruptible = False

    def is_requested(self) -> bool:
        """Return whether anybody asked to stop."""
        return self._requests > 0

    def request(self) -> None:
        """Ask to stop: after the running trial, and at once when asked again.

        Raises:
            KeyboardInterrupt: asked again inside an `interruptible`.
        """
        self._requests += 1
        if self._requests < 2:
            return
        if self._is_interruptible:
            raise KeyboardInterrupt
        self._cancel()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the second request cut short what is inside the ``with``: no result is lost there."""
        self._is_interruptible = True
        try:
            yield
        finally:
            self._is_interruptible = False

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Take `SIGNALS` as requests inside the ``with``; a third one falls back to the default."""
        previous = {number: signal.getsignal(number) for number in SIGNALS}
        # Whoever started this under nohup wants it to outlive the terminal.
        if previous[signal.SIGHUP] == signal.SIG_IGN:
            del previous[signal.SIGHUP]

        def handle(_number: int, _frame: FrameType | None) -> None:
            if self._requests:
                _install(previous)
            self.request()

        _install(dict.fromkeys(previous, handle))
        try:
            yield
        finally:
            _install(previous)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C inside the ``with``: who asked twice is being told what came of it."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _install(handlers: dict[signal.Signals, signal._HANDLER]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
