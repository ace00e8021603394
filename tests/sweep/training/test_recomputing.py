"""Recomputed layers as one node of the graph each, whose inputs may wait on the host, beside
torch's own checkpointing of them."""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from qlora_sweep.storage.records import Ineffective
from qlora_sweep.sweep.training import host_memory
from qlora_sweep.sweep.training.recomputing import CheckpointsOnHost, Recomputing
from tests.sweep.training.tiny import LAYERS, tiny_base, tiny_config, tiny_loop, trial_on

DEPTH = 4
CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    """A frozen product, an adapter, and what it was given by name."""

    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.adapter = torch.nn.Linear(8, 8)
        self.drop = torch.nn.Dropout(dropped)
        self.types: list[torch.dtype] = []
        self.inner: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        inner = self.frozen(x)
        self.types.append(inner.dtype)
        self.inner.append(weakref.ref(inner))
        return torch.tanh(inner) + self.drop(self.adapter(x)) + shift


def _torchs(_layer: torch.nn.Module) -> Callable[..., Any]:
    return partial(checkpoint, use_reentrant=False)


def _own(_layer: torch.nn.Module, host: CheckpointsOnHost | None = None) -> Recomputing:
    return Recomputing(host)


def gradients(
    way: Callable[[torch.nn.Module], Callable[..., Any]],
    *,
    needs_gradient: bool = True,
    dropped: float = 0.0,
) -> list[torch.Tensor]:
    """The gradients of adapters and, if it needs one, of the input, where layers one after another
    are recomputed in a way."""
    torch.manual_seed(0)
    layers = [Layer(dropped) for _ in range(DEPTH)]
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_(needs_gradient)
    hidden = x
    for layer in layers:
        hidden = way(layer)(partial(layer, shift=torch.ones(8)), hidden)
    hidden.square().sum().backward()
    trained = [x] + [p for layer in layers for p in layer.adapter.parameters()]
    return [each.grad for each in trained if each.grad is not None]


@pytest.mark.parametrize("dropped", [0.0, 0.5])
@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("is_on_host", [True, False])
def test_gradients_are_those_of_torchs_own(
    is_on_host: bool, needs_gradient: bool, dropped: float
) -> None:
    host = CheckpointsOnHost(CPU) if is_on_host else None
    how: dict[str, Any] = {"needs_gradient": needs_gradient, "dropped": dropped}
    own = gradients(partial(_own, host=host), **how)
    theirs = gradients(_torchs, **how)
    assert len(own) == len(theirs) == 2 * DEPTH + needs_gradient
    for one, other in zip(own, theirs, strict=True):
        assert torch.equal(one, other)
    if host is not None:
        assert host.copies == DEPTH


def test_the_second_time_is_in_the_same_types() -> None:
    layer = Layer()
    x = torch.ones(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = _own(layer)(partial(layer, shift=torch.ones(8)), x)
    out.sum().backward()
    assert layer.types == [torch.bfloat16, torch.bfloat16]


def test_nothing_is_kept_but_the_input() -> None:
    layer = Layer()
    x = torch.ones(4, 8, requires_grad=True)
    out = _own(layer)(partial(layer, shift=torch.ones(8)), x)
    assert layer.inner[0]() is None
    out.sum().backward()
    assert x.grad is not None


def test_not_even_the_input_is_kept_where_it_waits_on_the_host() -> None:
    first, second = Layer(), Layer()
    host = CheckpointsOnHost(CPU)
    x = torch.ones(4, 8, requires_grad=True)
    between = _own(first, host)(partial(first, shift=torch.ones(8)), x)
    seen = weakref.ref(between)
    out = _own(second, host)(partial(second, shift=torch.ones(8)), between)
    del between
    assert seen() is None
    out.sum().backward()
    assert x.grad is not None


def test_an_argument_by_name_gets_its_gradient_too() -> None:
    layer = Layer()
    shift = torch.ones(8, requires_grad=True)
    x = torch.ones(4, 8, requires_grad=True)
    _own(layer)(partial(layer, shift=shift), x).sum().backward()
    assert shift.grad is not None
    assert shift.grad.tolist() == [4.0] * 8


class Noisy(Layer):
    """Its input is multiplied by noise, as a router's is."""

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.empty_like(x).uniform_(0.9, 1.1), shift=shift)


