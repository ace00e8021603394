"""What every test of the training needs once."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest

from tests.sweep.frozen import frozen_libraries  # noqa: F401


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let layers be compiled, which the tests' own processes are told not to do."""
    import torch

    from qlora_sweep.sweep.training.adapters import forget_compiled

    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    forget_compiled()
    with torch._dynamo.config.patch(disable=False), warnings.catch_warnings():
        # Tracing sets off warnings that are not ours.
        warnings.simplefilter("default")
        yield
    forget_compiled()
    # What dynamo keeps of its tracing is never trained on, and has no data to be counted.
    gc.collect()
    gc.freeze()


@pytest.fixture
def few_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare 8-bit compute over a quarter of the micro-batches: of a tiny model most is overhead.

    Tests with it take larger micro-batches, so that as many tokens are compared.
    """
    from qlora_sweep.sweep.training import faithfulness

    monkeypatch.setattr(faithfulness, "MICRO_BATCHES", faithfulness.MICRO_BATCHES // 4)
