"""Collections of garbage that are spared what libraries leave, as in a process that trains."""

from __future__ import annotations

import gc

import pytest

_MANY = 30_000
"""Objects, of which a training looks at each some ten times; what a test leaves is fewer."""


@pytest.fixture(autouse=True)
def frozen_libraries() -> None:
    """Freeze what was imported since, as a child does: it takes a training most of its time."""
    if len(gc.get_objects()) > _MANY:
        gc.collect()
        gc.freeze()
