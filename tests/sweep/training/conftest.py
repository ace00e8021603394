"""What every test of the training needs once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import sweep.training.trial  # noqa: F401 - so that the libraries' objects can be frozen


@pytest.fixture(scope="session", autouse=True)
def frozen_libraries() -> Iterator[None]:
    """Spare each trial's collections the libraries' objects, as the worker does."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
