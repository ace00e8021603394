"""The two streams: results go to stdout, all else to stderr; neither can fail a study.

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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TextIO, cast

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.redaction import redact, redacted, shown

STDOUT = "-"
"""Name of standard output, where a file is named."""
QUIET_SECONDS = 1.25
LONGEST_PAUSE_SECONDS = 60.0
"""Seconds without a line after which progress is printed, and the longest that they become."""
PATIENCE_SECONDS = 20.0
"""Of one wait, after which the time to the next line doubles, up to a minute."""
_BELONGS_TOGETHER = re.compile(r"(?<=\d) (?=x \d|%|[GM]iB|tokens/s|s\b|min\b)|(?<=\d x) (?=\d)")
"""A number and its unit are not parted at the end of a line."""


class ReaderGoneError(Exception):
    """The reader of stdout has closed it."""


def prepare_streams() -> None:
    """Make both streams take whatever comes.

    A terminal without Unicode shows question marks; what goes to a stderr that was closed before
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
        sys.stderr = cast(TextIO, Guarded(sys.stderr))


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
        EnvironmentFault: stdout is a file, and its disk is full, or it was closed before the start.
    """
    cancel_announced()
    if getattr(sys.stdout, "name", None) == os.devnull:
        raise EnvironmentFault("cannot write to stdout: it is closed")
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Of a terminal that is gone the system says that input and output failed.
        if error.errno in (errno.EPIPE, errno.EIO):
            raise ReaderGoneError from error
        raise EnvironmentFault(f"cannot write to stdout: {error.strerror}") from error


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


def agreed(question: str, *, command: str, is_sure: bool) -> bool:
    """Return whether a command goes ahead: a person is asked, unless sure already.

    Raises:
        InputError: stdin is no terminal.
    """
    if not is_sure and not sys.stdin.isatty():
        raise InputError(f"{command}: stdin is not a terminal: pass --yes")
    return is_sure or confirmed(question)


def confirmed(question: str) -> bool:
    """Ask a person on the terminal; anything but yes is no."""
    cancel_announced()
    sys.stderr.write(f"{shown(question)} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def note(text: str) -> None:
    """Print progress or a message on stderr; a closed stderr is no error."""
    cancel_announced()
    _note_now(text)


def note_folded(text: str, *, indent: int = 0) -> None:
    """Print the same, folded to the width of the terminal; further lines are indented."""
    note(folded(text, width_of(sys.stderr), indent=indent))


def _note_now(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(shown(text) + "\n")
        sys.stderr.flush()


class Unfailing:
    """A text stream whose writes never fail: a terminal may go away while something is shown."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or do not."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each, or do not."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush, or do not."""
        with contextlib.suppress(OSError):
            self._stream.flush()


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
        is_drawn = "\x1b" in text and self.isatty()
        super().write(f"\x1b[?2026h{text}\x1b[?2026l" if is_drawn else text)
        return len(text)


def width_of(stream: TextIO) -> int | None:
    """Return the columns of a terminal; None for a pipe or a file, where lines have no end."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def folded(text: str, width: int | None, *, indent: int = 0) -> str:
    """Return text whose lines end within ``width`` columns, between words; None leaves it alone.

    Further lines are indented by ``indent`` more than the first. Commands are left as they are, to
    be copied. Secrets are left out, and what works unseen is written out.
    """
    # Before it is folded: a secret over two lines would not be recognised.
    text = shown(text)
    if width is None:
        return text
    return "\n".join(_folded_line(line, width, indent) for line in text.splitlines())


def _folded_line(line: str, width: int, indent: int) -> str:
    bare = line.lstrip()
    start = len(line) - len(bare)
    if len(line) <= width or bare.startswith("sweep "):
        return line
    # Words that are longer than a line, paths say, are left whole, to be copied.
    return textwrap.fill(
        _BELONGS_TOGETHER.sub("\N{NO-BREAK SPACE}", line.strip()),
        width,
        initial_indent=line[:start],
        subsequent_indent=" " * min(start + indent, width // 2),
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\N{NO-BREAK SPACE}", " ")


def progress_words(what: str, done: int, of: int) -> str:
    """Return how far something is: ``12 of 36 structures traced``."""
    return f"{done} of {of} {what}"


class Rhythm:
    """When a further progress line is due where none is redrawn: soon, then more seldom."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Wait for something else."""
        self._begun_seconds = self._clock()
        self._quiet_seconds = QUIET_SECONDS
        self._due_seconds = self._begun_seconds + QUIET_SECONDS

    @property
    def is_due(self) -> bool:
        """Whether nothing was said for long enough."""
        return self._clock() >= self._due_seconds

    def go_on(self) -> None:
        """Something was said of what is waited for."""
        now = self._clock()
        if now - self._begun_seconds >= PATIENCE_SECONDS:
            self._quiet_seconds = min(2 * self._quiet_seconds, LONGEST_PAUSE_SECONDS)
        self._due_seconds = now + self._quiet_seconds


@contextlib.contextmanager
def ticking(tick: Callable[[], None], *, seconds: float) -> Iterator[None]:
    """Call something again and again, from a thread: the one that works may be busy for minutes."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            tick()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def working(doing: str) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Show on stderr that something takes more than a second.

    Yields what returns, for the name of a part of it, what hears how much of that is done, of how
    much. A terminal shows it as long as it takes; elsewhere a line says it now and then.
    """
    from rich.console import Console

    words = doing
    began = time.monotonic()
    rhythm = Rhythm()
    console = Console(file=cast(TextIO, Synchronized(sys.stderr)))
    is_drawn = sys.stderr.isatty() and not console.is_dumb_terminal
    status = console.status(doing) if is_drawn else None

    def hear(what: str, done: int, of: int) -> None:
        nonlocal words
        words = progress_words(what, done, of) if done < of else doing
        if status is not None:
            status.update(words)

    def show_progress() -> None:
        if rhythm.is_due:
            note(f"{words} ({time.monotonic() - began:.0f} s)")
            rhythm.go_on()

    with status or ticking(show_progress, seconds=QUIET_SECONDS / 4):
        yield lambda what: partial(hear, what)
