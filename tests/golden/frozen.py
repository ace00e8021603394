"""Answers that must not change: compared with what is committed, or written anew.

Of words the numbers alone are kept: what a sentence says has tests where it is said.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).parent / "answers"
_SHOWN = 20
_WIDTH = 100
_ABSENT = "(absent)"
_NUMBER = re.compile(
    r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?=[x%]?(?:[^\w.-]|\.(?!\d)|$))"
)
"""One that stands alone, or before a sign: not that of a name, as of an H100 or of 8-bit."""

Frozen = Callable[[str, Any], None]


def frozen(name: str, value: Any, *, is_regenerated: bool = False) -> None:
    """Fail where a value is not the committed answer of that name, or make it the answer.

    Args:
        name: of the answer's file.
        value: what JSON can hold; of words the numbers are compared, in any order; floats may be
            off by 1e-9 of themselves, or 1e-12.
        is_regenerated: whether a value that differs becomes the answer and is printed.
    """
    path = ANSWERS / f"{name}.json.gz"
    text = json.dumps(without_words(value), indent=0, ensure_ascii=False)
    stored = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else _ABSENT
    before, after = dict(_leaves("", stored)), dict(_leaves("", json.loads(text)))
    pairs = {at: (before.get(at, _ABSENT), after.get(at, _ABSENT)) for at in {**before, **after}}
    lines = [_line(at, *pair) for at, pair in pairs.items() if not _is_same(*pair)]
    if not lines:
        return
    report = "\n".join(lines[:_SHOWN]) + "\n..." * (len(lines) > _SHOWN)
    if not is_regenerated:
        raise AssertionError(f"{name} is not what it was:\n{report}")
    print(f"\n{name} is written anew:\n{report}")
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def without_words(value: Any) -> Any:
    """Return a value whose words, which is any text with a space, are the numbers in them."""
    if isinstance(value, dict):
        return {key: without_words(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_words(each) for each in value]
    if isinstance(value, str) and len(value.split()) > 1:
        return sorted(float(found.replace(",", "")) for found in _NUMBER.findall(value))
    return value


def _leaves(at: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each plain value, with where it is."""
    if not isinstance(value, dict | list) or not value:
        yield at, value
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(f"{at}.{key}", each)


def _is_same(before: Any, after: Any) -> bool:
    if isinstance(before, float) and isinstance(after, float):
        return math.isclose(before, after, rel_tol=1e-9, abs_tol=1e-12)
    return type(before) is type(after) and bool(before == after)


def _line(at: str, before: Any, after: Any) -> str:
    return f"  {at or 'all of it'}: {before!r:.{_WIDTH}} -> {after!r:.{_WIDTH}}"
