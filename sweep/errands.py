"""Owns a child that does one thing and is gone: a request on its stdin, news and the answer on its
stdout, each a line of JSON.

Both halves are here: `run_errand` for the parent, `serve_errand` for the child's ``__main__``.
Light to import, as a child does so before anything else. Knows nothing of what is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from search_spaces.errors import EnvironmentFault, InputError, words_of
from search_spaces.redaction import shown
from sweep.processes import Child, bind_to_parent, leave_a_guard

_LAST_WORDS_BYTES = 16384
_LAST_MOMENT_SECONDS = 5.0
"""A child that has answered gets so long to end by itself."""

Say = Callable[[Mapping[str, Any]], None]
"""Tells the parent how far something is."""


def run_errand(
    command: Sequence[str],
    request: Mapping[str, Any],
    *,
    on_news: Callable[[Mapping[str, Any]], None],
    environment: Mapping[str, str],
    name: str = "the child process",
) -> dict[str, Any]:
    """Return what a child answers; whatever happens, it is gone afterwards with all it started.

    Args:
        command: what runs, followed by this process's number.
        request: what it is to do.
        on_news: called with each thing that it says on the way.
        environment: its variables.
        name: what a person is told that it is.

    Raises:
        InputError: the child finds fault with what was typed.
        EnvironmentFault: it finds fault with the machine, cannot be started, or ends without an
            answer.
        OSError: the system refuses it something; the edge knows what to do about a full disk.
    """
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
                answer = _heard(stdout, on_news)
            except BaseException:
                child.end()
                raise
            end = child.end(patience=_LAST_MOMENT_SECONDS)
        if answer is None:
            raise EnvironmentFault(f"{name} ended with {end}{last_words(printed)}")
    return _result(answer)


def _result(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an answer holds, or raise the fault that it is."""
    match answer:
        case {"input": str(reason)}:
            raise InputError(reason)
        case {"environment": str(reason)}:
            raise EnvironmentFault(reason)
        case {"system": [int(number), str(reason), file]}:
            raise OSError(number, reason, file)
    return dict(answer["answer"])


def _heard(
    stdout: IO[bytes], on_news: Callable[[Mapping[str, Any]], None]
) -> Mapping[str, Any] | None:
    """Return what was said last of all, once it is no news; None where nothing was."""
    for line in stdout:
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if "news" not in said:
            return dict(said)
        on_news(said["news"])
    return None


def last_words(printed: IO[bytes]) -> str:
    """Return the last line of what a child printed, as the end of a sentence; nothing where it
    printed nothing. Secrets are left out.
    """
    size = printed.seek(0, os.SEEK_END)
    printed.seek(max(0, size - _LAST_WORDS_BYTES))
    lines = shown(printed.read().decode(errors="replace")).strip().splitlines()
    return f": {lines[-1].strip()[:500]}" if lines else ""


def serve_errand(work: Callable[[Mapping[str, Any], Say], Mapping[str, Any]]) -> None:
    """Do in this process, a child, what it was started for, and say what came of it.

    Its parent's number is the last argument. What libraries print goes to stderr.
    """
    # Before anything that takes time: whoever starts this may be killed at any moment.
    bind_to_parent(int(sys.argv[-1]))
    with _own_stdout() as stdout:
        leave_a_guard(stdout.fileno())

        def say(message: Mapping[str, Any]) -> None:
            stdout.write(json.dumps(message).encode() + b"\n")
            stdout.flush()

        try:
            answer = work(json.loads(sys.stdin.readline()), lambda news: say({"news": news}))
            say({"answer": answer})
        except InputError as error:
            say({"input": str(error)})
        except OSError as error:
            say(_of_system(error))
        except (MemoryError, EnvironmentFault) as error:
            say({"environment": words_of(error)})


def _of_system(error: OSError) -> dict[str, Any]:
    """Return what the system refused; some libraries' errors are none of the system's."""
    if error.errno is None or error.strerror is None:
        return {"environment": words_of(error)}
    file = error.filename if isinstance(error.filename, str) else None
    return {"system": [error.errno, error.strerror, file]}


@contextlib.contextmanager
def _own_stdout() -> Iterator[IO[bytes]]:
    """Yield this process's stdout, and let what others print there go to stderr."""
    with os.fdopen(os.dup(1), "wb") as stdout:
        os.dup2(2, 1)
        yield stdout
