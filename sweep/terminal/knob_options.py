"""How a command takes settings of a configuration: six as options, any by `--set KEY=VALUE`."""

from __future__ import annotations

import json
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

    return read_value(key, typed, document=Document("", names={key: name}))


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
        from search_spaces.config import KNOBS
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
        value: Any = text.strip()
        # A number, a truth value or null; anything else is a word. Its field says what it takes.
        with suppress(ValueError):
            value = json.loads(value.lower())
        given[key] = _read(key, value, f"--set {key}")
    return given
