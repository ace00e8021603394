"""Owns the words of a `sweep run` that is to run elsewhere: taken apart as the command itself does,
some replaced or left out, and put together again.

Knows no option by its name and nothing of where it is to run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from search_spaces.errors import InputError

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
    refuse_mistyped(command, words)
    called = Invocation(tuple(words), drive)
    code: int = command.main(
        args=list(words), prog_name=f"sweep {command.name}", standalone_mode=False, obj=called
    )
    return code


def refuse_mistyped(command: Any, words: Sequence[str]) -> None:
    """Raise `InputError` where an option of one value is given two, in whatever spelling, or where
    an empty text is one.
    """
    context = command.context_class(command, info_name=command.name, **command.context_settings)
    parser = command.make_parser(context)
    options = [known for known in command.get_params(context) if known.param_type_name == "option"]
    for option in options:
        collect = partial(parser.add_option, obj=option, dest=option.name)
        if option.is_flag:
            for names in filter(None, (option.opts, option.secondary_opts)):
                collect(opts=names, action="append_const", const=names[0])
        else:
            collect(opts=option.opts, action="append")
    values, _, _ = parser.parse_args(args=list(words))
    for option in options:
        name, given = as_typed(option, words), list(dict.fromkeys(values.get(option.name, ())))
        if "" in given:
            raise InputError(f"{name}: an empty text names nothing; leave the option out")
        if len(given) > 1 and not option.multiple:
            both = given if option.is_flag else [f"{name} {value}" for value in given]
            raise InputError(f"{' and '.join(both)} are both given: keep one")


def as_typed(option: Any, words: Sequence[str]) -> str:
    """Return an option's name as it stands among the words, its longest where it does not."""
    names = (word.partition("=")[0] for word in words)
    return next((name for name in names if name in option.opts), _longest(option))


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
