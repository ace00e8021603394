"""What must be so before the first test imports torch, and for processes that tests start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# As the supervisor does for a worker on the CPU; torch reads it when it is imported.
os.environ["TORCHDYNAMO_DISABLE"] = "1"


@pytest.fixture(scope="module")
def our_own_code() -> Iterator[None]:
    """Have the processes that a module's tests start run the code of this checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield
