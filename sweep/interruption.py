"""Owns what Ctrl-C means: once, stop after the running trial; twice, stop now.

Knows nothing of studies or runners: what to stop is handed in.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""From the keyboard, and from a scheduler or a spot market that wants the machine back."""


class Interruption:
    """Counts requests to stop.

    Args:
        cancel: ends the running trial at once; called from a signal handler at the second request.
    """

    def __init__(self, *, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._requests = 0

    def is_requested(self) -> bool:
        """Return whether anybody asked to stop."""
        return self._requests > 0

    def request(self) -> None:
        """Ask to stop: after the running trial, and at once when asked again."""
        self._requests += 1
        if self._requests == 2:
            self._cancel()

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Take `SIGNALS` as requests inside the ``with``; a third one falls back to the default."""
        previous = {number: signal.getsignal(number) for number in SIGNALS}

        def handle(_number: int, _frame: FrameType | None) -> None:
            self.request()
            if self._requests == 2:
                _install(previous)

        _install(dict.fromkeys(SIGNALS, handle))
        try:
            yield
        finally:
            _install(previous)


def _install(handlers: dict[signal.Signals, signal._HANDLER]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
