"""Commands that are run in a test's own process, as they are typed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Said(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


Sweep = Callable[..., Said]
