"""Owns what is shown on stderr while something takes more than a second.

Knows nothing of results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from sweep.terminal.console import note


def tracing_words(done: int, of: int) -> str:
    """Return how far tracing is, in words."""
    return f"tracing the model's memory: {done} of {of} structures"


def is_worth_a_line(done: int, of: int) -> bool:
    """Whether to say so where each time takes a line: at the start, and after each quarter."""
    return 4 * done // of > 4 * (done - 1) // of


@contextmanager
def working(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show on stderr what takes more than a second; yields what hears how far tracing is.

    A terminal shows it as long as it takes; elsewhere only tracing is said, in some lines.
    """
    if not sys.stderr.isatty():
        yield _note_tracing
        return
    with Console(stderr=True).status(what) as status:
        yield lambda done, of: status.update(tracing_words(done, of) if done < of else what)


def _note_tracing(done: int, of: int) -> None:
    if is_worth_a_line(done, of):
        note(tracing_words(done, of))
