"""Owns what is shown on stderr while something takes more than a second.

Knows nothing of results.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TextIO, cast

from rich.console import Console

from sweep.predict.forecast import TRACED
from sweep.terminal.console import Synchronized, note

SILENCE_SECONDS, LONGEST_SILENCE_SECONDS = 1.25, 60.0
"""After which something is said; nobody waits two seconds wondering."""
PATIENCE_SECONDS = 20.0
"""Of one wait, after which each silence is twice as long, up to a minute: a night's log is for
reading."""


def progress_words(what: str, done: int, of: int) -> str:
    """Return how far something is: ``12 of 36 structures traced``."""
    return f"{done} of {of} {what}"


@contextmanager
def working(
    doing: str, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Show on stderr that something takes more than a second.

    Yields what returns, for the name of a part of it, what hears how much of that is done, of how
    much. A terminal shows it as long as it takes; elsewhere it is said in lines.
    """
    console = Console(file=cast(TextIO, Synchronized(sys.stderr)))
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        lines = _Lines(doing, clock)
        with lines.kept_up():
            yield lambda what: partial(lines.say, what)
        return
    with console.status(doing) as status:

        def show(what: str, done: int, of: int) -> None:
            status.update(progress_words(what, done, of) if done < of else doing)

        yield lambda what: partial(show, what)


class Rhythm:
    """When a further line is worth it where none is redrawn: soon, and in time more seldom."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Wait for something else."""
        self._begun_seconds = self._clock()
        self._silence_seconds = SILENCE_SECONDS
        self._due_seconds = self._begun_seconds + SILENCE_SECONDS

    @property
    def is_due(self) -> bool:
        """Whether nothing was said for long enough."""
        return self._clock() >= self._due_seconds

    def go_on(self) -> None:
        """Something was said of what is waited for."""
        now = self._clock()
        if now - self._begun_seconds >= PATIENCE_SECONDS:
            self._silence_seconds = min(2 * self._silence_seconds, LONGEST_SILENCE_SECONDS)
        self._due_seconds = now + self._silence_seconds


class _Lines:
    """Says how far it is where a line is due, and the start of what is sure to take longer.

    What takes long without telling how far it is, is said to go on.
    """

    def __init__(self, doing: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_seconds = clock()
        self._rhythm = Rhythm(clock)
        self._doing = self._words = doing
        self._talking = threading.Lock()

    def say(self, what: str, done: int, of: int) -> None:
        """Say how far something is, where that is worth a line."""
        if of == 0:
            return
        is_beginning = what == TRACED and done == 0
        with self._talking:
            told = progress_words(what, done, of)
            is_new, self._words = told != self._words, told if done < of else self._doing
            if self._rhythm.is_due or (is_beginning and is_new):
                self._note(told)

    @contextmanager
    def kept_up(self) -> Iterator[None]:
        """Break every silence as long as this lasts."""
        ended = threading.Event()
        voice = threading.Thread(target=self._break_silences, args=(ended,), daemon=True)
        voice.start()
        try:
            yield
        finally:
            ended.set()
            voice.join()

    def _break_silences(self, ended: threading.Event) -> None:
        while not ended.wait(SILENCE_SECONDS / 4):
            with self._talking:
                if self._rhythm.is_due:
                    self._note(f"{self._words} ({self._clock() - self._began_seconds:.0f} s)")

    def _note(self, text: str) -> None:
        note(text)
        self._rhythm.go_on()
