"""A request to stop a study: the first ends what runs, a further one waits for nothing any more.

Whichever of the signals asks. What is stored is never at stake: it is cut short only what a resume
does again, or finds in the spool.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from sweep.processes import STOP_SIGNALS

_CUT_AT = 2
"""Requests from which on anything is cut short, a wait for a runner that was cancelled too."""
SETTLING_SECONDS = 1.0
"""In which a result reaches the disk. What takes longer waits for a database."""
TELLING_SECONDS = 5.0
"""In which what came of a study is read, drawn and printed, unless something hangs."""


class Interruption:
    """Counts requests to stop.

    Args:
        cancel: ends what runs at once and launches nothing more; called from a signal handler at
            each request.
        requests: those that were made before.
        clock: seconds; only differences count.
    """

    def __init__(
        self,
        *,
        cancel: Callable[[], None] = lambda: None,
        requests: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cancel = cancel
        self._requests = requests
        self._clock = clock
        self._cut_at = _CUT_AT
        self._cut_after = clock()

    def is_requested(self) -> bool:
        """Return whether anybody asked to stop."""
        return self._requests > 0

    def request(self) -> None:
        """Ask to stop now.

        Raises:
            KeyboardInterrupt: what is under way can be cut short, or was asked to end before.
        """
        self._requests += 1
        self._cancel()
        if self._requests >= self._cut_at and self._clock() >= self._cut_after:
            raise KeyboardInterrupt

    def interruptible(self) -> AbstractContextManager[None]:
        """Let the first request cut short what is inside the ``with``: no result is lost there."""
        return self._cutting(at=1)

    def settling(self) -> AbstractContextManager[None]:
        """Let a result reach the disk inside the ``with`` before a second request cuts it short;
        the database hears of it when the study resumes.
        """
        return self._cutting(at=_CUT_AT, after=SETTLING_SECONDS)

    @contextmanager
    def _cutting(self, *, at: int, after: float = 0.0) -> Iterator[None]:
        before = self._cut_at, self._cut_after
        self._cut_at, self._cut_after = at, self._clock() + after
        try:
            yield
        finally:
            self._cut_at, self._cut_after = before

    def handling_signals(self) -> AbstractContextManager[None]:
        """Take the signals as requests inside the ``with``."""
        return _handled(self.request)


@contextmanager
def undisturbed(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Ignore signals inside the ``with``: whoever asked is being told what came of it.

    Not for ever: where that hangs, one more cuts it short.
    """
    until = clock() + TELLING_SECONDS

    def hear() -> None:
        if clock() >= until:
            raise KeyboardInterrupt

    with _handled(hear):
        yield


@contextmanager
def _handled(hear: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread hears of signals: what they mean is its program's to say.
        yield
        return
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    # Whoever started this under nohup wants it to outlive the terminal.
    if previous[signal.SIGHUP] == signal.SIG_IGN:
        del previous[signal.SIGHUP]

    def handle(_number: int, _frame: FrameType | None) -> None:
        hear()

    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
