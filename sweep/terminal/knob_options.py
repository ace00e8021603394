"""Owns how a command takes the knobs of a configuration as options.

What an option takes and how it is explained is declared with its knob. That declaration is handed
in: importing it takes longer than all other help together, so who does not need it does without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sweep.terminal.typed import Invocation, as_typed

if TYPE_CHECKING:
    from search_spaces.knobs import Knob

Command = Callable[..., int]


def takes_knobs(command: Command) -> Command:
    """Hide a command's argument ``configuration``; `add_knobs` gives it an option for each knob.

    The argument gets what was typed, by key; keys that were not typed are left out.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    own = {name: p for name, p in parameters.items() if name != "configuration"}

    def called(**values: Any) -> int:
        typed = {key: value for key, value in values.items() if key not in own}
        given = {key: value for key, value in typed.items() if value is not None}
        return command(**{name: values[name] for name in own}, configuration=given)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    _declare(called, own.values())
    return called


def add_knobs(command: Command, knobs: Mapping[str, Knob]) -> None:
    """Give a command that `takes_knobs` an option for each of ``knobs`` that it has not got."""
    own = inspect.signature(command).parameters
    missing = {key: knob for key, knob in knobs.items() if key not in own}
    _declare(command, [*own.values(), *(_option(key, knob) for key, knob in missing.items())])


def reads(key: str) -> Callable[[typer.Context, typer.CallbackParam, Any], Any]:
    """Return what reads a setting that was typed; who typed none is not asked to import anything.

    What it raises names the option as it was typed.
    """

    def read(context: typer.Context, option: typer.CallbackParam, typed: Any) -> Any:
        if typed is None:
            return None
        from search_spaces.dimensions import read_value
        from search_spaces.documents import Document
        from search_spaces.knobs import KNOBS

        name = as_typed(option, (context.obj or Invocation(())).words)
        return read_value(key, KNOBS[key].typed(typed), document=Document("", names={key: name}))

    return read


def _declare(command: Command, parameters: Iterable[inspect.Parameter]) -> None:
    signature = inspect.Signature(list(parameters), return_annotation=int)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}


def _option(key: str, knob: Knob) -> inspect.Parameter:
    name = key.replace("_", "-")
    # A truth value has its opposite beside it.
    own = f"--{name}/--no-{name}" if knob.kind is bool else f"--{name}"
    option = typer.Option(
        *knob.aliases,
        own,
        help=knob.help,
        show_default=False,
        callback=reads(key),
    )
    return inspect.Parameter(
        key,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[knob.kind | None, option],
    )