def test_noise_is_drawn_as_the_first_time() -> None:
    found = []
    for way in (_own, _torchs):
        torch.manual_seed(0)
        layer = Noisy()
        x = torch.ones(4, 8, requires_grad=True)
        out = way(layer)(partial(layer, shift=torch.ones(8)), x)
        # The step draws more before it goes back.
        torch.rand(3)
        out.square().sum().backward()
        found.append((x.grad, torch.rand(1)))
    for own, theirs in zip(*found, strict=True):
        assert own is not None
        assert torch.equal(own, theirs)


def test_layers_that_share_what_they_keep_go_through_torchs_own() -> None:
    """As Gemma 4's, whose last layers attend to an earlier one's keys."""

    def stores(x: torch.Tensor, *, states: UserDict[str, torch.Tensor]) -> torch.Tensor:
        states["keys"] = x * adapter
        return x + states["keys"]

    def shares(x: torch.Tensor, *, states: UserDict[str, torch.Tensor]) -> torch.Tensor:
        return x * states["keys"]

    adapter = torch.ones(8, requires_grad=True)
    host = CheckpointsOnHost(CPU)
    states: UserDict[str, torch.Tensor] = UserDict()
    x = torch.ones(4, 8)
    hidden = Recomputing(host)(partial(stores, states=states), x)
    Recomputing(host)(partial(shares, states=states), hidden).sum().backward()
    assert host.copies == 0
    assert adapter.grad is not None
    # Of (1 + a) * a, four rows of it.
    assert adapter.grad.tolist() == [4 * 3.0] * 8


def test_what_keeps_nothing_is_not_copied() -> None:
    """A layer before the first adapter."""
    host = CheckpointsOnHost(CPU)
    frozen = torch.nn.Linear(8, 8).requires_grad_(False)
    out = Recomputing(host, is_trained=False)(frozen, torch.ones(4, 8))
    assert not out.requires_grad
    assert not host._waiting


def test_a_host_without_room_refuses_the_setting_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2**30 + 100)
    config = tiny_config(checkpoint_fraction=1.0, checkpoint_offload=True)
    with tiny_base(config) as base:
        outcome = trial_on(base, config).run()
    assert isinstance(outcome, Ineffective)
    assert outcome.setting == "checkpoint_offload"
    assert "checkpoints on the host need" in outcome.detail


def test_a_pass_without_a_backward_pass_leaves_nothing_behind() -> None:
    """As of a look at a model's gradients that ends early, or of a step that fails."""
    host = CheckpointsOnHost(CPU)
    expected = gradients(_torchs)
    for _ in range(2):
        layer = Layer()
        x = torch.ones(2, 8, requires_grad=True)
        _own(layer, host)(partial(layer, shift=torch.ones(8)), x)
    own = gradients(partial(_own, host=host))
    for one, other in zip(own, expected, strict=True):
        assert torch.equal(one, other)


def test_a_larger_input_gets_more_room() -> None:
    host = CheckpointsOnHost(CPU)
    host.reserve(16, count=1)
    layer = Layer()
    for rows in (1, 100, 3):
        x = torch.randn(rows, 8, requires_grad=True)
        _own(layer, host)(partial(layer, shift=torch.ones(8)), x).sum().backward()
        assert x.grad is not None
        expected = torch.autograd.grad(layer(x, shift=torch.ones(8)).sum(), x)
        assert torch.equal(x.grad, expected[0])


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_training_has_the_same_losses_whatever_waits_on_the_host(is_compiled: bool) -> None:
    losses: dict[bool, list[float]] = {}
    for is_on_host in (False, True):
        config = tiny_config(
            checkpoint_fraction=1.0, checkpoint_offload=is_on_host, compile=is_compiled
        )
        with tiny_loop(config) as loop:
            losses[is_on_host] = [float(loop.step()) for _ in range(3)]
            host = loop.attached.host
            assert loop.attached.recomputed == set(range(LAYERS))
            assert (host is not None) == is_on_host
            if host is not None:
                assert host.copies == 3 * LAYERS
    assert losses[True] == losses[False]
    assert losses[True][0] != losses[True][2]
