"""Owns what is shown on stderr while something takes more than a second.

Knows nothing of results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console

from sweep.terminal.console import note

TRACED = "structures traced"


def progress_words(what: str, done: int, of: int) -> str:
    """Return how far something is: ``12 of 36 structures traced``."""
    return f"{done} of {of} {what}"


def is_worth_a_line(done: int, of: int) -> bool:
    """Whether to say so where each time takes a line: at the start, and after each quarter."""
    return 4 * done // of > 4 * (done - 1) // of


@contextmanager
def working(doing: str) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Show on stderr that something takes more than a second.

    Yields what returns, for the name of a part of it, what hears how much of that is done, of how
    much. A terminal shows it as long as it takes; elsewhere such parts are said in some lines.
    """
    if not sys.stderr.isatty():
        yield lambda what: partial(_note_progress, what)
        return
    with Console(stderr=True).status(doing) as status:

        def show(what: str, done: int, of: int) -> None:
            status.update(progress_words(what, done, of) if done < of else doing)

        yield lambda what: partial(show, what)


def _note_progress(what: str, done: int, of: int) -> None:
    if is_worth_a_line(done, of):
        note(progress_words(what, done, of))
