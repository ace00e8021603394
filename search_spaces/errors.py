"""The error tree of what a person can type or name, and naming the nearest right word.

SweepError                  what the terminal translates into one message and an exit code
+-- NothingFits             exit 1: everything was right, and no configuration fits
+-- InputError              exit 2: a file, key, value, preset, GPU or model that is not right
+-- EnvironmentFault        exit 3: GPU, driver, disk, database, network
    +-- GpuLost             a process that nothing ends holds the GPU
    +-- Interrupted         exit 130: somebody asked to stop while that was waited for
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping

from qlora_sweep.search_spaces.redaction import redact

QUOTE_MAX = 120
"""Characters of a value that a message quotes."""
NAMED_MAX = 3
"""Words that a message names as what was perhaps meant."""
KNOWN_MAX = 12
"""Known words that a message lists."""
CLOSE_ENOUGH = 0.6
"""Share of letters in common from which a word is perhaps a slip for another."""


class SweepError(Exception):
    """An expected failure with a message written for the person at the terminal."""

    exit_code = 1


class NothingFits(SweepError):  # noqa: N818 - an answer, and no mistake of anybody's
    """No configuration was measured to fit, so there is none to hand out."""


class InputError(SweepError):
    """Something typed, written or named is not right; the message says what, and what would be."""

    exit_code = 2


class EnvironmentFault(SweepError):  # noqa: N818 - nothing in what was typed is wrong
    """The machine is at fault: no GPU, a broken driver, a full disk, a silent database."""

    exit_code = 3


class Interrupted(EnvironmentFault):
    """Somebody asked to stop while something outside was waited for, which may be resumed."""

    exit_code = 130


class GpuLost(EnvironmentFault):
    """The process that has the device is held in the kernel, where not even SIGKILL ends it."""


def install_extra(name: str) -> str:
    """Return the command that installs what one of the extras in pyproject.toml brings."""
    return f"pip install 'qlora-sweep[{name}]'"


def quote(value: object) -> str:
    """Return a value as a message quotes it: as it was typed in YAML or JSON, cut where long."""
    try:
        # Before it is cut: in half a URL a password is not recognized.
        text = redact(_written(value))
    except ValueError:
        # Python refuses to write out whole numbers of thousands of digits.
        return "a number too long to show"
    if len(text) <= QUOTE_MAX:
        return text
    return f"{text[:QUOTE_MAX]}..."


def _written(value: object) -> str:
    match value:
        case str():
            # Quoted, with whatever would not show written out.
            return repr(value)
        case None | bool():
            return json.dumps(value)
        case bytes():
            return f"{len(value)} bytes of binary data"
        case Mapping():
            return f"{{{', '.join(f'{_plain(k)}: {_written(v)}' for k, v in value.items())}}}"
        case list() | tuple() | set() | frozenset():
            return f"[{', '.join(map(_written, value))}]"
        case _:
            # Numbers and dates read as they were typed.
            return str(value)


def _plain(key: object) -> str:
    if isinstance(key, str) and key.isprintable():
        return key
    return _written(key)


MORE_DESCRIPTORS = "raise the limit of open files, with `ulimit -n 4096` say"
"""What to do where too few file descriptors are allowed."""


def words_of(error: BaseException) -> str:
    """Return what an exception says, in words: its text without secrets, never its class's name."""
    match error:
        case OSError(strerror=str(reason), filename=None):
            return redact(reason)
        case OSError(strerror=str(reason)):
            return redact(f"{error.filename}: {reason}")
        case KeyError(args=(str(key),)):
            return f"'{key}' is missing"
    lines = redact(str(error)).strip().splitlines()
    # Where an exception has no text, its class's name in words: ``memory error``.
    if not lines:
        return re.sub("(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()
    return lines[0]


def did_you_mean(word: str, known: Iterable[str], *, lists: str = "") -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known words, or the list of a few.

    A word cut short means those it begins, whatever their case and the first few of ``known``:
    'h100' is 'h100-80gb', though 'h200' looks closer. A part of words means those.

    Args:
        word: that was typed.
        known: words.
        lists: the command that lists them, which is said where they are many.
    """
    names = {name.lower(): name for name in known}
    typed = word.strip().lower().partition(":")[0]
    begun = []
    holding = []
    for lower in names:
        if typed and lower.startswith(typed):
            begun.append(lower)
        if len(typed) > 2 and typed in lower:
            holding.append(lower)
    alike = difflib.get_close_matches(typed, names, n=1, cutoff=CLOSE_ENOUGH)
    nearest = begun[:NAMED_MAX] or alike or holding[:NAMED_MAX]
    all_of_them = ""
    if lists and len(names) > KNOWN_MAX:
        all_of_them = f" `{lists}` lists them"
    if nearest:
        return f"; did you mean {listed(repr(names[lower]) for lower in nearest)}?{all_of_them}"
    if all_of_them or not 0 < len(names) <= KNOWN_MAX:
        return all_of_them and f";{all_of_them}"
    return f"; known are {', '.join(sorted(names.values()))}"


def listed(words: Iterable[str]) -> str:
    """Return words as a choice between them: ``a, b or c``."""
    *most, last = words
    if not most:
        return last
    return f"{', '.join(most)} or {last}"


def in_percent(share: float) -> str:
    """Return a share of 0 to 1 as ``3.8 %``; little is not told as nothing, nor most as all."""
    if 0 < share < 0.001:
        return "<0.1 %"
    if 0.999 < share < 1:
        return ">99.9 %"
    return f"{100 * share:.1f}".removesuffix(".0") + " %"
