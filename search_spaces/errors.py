"""Owns the error tree of what a person can type or name, and naming the nearest right word.

SweepError                  what the terminal translates into one message and an exit code
+-- InputError              exit 2: a file, key, value, preset, GPU or model that is not right
+-- EnvironmentFault        exit 3: GPU, driver, disk, database, network
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHOWN_MAX = 120
"""Characters of a value that a message quotes."""


class SweepError(Exception):
    """An expected failure with a message written for the person at the terminal."""

    exit_code = 1


class InputError(SweepError):
    """Something typed, written or named is not right; the message says what, and what would be."""

    exit_code = 2


class EnvironmentFault(SweepError):  # noqa: N818 - nothing in what was typed is wrong
    """The machine is at fault: no GPU, a broken driver, a full disk, a silent database."""

    exit_code = 3


def shown(value: object) -> str:
    """Return a value as a message quotes it: what was typed, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to write out whole numbers of thousands of digits.
        return "a number too long to show"
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known word, or the list of known ones."""
    names = sorted(known)
    # A word cut short means the one it begins: 'h100' is 'h100-80gb', though 'h200' looks closer.
    begun = [name for name in names if word and name.startswith(word)]
    nearest = begun or difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if nearest:
        return f"; did you mean '{nearest[0]}'?"
    return f"; known are {', '.join(names)}" if names else ""
