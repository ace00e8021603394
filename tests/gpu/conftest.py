"""One worker for all tests of this directory: its start takes longer than most of them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def forgetful_logging() -> Iterator[None]:
    """Keep no log records: pytest holds them, and those of libraries hold exceptions, their frames
    and so the tensors of a whole step.
    """
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="session")
def rig() -> Iterator[object]:
    # Imported here: collecting the suite on a machine without a GPU needs none of it.
    import torch

    from tests.gpu.rig import Rig

    total = torch.cuda.get_device_properties(0).total_memory
    yield Rig(int(0.8 * total))
    gc.unfreeze()
