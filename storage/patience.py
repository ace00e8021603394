"""Owns how long a database is waited for, who hears of it while it lasts, and who cuts it short.

Knows nothing of databases, and imports nothing heavy: the terminal says here who is to be told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from search_spaces.errors import Interrupted

LOOK_SECONDS = 0.1
"""Between two looks at whether a wait goes on."""
_SAID_AFTER_SECONDS = 3.0
_STOPPED_AFTER_SECONDS = 2.0
"""Who has asked to stop, and then needs the database once more, gives it so long to answer."""

SILENT = "does not answer"

Told = Callable[[str, float, float], None]
"""Hears what the database is at, for how many seconds it has been waited for, and for how many it
will be."""

_listeners: list[Told] = []
_stopping: list[Callable[[], bool]] = []


@contextmanager
def waits_told_to(listener: Told) -> Iterator[None]:
    """Let somebody hear about once a second of each wait of some seconds inside the ``with``."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def waits_end_when(is_stopping: Callable[[], bool]) -> Iterator[None]:
    """End each wait inside the ``with``, by `Interrupted`, soon after somebody asked to stop."""
    _stopping.append(is_stopping)
    try:
        yield
    finally:
        _stopping.remove(is_stopping)


class SilentError(Exception):
    """Whoever was asked has not answered for as long as one answer may take."""


@dataclass(eq=False)
class _Trouble:
    """Since when the database has not done what it was asked; None while it does."""

    since_seconds: float | None = None
    told_seconds: float = 0.0
    state: str = SILENT


@dataclass(frozen=True)
class Patience:
    """How long to go on while a database is locked, away or silent.

    It remembers since when the database has not done what it was asked. All that is tried from
    then on, over whatever connection, shares the same minute; one study is driven with each.
    """

    seconds: float = 60.0
    answer_seconds: float = 20.0
    """How long a connection may be silent before another is tried."""
    connect_seconds: int = 10
    """How long each of the server's addresses is tried."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _trouble: _Trouble = field(default_factory=_Trouble, init=False, repr=False, compare=False)

    def begin(self, state: str = SILENT) -> bool:
        """Note that something is waited for; return whether nothing was already."""
        self._trouble.state = state
        if self._trouble.since_seconds is not None:
            return False
        self._trouble.since_seconds = self._trouble.told_seconds = self.clock()
        return True

    def end(self) -> None:
        """Note that the database has done what it was asked, or is not asked any more."""
        self._trouble.since_seconds = None

    def waited_seconds(self) -> float:
        """Return for how long the database has been waited for."""
        since = self._trouble.since_seconds
        return 0.0 if since is None else self.clock() - since

    def look(self, *, asked_seconds: float) -> None:
        """Say that the wait lasts, where it does, and end it where it has lasted too long.

        Args:
            asked_seconds: when that was asked for which an answer is due, by the clock.

        Raises:
            SilentError: no answer will be waited for any longer.
            Interrupted: somebody asked to stop.
        """
        waited = self._go_on()
        if waited >= self.seconds or self.clock() - asked_seconds >= self.answer_seconds:
            raise SilentError(f"the server has not answered for {waited:.0f} s")

    def pause(self, seconds: float) -> None:
        """Wait before the next attempt. Raises `Interrupted` where somebody asked to stop."""
        until = self.clock() + seconds
        while (left := until - self.clock()) > 0:
            self._go_on()
            self.sleep(min(left, LOOK_SECONDS))

    def _go_on(self) -> float:
        """Say how long the database has been waited for, where that is long; return it."""
        waited, now = self.waited_seconds(), self.clock()
        if waited >= _STOPPED_AFTER_SECONDS and any(asked() for asked in _stopping):
            raise Interrupted(
                f"interrupted while the database {self._trouble.state}; the same command goes on"
            )
        if waited >= _SAID_AFTER_SECONDS and now - self._trouble.told_seconds >= 1.0:
            self._trouble.told_seconds = now
            for listener in _listeners:
                listener(self._trouble.state, waited, self.seconds)
        return waited


PATIENCE = Patience()
"""Of what writes."""
READER = Patience(seconds=12.0, answer_seconds=12.0, connect_seconds=5)
"""Of what is looked at once: a person waits for it."""
