"""Owns what is shown on stderr while something takes more than a second.

Knows nothing of results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console

from sweep.planning.forecast import TRACED
from sweep.terminal.console import note


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
    if not sys.stderr.isatty():
        lines = _Lines(clock)
        yield lambda what: partial(lines.say, what)
        return
    with Console(stderr=True).status(doing) as status:

        def show(what: str, done: int, of: int) -> None:
            status.update(progress_words(what, done, of) if done < of else doing)

        yield lambda what: partial(show, what)


class _Lines:
    """Says no more than a line a second, and the start of what is sure to take longer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said_seconds = clock()

    def say(self, what: str, done: int, of: int) -> None:
        """Say how far something is, where that is worth a line."""
        is_beginning = what == TRACED and done == 0
        if is_beginning or self._clock() - self._said_seconds >= 1.0:
            note(progress_words(what, done, of))
            self._said_seconds = self._clock()
