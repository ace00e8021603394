"""Owns the error tree of what a person can type or name, and naming the nearest right word.

SweepError                  what the terminal translates into one message and an exit code
+-- InputError              exit 2: a file, key, value, preset, GPU or model that is not right
+-- EnvironmentFault        exit 3: GPU, driver, disk, database, network
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SweepError(Exception):
    """An expected failure with a message written for the person at the terminal."""

    exit_code = 1


class InputError(SweepError):
    """Something typed, written or named is not right; the message says what, and what would be."""

    exit_code = 2


class EnvironmentFault(SweepError):
    """The machine is at fault: no GPU, a broken driver, a full disk, a silent database."""

    exit_code = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known word, or the list of known ones."""
    names = sorted(known)
    nearest = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if nearest:
        return f"; did you mean '{nearest[0]}'?"
    return f"; known are {', '.join(names)}" if names else ""
