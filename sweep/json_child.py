"""A child that reads and writes lines of JSON: questions come on stdin, answers go to stdout, and
what libraries print goes to a file, whose last line says why a child ended without an answer.

Both halves are here: `JsonChild` for the parent, `answers_to_parent` for the child. Light to
import, as a child does so before anything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from qlora_sweep.search_spaces.errors import EnvironmentFault, words_of
from qlora_sweep.search_spaces.redaction import shown
from qlora_sweep.sweep.processes import Child, End, bind_to_parent

_LAST_WORDS_BYTES = 16384

Say = Callable[[Mapping[str, Any]], None]
"""Writes one JSON object to the parent."""


class JsonChild:
    """One process that is asked and answers. It ends with the thread that started it.

    Args:
        command: what runs, followed by this process's number.
        environment: its variables.
        name: what a person is told that it is.

    Raises:
        EnvironmentFault: it cannot be started.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], name: str
    ) -> None:
        self.name = name
        with contextlib.ExitStack() as opened:
            try:
                self._printed = opened.enter_context(tempfile.TemporaryFile())
                self.process = Child(
                    [*command, str(os.getpid())], stderr=self._printed, environment=environment
                )
            except OSError as error:
                raise EnvironmentFault(f"{name} cannot be started: {words_of(error)}") from error
            stdin = self.process.process.stdin
            stdout = self.process.process.stdout
            assert stdin is not None
            assert stdout is not None
            self._stdin = opened.enter_context(stdin)
            self._stdout = opened.enter_context(stdout)
            self._opened = opened.pop_all()

    def ask(self, question: Mapping[str, Any]) -> None:
        """Write a question."""
        # It may have ended before it reads; how it ended is read with the answer.
        with contextlib.suppress(OSError):
            self._stdin.write(json.dumps(question).encode() + b"\n")
            self._stdin.flush()

    def next_line(self, *, bytes_max: int = -1) -> bytes:
        """Return the next line that it writes; what there is of it where it closes its pipe."""
        return self._stdout.readline(bytes_max)

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[threading.Timer]:
        """Kill it if it takes longer than so many seconds for what is done inside the ``with``."""
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        try:
            yield timer
        finally:
            timer.cancel()

    def end(self, *, patience: float = 0.0) -> End:
        """End it with all that it started, after ``patience`` seconds by force; return how it
        ended. Idempotent."""
        return self.process.end(patience=patience)

    def last_words(self) -> str:
        """See `last_words`."""
        return last_words(self._printed)

    def close(self) -> None:
        """End it and free its pipes. Idempotent."""
        self.end()
        # What it had not read by then is lost.
        with contextlib.suppress(OSError):
            self._opened.close()


def last_words(printed: IO[bytes]) -> str:
    """Return the last line of what a child printed, as the end of a sentence; nothing where it
    printed nothing. Secrets are left out.
    """
    size = printed.seek(0, os.SEEK_END)
    printed.seek(max(0, size - _LAST_WORDS_BYTES))
    lines = shown(printed.read().decode(errors="replace")).strip().splitlines()
    if not lines:
        return ""
    return f": {lines[-1].strip()[:500]}"


@contextmanager
def answers_to_parent() -> Iterator[tuple[Say, int]]:
    """Bind this process, a child, to its parent, whose number is the last argument; give what
    writes to the parent, and the descriptor that it writes to. Whatever else is printed goes to
    stderr.
    """
    # Before anything that takes time: the parent may be killed at any moment.
    bind_to_parent(int(sys.argv[-1]))
    with os.fdopen(os.dup(1), "wb") as stdout:
        os.dup2(2, 1)

        def say(message: Mapping[str, Any]) -> None:
            stdout.write(json.dumps(message).encode() + b"\n")
            stdout.flush()

        yield say, stdout.fileno()
