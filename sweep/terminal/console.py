"""Owns the two streams: results to stdout, everything else to stderr, neither able to fail a study.

Knows nothing of what is printed.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from search_spaces.errors import EnvironmentFault

STDOUT = "-"
"""Name of standard output, where a file is named."""


class ReaderGoneError(Exception):
    """Whoever read stdout has stopped; there is nobody left to print for."""


def prepare_streams() -> None:
    """Make both streams take whatever comes.

    A terminal without Unicode shows question marks; what goes to a stream that was closed before
    the start goes nowhere, and a closed stdin is an empty one. Their descriptors are taken in
    order, so that no database is ever opened as the one that others print to.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
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


class Unfailing(io.TextIOBase):
    """A text stream whose writes never fail: a terminal may go away while something is shown."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's own."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Write, or do not."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or do not."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Whether it was a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the stream's own."""
        return self._stream.fileno()


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows under a header in aligned columns, the last one as long as it is."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(_aligned(line, widths) for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
    return "  ".join(cells).rstrip()
