"""Inputs of recomputed layers that wait on the host, beside streams that are late."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from qlora_sweep.sweep.training.recomputing import CheckpointsOnHost, Recomputing

pytestmark = pytest.mark.gpu
DEPTH = 6
ROWS, WIDTH = 8192, 2048
LATE_CYCLES = 20_000_000
"""Some ten milliseconds, in which an input could be written over or read too soon."""


def _layer(adapter: torch.Tensor, is_late: bool, x: torch.Tensor) -> torch.Tensor:
    if is_late:
        torch.cuda._sleep(LATE_CYCLES)
    return torch.tanh(x * adapter) + x


def _gradients(how: Recomputing, *, is_late: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    adapters = [torch.randn(WIDTH, device="cuda", requires_grad=True) for _ in range(DEPTH)]
    hidden = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    for adapter in adapters:
        hidden = how(partial(_layer, adapter, is_late), hidden)
    hidden.square().sum().backward()
    torch.cuda.synchronize()
    return [adapter.grad for adapter in adapters if adapter.grad is not None]


@pytest.mark.parametrize("late", ["nothing", "layers", "copies"])
def test_gradients_are_the_same_to_the_bit(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _gradients(Recomputing(), is_late=False)
    host = CheckpointsOnHost(torch.device("cuda"))
    stream = host.slots._stream
    assert stream is not None
    if late == "copies":
        kept = host._send

        def send(*given: Any) -> None:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LATE_CYCLES)
            kept(*given)

        monkeypatch.setattr(host, "_send", send)
    for _ in range(3):
        found = _gradients(Recomputing(host), is_late=late == "layers")
        assert len(found) == DEPTH
        assert all(map(torch.equal, found, expected))
    assert host.copies == 3 * DEPTH
    host.close()
