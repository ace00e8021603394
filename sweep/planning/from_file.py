"""Owns reading a file of configurations, one JSON object a line. Knows nothing of plans."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from search_spaces.config import TrialConfig, parse_config
from search_spaces.documents import read_text
from search_spaces.errors import InputError, quote

STDIN = "-"
"""Name of standard input."""


def read_configurations(
    name: str, *, stdin: BinaryIO | None = None
) -> list[tuple[str, TrialConfig]]:
    """Return each line's configuration, with where it stands for messages.

    Blank lines are skipped, missing keys take the recipe's defaults.

    Args:
        name: a file, or ``-`` for standard input.
        stdin: read for ``-``; the process's own by default.

    Raises:
        InputError: the file is missing or empty, or a line is no configuration; names file, line
            and key.
        EnvironmentFault: the file is there and cannot be read.
    """
    label, text = _text(name, stdin or sys.stdin.buffer)
    configurations = [
        (where, parse_config(_object(line, where=where), where=where))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
        for where in [f"{label}: line {number}"]
    ]
    if not configurations:
        raise InputError(f"{label}: no configuration in it; give one JSON object a line")
    return configurations


def _text(name: str, stdin: BinaryIO) -> tuple[str, str]:
    if name != STDIN:
        return name, read_text(Path(name), label=name)
    try:
        return "stdin", stdin.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"stdin: not UTF-8 text, byte {error.start} is wrong") from error


def _object(line: str, *, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{where}: must be a JSON object, got {quote(values)}")
    return values


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object whose keys are each given once."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key '{key}' is given twice")
        values[key] = value
    return values
