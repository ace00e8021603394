"""Subprocess jobs: a child that does one thing and is gone. Its request comes on stdin; news and
the answer go to stdout, each a line of JSON.

Both halves are here: `run_subprocess` for the parent, `serve_subprocess` for the child's
``__main__``. Light to import, as a child does so before anything else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, words_of
from qlora_sweep.sweep.installation import missing_words
from qlora_sweep.sweep.json_child import JsonChild, Say, answers_to_parent
from qlora_sweep.sweep.processes import leave_a_guard

_LAST_MOMENT_SECONDS = 5.0
"""A child that has answered gets so long to end by itself."""


def run_subprocess(
    command: Sequence[str],
    request: Mapping[str, Any],
    *,
    on_news: Say,
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
    with closing(JsonChild(command, environment=environment, name=name)) as child:
        child.ask(request)
        said = _last_message(child, on_news)
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
        raise EnvironmentFault(f"{name} ended with {end}{child.last_words()}")


def _last_message(child: JsonChild, on_news: Say) -> Any:
    """Return the first message that is no news, and tell each news; None where none comes."""
    while line := child.next_line():
        try:
            said = json.loads(line)
        except ValueError:
            # A library printed something of its own.
            continue
        if "news" not in said:
            return said
        on_news(said["news"])
    return None


def serve_subprocess(work: Callable[[Mapping[str, Any], Say], Mapping[str, Any]]) -> None:
    """Do in this process, a child, what it was started for, and say what came of it."""
    with answers_to_parent() as (say, descriptor):
        leave_a_guard(descriptor)
        try:
            answer = work(json.loads(sys.stdin.readline()), lambda news: say({"news": news}))
            say({"answer": answer})
        except InputError as error:
            say({"input": str(error)})
        except ImportError as error:
            say({"environment": missing_words(error)})
        except (OSError, MemoryError, EnvironmentFault) as error:
            say(_fault_message(error))


def _fault_message(error: Exception) -> dict[str, Any]:
    """Return how a fault of the machine is told: as the system's error where it is one."""
    # Some libraries' errors of this kind are none of the system's.
    number = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None)
    if number is None or reason is None:
        return {"environment": words_of(error)}
    file = getattr(error, "filename", None)
    if not isinstance(file, str):
        file = None
    return {"system": [number, reason, file]}
