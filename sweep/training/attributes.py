"""Attributes that have other values for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def changed(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of objects; on exit they are as they were.

    Args:
        changes: objects, names of attributes that they have, and values.
    """
    changes = list(changes)
    before = [(thing, name, getattr(thing, name)) for thing, name, _ in changes]
    try:
        for each in changes:
            setattr(*each)
        yield
    finally:
        for each in before:
            setattr(*each)
