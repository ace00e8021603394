"""Owns the two streams: results to stdout, everything else to stderr, neither able to fail a study.

What is printed has no password or token in it and nothing that works unseen in a terminal, also
where a library prints it. Documents that programs read are printed as they are: `say_json` takes
secrets out of their texts, and pages and exports are made without any.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from search_spaces.errors import EnvironmentFault
from search_spaces.redaction import redact, redacted, shown

STDOUT = "-"
"""Name of standard output, where a file is named."""
_BELONGS_TOGETHER = re.compile(r"(?<=\d) (?=x \d|%|[GM]iB|tokens/s|s\b|min\b)|(?<=\d x) (?=\d)")
"""A number and its unit are not parted at the end of a line."""
_NARROWEST = 24
"""Columns below which a cell is not folded."""


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
    if not isinstance(sys.stderr, Guarded):
        sys.stderr = Guarded(sys.stderr)


def say(text: str) -> None:
    """Print a result on stdout for a person to read. Raises what `say_as_is` raises."""
    say_as_is(shown(text))


def say_version() -> None:
    """Print the version of this program, and import nothing else for it."""
    from importlib import metadata

    try:
        say(f"sweep {metadata.version('qlora-sweep')}")
    except metadata.PackageNotFoundError:
        say("sweep, run from a directory in which it is not installed")


def say_json(document: Mapping[str, Any]) -> None:
    """Print a result on stdout for a program to read. Raises what `say_as_is` raises."""
    say_as_is(json.dumps(redacted(document)))


def say_result(document: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print a result for a program or for a person. Raises what `say_as_is` raises."""
    if as_json:
        say_json(document)
    else:
        say(text)


def say_as_is(text: str) -> None:
    """Print a document on stdout: nothing in it is changed.

    Raises:
        ReaderGoneError: pipe or terminal is closed. Nothing printed later will complain again.
        EnvironmentFault: stdout is a file, and its disk is full.
    """
    cancel_announced()
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        _silence_stdout()
        # Of a terminal that is gone the system says that input and output failed.
        if error.errno in (errno.EPIPE, errno.EIO):
            raise ReaderGoneError from error
        raise EnvironmentFault(f"cannot write to stdout: {error.strerror}") from error


def _silence_stdout() -> None:
    # Python flushes stdout once more when it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_announced: list[threading.Timer] = []


def announce_if_slow(text: str, *, seconds: float = 1.5) -> None:
    """Print a message on stderr if nothing else is printed for so long."""
    timer = threading.Timer(seconds, _note_now, [text])
    timer.daemon = True
    _announced.append(timer)
    timer.start()


def cancel_announced() -> None:
    """Announce nothing any more: something else is shown."""
    while _announced:
        _announced.pop().cancel()


def confirmed(question: str) -> bool:
    """Ask a person on the terminal; anything but yes is no."""
    cancel_announced()
    sys.stderr.write(f"{shown(question)} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def note(text: str) -> None:
    """Print progress or a message on stderr; a closed stderr is nobody's fault."""
    cancel_announced()
    _note_now(text)


def _note_now(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(shown(text) + "\n")
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


class Guarded(Unfailing):
    """What stands for stderr: whatever is written, by libraries too, is as it may be shown.

    Their logs, warnings and tracebacks quote URLs and paths. Carriage returns stay: progress bars
    are made of them.
    """

    def write(self, text: str) -> int:
        """Write it without secrets, and without what works unseen."""
        super().write("\r".join(map(shown, text.split("\r"))))
        return len(text)

    @property
    def drawn_on(self) -> TextIO:
        """The stream itself, for what draws with escapes of its own."""
        return self._stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Synchronized(Unfailing):
    """An unfailing stream whose every write reaches a terminal as one picture.

    Synchronized output (DEC mode 2026) keeps a terminal from showing half of a redraw; those that
    do not know it ignore it. What is drawn has its own escapes, which stay; secrets do not.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(getattr(stream, "drawn_on", stream))

    def write(self, text: str) -> int:
        """Write what is shown at once."""
        text = redact(text)
        if "\x1b" in text and self.isatty():
            super().write(f"\x1b[?2026h{text}\x1b[?2026l")
        else:
            super().write(text)
        return len(text)


def width_of(stream: TextIO) -> int | None:
    """Return the columns of a terminal; None for a pipe or a file, where lines have no end."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def folded(text: str, width: int | None, *, indent: int = 0) -> str:
    """Return text whose lines end within ``width`` columns, between words; None leaves it alone.

    What goes on in a further line is indented by ``indent`` more than its first. Commands are left
    as they are, to be copied. Secrets are left out, and what works unseen is written out.
    """
    # Before it is folded: a secret that goes on in the next line would not be known any more.
    text = shown(text)
    if width is None:
        return text
    return "\n".join(_folded_line(line, width, indent) for line in text.splitlines())


def _folded_line(line: str, width: int, indent: int) -> str:
    start = len(line) - len(line.lstrip())
    is_command = line.lstrip().startswith("sweep ")
    if len(line) <= width or is_command:
        return line
    further = " " * min(start + indent, width // 2)
    # Words that are longer than a line, paths say, are left whole, to be copied.
    return textwrap.fill(
        _BELONGS_TOGETHER.sub("\N{NO-BREAK SPACE}", line.strip()),
        width,
        initial_indent=line[:start],
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\N{NO-BREAK SPACE}", " ")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, width: int | None = None) -> str:
    """Return rows under a header in aligned columns.

    Where they do not go into ``width`` columns the last one is folded, and where that would leave
    it too narrow, each row is a paragraph of its own. None for no limit.
    """
    lines = [tuple(header), *(tuple(map(shown, row)) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    room = sum(widths[:-1]) + 2 * (len(widths) - 1)
    if width is None or room + widths[-1] <= width:
        return "\n".join(_aligned(line, widths) for line in lines)
    if width - room >= min(_NARROWEST, widths[-1]):
        return "\n".join(_aligned_folded(line, widths, width - room) for line in lines)
    return "\n".join(_paragraph(lines[0], row, width) for row in lines[1:])


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
    return "  ".join(cells).rstrip()


def _aligned_folded(line: Sequence[str], widths: Sequence[int], last: int) -> str:
    """Return a row whose last cell goes on below itself."""
    first, *further = folded(line[-1], last).splitlines() or [""]
    start = _aligned((*line[:-1], first), widths)
    indent = " " * (sum(widths[:-1]) + 2 * (len(widths) - 1))
    return "\n".join([start, *(f"{indent}{rest}" for rest in further)])


def _paragraph(header: Sequence[str], row: Sequence[str], width: int) -> str:
    """Return a row as its first cell, and below it each other with what it is."""
    named = [f"{name.strip()} {cell}" for name, cell in zip(header[1:], row[1:], strict=True)]
    indent = " " * (2 + len(row[0]) - len(row[0].lstrip()))
    return f"{row[0]}\n" + folded(f"{indent}{', '.join(named)}", width)
