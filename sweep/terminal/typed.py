"""Owns the words of a `sweep run` that is to run elsewhere: taken apart as the command itself does,
some replaced or left out, and put together again.

Knows no option by its name and nothing of where it is to run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Drive = Callable[..., int]
"""What `driving.run` is: called with what the options of a run came to."""


@dataclass(frozen=True)
class Invocation:
    """How a command was called."""

    words: tuple[str, ...]
    """As they were typed, behind the command's name."""
    drive: Drive | None = None
    """What a run is handed to instead of being driven by this process."""


def call(command: Any, words: Sequence[str], *, drive: Drive) -> int:
    """Let a command read what was typed for it, and hand what that came to, to ``drive``.

    Args:
        command: of typer's.
        words: behind its name.
        drive: returns the exit code.

    Raises:
        InputError, typer's own: what the command itself raises.
    """
    called = Invocation(tuple(words), drive)
    code: int = command.main(
        args=list(words), prog_name=f"sweep {command.name}", standalone_mode=False, obj=called
    )
    return code


def respelled(
    command: Any,
    words: Sequence[str],
    *,
    without: Collection[str] = (),
    instead: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the words of a command again, those of its arguments first.

    Args:
        command: of typer's.
        words: that it takes, behind its name.
        without: names of parameters that are left out.
        instead: what stands for a parameter's value, by name, where it was typed.
    """
    instead = instead or {}
    context = command.context_class(command, info_name=command.name)
    values, _, order = command.make_parser(context).parse_args(args=list(words))
    arguments, options = list[str](), list[str]()
    for parameter in dict.fromkeys(order):
        typed = values.get(parameter.name)
        if parameter.name in without or not isinstance(typed, str | bool | list | tuple):
            continue
        every = typed if isinstance(typed, list | tuple) else [typed]
        for value in every:
            if parameter.param_type_name == "argument":
                arguments.append(instead.get(parameter.name, str(value)))
            elif isinstance(value, bool):
                options.append((parameter.opts if value else parameter.secondary_opts)[-1])
            else:
                # In one word, so that a value that begins with a dash stays one.
                options.append(f"{_longest(parameter)}={instead.get(parameter.name, value)}")
    return [*arguments, *options]


def _longest(parameter: Any) -> str:
    return str(max(parameter.opts, key=len))
