"""Owns the two streams: results to stdout, everything else to stderr, neither able to fail a study.

Knows nothing of what is printed.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Sequence

from search_spaces.errors import EnvironmentFault


class ReaderGoneError(Exception):
    """Whoever read stdout has stopped; there is nobody left to print for."""


def prepare_streams() -> None:
    """Make both streams take whatever comes.

    A terminal without Unicode shows question marks; what goes to a stream that was closed before
    the start goes nowhere.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def say(text: str) -> None:
    """Print a result on stdout.

    Raises:
        ReaderGoneError: the pipe is closed. Nothing printed later will complain again.
        EnvironmentFault: stdout is a file, and its disk is full.
    """
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:
        _silence_stdout()
        raise ReaderGoneError from error
    except OSError as error:
        _silence_stdout()
        raise EnvironmentFault(f"cannot write to stdout: {error.strerror}") from error


def _silence_stdout() -> None:
    # Python flushes stdout once more when it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """Print progress or a message on stderr; a closed stderr is nobody's fault."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows under a header in aligned columns, the last one as long as it is."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(_aligned(line, widths) for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
    return "  ".join(cells).rstrip()
