"""Subprocess jobs: a child that does one thing and ends. Its request comes on stdin; news and
the answer go to stdout, each a line of JSON.

Both halves are here: `run_subprocess` for the parent, `serve_subprocess` for the child's
``__main__``. Light to import, as a child does so before anything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, words_of
from qlora_sweep.search_spaces.redaction import shown
from qlora_sweep.sweep.installation import missing_words
from qlora_sweep.sweep.processes import Child, bind_to_parent, leave_a_guard

_LAST_WORDS_BYTES = 16384
_LAST_MOMENT_SECONDS = 5.0
"""A child that has answered gets so long to end by itself."""

Say = Callable[[Mapping[str, Any]], None]
"""Tells the parent how far something is."""


def run_subprocess(
    command: Sequence[str],
    request: Mapping[str, Any],
    *,
    on_news: Say,
    environment: Mapping[str, str],
    name: str = "the child process",
) -> dict[str, Any]:
    """Return what a child answers; it and all it started have ended afterwards.

    Args:
        command: what runs, followed by this process's number.
        request: what it is to do.
        on_news: called with each thing that it says on the way.
        environment: its variables.
        name: what it is called in messages.

    Raises:
        InputError: the child finds fault with what was typed.
        EnvironmentFault: it finds fault with the machine, cannot be started, or ends without an
            answer.
        OSError: the system refuses it something; the edge knows what to do about a full disk.
    """
    said: dict[str, Any] = {}
    with tempfile.TemporaryFile() as printed:
        try:
            child = Child([*command, str(os.getpid())], stderr=printed, environment=environment)
        except OSError as error:
            raise EnvironmentFault(f"{name} cannot be started: {words_of(error)}") from error
        assert child.process.stdin is not None
        assert child.process.stdout is not None
        with child.process.stdin as stdin, child.process.stdout as stdout:
            try:
                # It may have ended before it reads; how, is still to be heard.
                with contextlib.suppress(BrokenPipeError):
                    stdin.write(json.dumps(request).encode() + b"\n")
                    stdin.flush()
                for line in stdout:
                    try:
                        said = json.loads(line)
                    except ValueError:
                        # A library printed something of its own.
                        continue
                    if "news" not in said:
                        break
                    on_news(said["news"])
            except BaseException:
                child.end()
                raise
            end = child.end(patience=_LAST_MOMENT_SECONDS)
        match said:
            case {"answer": answer}:
                return dict(answer)
            case {"input": str(reason)}:
                raise InputError(reason)
            case {"environment": str(reason)}:
                raise EnvironmentFault(reason)
            case {"system": [int(number), str(reason), file]}:
                raise OSError(number, reason, file)
        raise EnvironmentFault(f"{name} ended with {end}{last_words(printed)}")


def last_words(printed: IO[bytes]) -> str:
    """Return the last line of what a child printed, as the end of a sentence; nothing where it
    printed nothing. Secrets are left out.
    """
    size = printed.seek(0, os.SEEK_END)
    printed.seek(max(0, size - _LAST_WORDS_BYTES))
    lines = shown(printed.read().decode(errors="replace")).strip().splitlines()
    return f": {lines[-1].strip()[:500]}" if lines else ""


def serve_subprocess(work: Callable[[Mapping[str, Any], Say], Mapping[str, Any]]) -> None:
    """Do in this process, a child, what it was started for, and say what came of it.

    Its parent's number is the last argument. What libraries print goes to stderr.
    """
    # Before anything that takes time: whoever starts this may be killed at any moment.
    bind_to_parent(int(sys.argv[-1]))
    with os.fdopen(os.dup(1), "wb") as stdout:
        os.dup2(2, 1)
        leave_a_guard(stdout.fileno())

        def say(message: Mapping[str, Any]) -> None:
            stdout.write(json.dumps(message).encode() + b"\n")
            stdout.flush()

        try:
            answer = work(json.loads(sys.stdin.readline()), lambda news: say({"news": news}))
            say({"answer": answer})
        except InputError as error:
            say({"input": str(error)})
        except ImportError as error:
            say({"environment": missing_words(error)})
        except (OSError, MemoryError, EnvironmentFault) as error:
            # Some libraries' errors of this kind are none of the system's.
            number = getattr(error, "errno", None)
            reason = getattr(error, "strerror", None)
            file = getattr(error, "filename", None)
            if not isinstance(file, str):
                file = None
            if number is None or reason is None:
                say({"environment": words_of(error)})
            else:
                say({"system": [number, reason, file]})
