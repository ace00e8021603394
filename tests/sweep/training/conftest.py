"""What every test of the training needs once."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

# As the supervisor does for a worker on the CPU; torch reads it when it is imported.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import sweep.training.trial  # noqa: F401 - so that the libraries' objects can be frozen


@pytest.fixture(scope="session", autouse=True)
def frozen_libraries() -> Iterator[None]:
    """Spare each trial's collections the libraries' objects, as the worker does."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
