"""The words of a command as they were typed, for messages that name an option as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from search_spaces.errors import InputError


@dataclass(frozen=True)
class Invocation:
    """How a command was called."""

    words: tuple[str, ...]
    """As they were typed, behind the command's name."""


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
    return next((name for name in names if name in option.opts), str(max(option.opts, key=len)))
