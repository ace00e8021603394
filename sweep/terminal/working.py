"""Owns what is shown on stderr while something takes more than a second.

Knows nothing of results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console

from sweep.terminal.console import note

QUIET_SECONDS = 5.0
"""Between two lines about the same thing, and before the first."""


def tracing_words(done: int, of: int) -> str:
    """Return how far tracing is, in words."""
    return f"tracing the model's memory: {done} of {of} structures"


def is_worth_a_line(done: int, of: int) -> bool:
    """Whether to say so where each time takes a line: at the start, and after each quarter."""
    return 4 * done // of > 4 * (done - 1) // of


class Told(Protocol):
    """Hears how much of something is done."""

    def __call__(
        self, done: int, of: int, *, words: Callable[[int, int], str] = tracing_words
    ) -> None:
        """Take in how much is done, of how much; by default of tracing."""
        ...


def replay_words(done: int, of: int) -> str:
    """Return how far replays are, in words."""
    return f"replaying memory, block by block: {done} of {of} steps"


def fit_words(done: int, of: int) -> str:
    """Return how far it is known what fits, in words."""
    return f"finding what fits: {done} of {of} rows of configurations"


@contextmanager
def working(what: str) -> Iterator[Told]:
    """Show on stderr what takes more than a second; yields what hears how far it is.

    A terminal shows it as long as it takes; elsewhere it is said in some lines.
    """
    if not sys.stderr.isatty():
        yield _Lines()
        return
    with Console(stderr=True).status(what) as status:

        def told(done: int, of: int, *, words: Callable[[int, int], str] = tracing_words) -> None:
            status.update(words(done, of) if done < of else what)

        yield told


class _Lines:
    """Says in lines how far it is: of tracing in quarters, of all else every few seconds."""

    def __init__(self) -> None:
        self._said_seconds = time.monotonic()

    def __call__(
        self, done: int, of: int, *, words: Callable[[int, int], str] = tracing_words
    ) -> None:
        if words is tracing_words:
            if is_worth_a_line(done, of):
                note(words(done, of))
        elif time.monotonic() - self._said_seconds > QUIET_SECONDS:
            self._said_seconds = time.monotonic()
            note(words(done, of))
