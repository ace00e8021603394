"""Layers as one node of the graph beside torch's own checkpointing of them."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.bench.recomputing import recomputed


class Layer(torch.nn.Module):
    """A frozen product, an adapter, and what it was given by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.adapter = torch.nn.Linear(8, 8)
        self.types: list[torch.dtype] = []
        self.inner: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        inner = self.frozen(x)
        self.types.append(inner.dtype)
        self.inner.append(weakref.ref(inner))
        return torch.tanh(inner) + self.adapter(x) + shift


def gradients(by: Any, *, needs_gradient: bool) -> list[torch.Tensor]:
    """Return the gradients of input and adapter where a layer is recomputed by a function."""
    layer = Layer()
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_(needs_gradient)
    by(partial(layer, shift=torch.ones(8)), x).square().sum().backward()
    return [p.grad for p in (x, *layer.adapter.parameters()) if p.grad is not None]


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_gradients_are_those_of_torchs_own(needs_gradient: bool) -> None:
    own = gradients(recomputed, needs_gradient=needs_gradient)
    torchs = partial(checkpoint, use_reentrant=False)
    theirs = gradients(torchs, needs_gradient=needs_gradient)
    assert len(own) == 2 + needs_gradient
    for one, other in zip(own, theirs, strict=True):
        assert torch.equal(one, other)


def test_the_second_time_is_in_the_same_types() -> None:
    layer = Layer()
    x = torch.ones(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = recomputed(partial(layer, shift=torch.ones(8)), x)
    out.sum().backward()
    assert layer.types == [torch.bfloat16, torch.bfloat16]


def test_nothing_is_kept_but_the_input() -> None:
    layer = Layer()
    x = torch.ones(4, 8, requires_grad=True)
    out = recomputed(partial(layer, shift=torch.ones(8)), x)
    assert layer.inner[0]() is None
    out.sum().backward()
    assert x.grad is not None


def test_an_argument_by_name_gets_its_gradient_too() -> None:
    layer = Layer()
    shift = torch.ones(8, requires_grad=True)
    x = torch.ones(4, 8, requires_grad=True)
    recomputed(partial(layer, shift=shift), x).sum().backward()
    assert shift.grad is not None
    assert shift.grad.tolist() == [4.0] * 8
