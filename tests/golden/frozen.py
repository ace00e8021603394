"""Answers that must not change: compared with what is committed, or written anew."""

from __future__ import annotations

import difflib
import gzip
import json
import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).parent / "answers"
_SHOWN = 20
_WIDTH = 100
_ABSENT = "(absent)"

Frozen = Callable[[str, Any], None]
Difference = tuple[str, Any, Any]
"""Where, what it was, and what it is."""


def frozen(name: str, value: Any, *, is_regenerated: bool = False) -> None:
    """Fail where a value is not the committed answer of that name, or make it the answer.

    Args:
        name: of the answer's file.
        value: what JSON can hold; floats may be off by 1e-9 of themselves, or 1e-12.
        is_regenerated: whether a value that differs becomes the answer and is printed.
    """
    path = ANSWERS / f"{name}.json.gz"
    text = json.dumps(value, indent=0, ensure_ascii=False)
    before = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else None
    found = list(islice(_differences("", before, json.loads(text)), _SHOWN + 1))
    if not found:
        return
    report = "\n".join(map(_line, found[:_SHOWN])) + "\n..." * (len(found) > _SHOWN)
    if not is_regenerated:
        raise AssertionError(f"{name} is not what it was:\n{report}")
    print(f"\n{name} is written anew:\n{report}")
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _line(difference: Difference) -> str:
    path, *values = difference
    before, after = (
        text if len(text := repr(v)) < _WIDTH else f"{text[:_WIDTH]}..." for v in values
    )
    return f"  {path or 'all of it'}: {before} -> {after}"


def _differences(path: str, before: Any, after: Any) -> Iterator[Difference]:
    match before, after:
        case dict(), dict():
            for key in {**before, **after}:
                pair = before.get(key, _ABSENT), after.get(key, _ABSENT)
                yield from _differences(f"{path}.{key}", *pair)
        case list(), list():
            if len(before) != len(after):
                yield f"{path}.length", len(before), len(after)
            for at, pair in enumerate(zip(before, after, strict=False)):
                yield from _differences(f"{path}[{at}]", *pair)
        case str(), str() if "\n" in before:
            yield from _lines(path, before.splitlines(True), after.splitlines(True))
        case float(), float():
            if not math.isclose(before, after, rel_tol=1e-9, abs_tol=1e-12):
                yield path, before, after
        case _:
            if type(before) is not type(after) or before != after:
                yield path, before, after


def _lines(path: str, before: list[str], after: list[str]) -> Iterator[Difference]:
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, low, high, start, end in matcher.get_opcodes():
        if tag != "equal":
            yield f"{path} line {low + 1}", "".join(before[low:high]), "".join(after[start:end])
