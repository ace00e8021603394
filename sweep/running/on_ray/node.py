"""Owns what a node of a cluster says of itself: its cards, its libraries, which paths it lacks.

Runs on the node, in a process of Ray's. Knows nothing of studies or of who asks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.environment import fingerprint
from sweep.running.device_info import Card, read_card

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class SelfPortrait:
    """A node, as it sees itself."""

    python: str
    """Path of its interpreter."""
    environment: Mapping[str, Any]
    """`storage.environment.fingerprint`, of no device."""
    cards: tuple[Card | None, ...]
    """Those that Ray hands out, in its order; None for one that no driver tells of."""
    missing: tuple[str, ...]
    """Of the paths that it was asked for."""


def look(cards: int, paths: tuple[str, ...]) -> SelfPortrait:
    """Return what this node is.

    Args:
        cards: how many of them Ray hands out here.
        paths: what a study needs to find here.
    """
    return SelfPortrait(
        python=sys.executable,
        environment=fingerprint(device="cuda" if cards else "cpu"),
        cards=tuple(_card(number) for number in _handed_out(cards)),
        missing=tuple(path for path in paths if not Path(path).exists()),
    )


def raylet_environment() -> Mapping[str, str]:
    """Return the variables that Ray was started with on this node; none where nobody may know.

    Those of this process are not all the node's: Ray sets some for each of its workers.
    """
    try:
        data = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in os.fsdecode(data).split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}


def _handed_out(count: int) -> tuple[str, ...]:
    """Return what CUDA calls the cards that Ray numbers from 0."""
    visible = raylet_environment().get(_VISIBLE)
    names = [] if visible is None else [name.strip() for name in visible.split(",")]
    return tuple(names[:count]) if names else tuple(map(str, range(count)))


def _card(name: str) -> Card | None:
    with _visible(name):
        return read_card()


@contextmanager
def _visible(name: str) -> Iterator[None]:
    before = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VISIBLE]
        else:
            os.environ[_VISIBLE] = before
