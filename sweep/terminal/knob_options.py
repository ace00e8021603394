"""How a command takes settings of a configuration: six as options, any by `--set KEY=VALUE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import typer

from search_spaces.errors import InputError, did_you_mean
from sweep.terminal.typed import Invocation, as_typed


def reads(key: str) -> Callable[[typer.Context, typer.CallbackParam, Any], Any]:
    """Return what reads a setting that was typed; without one, nothing is imported.

    What it raises names the option as it was typed.
    """

    def read(context: typer.Context, option: typer.CallbackParam, typed: Any) -> Any:
        if typed is None:
            return None
        return _read(key, typed, as_typed(option, (context.obj or Invocation(())).words))

    return read


def _read(key: str, typed: Any, name: str) -> Any:
    from search_spaces.dimensions import read_value
    from search_spaces.documents import Document
    from search_spaces.knobs import KNOBS

    meant = KNOBS[key].typed(typed) if isinstance(typed, str) else typed
    return read_value(key, meant, document=Document("", names={key: name}))


def configured(options: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a configuration that were typed, by key.

    Args:
        options: those with an option of their own; None where it was not typed.
        settings: those of ``--set``, each ``KEY=VALUE``.

    Raises:
        InputError: no such setting, a value that it does not take, or one that is given twice.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if settings:
        from search_spaces.knobs import KNOBS
    for each in settings:
        name, sign, text = each.partition("=")
        key = name.strip().replace("-", "_")
        if not sign:
            raise InputError(f"--set {each}: write it as KEY=VALUE, compile=true say")
        if key not in KNOBS:
            known = did_you_mean(key, KNOBS, lists="docs/settings.md")
            raise InputError(f"--set {each}: unknown setting '{name}'{known}")
        if key in given:
            raise InputError(f"--set {each}: {key} is given twice: keep one")
        given[key] = _read(key, _value(text.strip(), KNOBS[key].kind), f"--set {key}")
    return given


def _value(text: str, kind: type) -> Any:
    """Return a value as the text names it; the text itself where it is no such value."""
    if text == "null":
        return None
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    # Python reads 1_6 as a number, and digits of other scripts.
    is_plain = kind is not str and text.isascii() and "_" not in text
    for number in (int, float) if is_plain else ():
        with suppress(ValueError):
            return number(text)
    return text
