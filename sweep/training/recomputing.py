"""Layers that are computed once more in the backward pass, each one node of the graph; what they
are computed from may wait in the host's memory meanwhile.

`torch.utils.checkpoint` that is not reentrant sends every tensor that a layer saves through Python
twice: of a compiled layer on a 4-bit base some fifty, which takes the host milliseconds. Here a
layer saves its input alone. On the device there are two slots for inputs that come back from the
host: one has that of the layer whose gradient is worked out, into the other one the next is copied
meanwhile, on a stream of its own. An exported script carries this file beside it: it needs torch
and `host_memory` alone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from qlora_sweep.sweep.training.host_memory import (
    SLOTS,
    Slots,
    aligned,
    check_apart,
    check_room,
    pinned,
    unpin,
)

Again = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes what is entered around the second time."""


class Waiting:
    """An input that waits on the host, as long as somebody holds this.

    Attributes:
        place: number of its memory there.
        shape: of the input.
        dtype: of its values.
    """

    def __init__(self, place: int, x: torch.Tensor) -> None:
        self.place = place
        self.shape = x.shape
        self.dtype = x.dtype

    @property
    def bytes(self) -> int:
        """How many bytes it has."""
        return self.shape.numel() * self.dtype.itemsize


class CheckpointsOnHost:
    """Inputs of recomputed layers in the host's memory, from the forward to the backward pass.

    Args:
        device: where the layers are.

    Attributes:
        slots: as large as the largest input that came back so far.
        copies: inputs that came back since somebody began to count.

    Raises:
        HostMemoryError: the device has no memory beside the host's.
    """

    def __init__(self, device: torch.device) -> None:
        check_apart(device)
        self.device = device
        self.copies = 0
        self.slots = Slots(device)
        self._held: list[Waiting | None] = [None] * SLOTS
        """What is in each slot, or on its way there."""
        self._memory: list[torch.Tensor] = []
        """On the host (bytes,), by place."""
        self._waiting: list[weakref.ref[Waiting]] = []
        """By place, in the order in which they came: the last is asked for first."""

    def reserve(self, size: int, *, count: int) -> None:
        """Take the host's memory for so many inputs of so many bytes each.

        Raises:
            HostMemoryError: there is too little.
        """
        check_room(aligned(size) * count, what="checkpoints")
        for place in range(count):
            self._reserve(place, size)

    def keep(self, x: torch.Tensor) -> Waiting:
        """Begin to copy an input to the host; `leave` ends that."""
        # What is still there is of a pass that was given up.
        self._held = [None] * SLOTS
        while self._waiting and self._waiting[-1]() is None:
            self._waiting.pop()
        waiting = Waiting(len(self._waiting), x)
        self._waiting.append(weakref.ref(waiting))
        self._send(x, waiting)
        return waiting

    def leave(self) -> None:
        """Have what is launched from now on wait until nothing is copied to the host any more, so
        that the input may go."""
        self.slots.await_all()

    def fetched(self, waiting: Waiting) -> torch.Tensor:
        """Return an input on the device, for work that is launched before another one is asked for;
        and have the one before it on its way."""
        if waiting not in self._held:
            self._bring(waiting, slot=0)
        slot = self._held.index(waiting)
        self.slots.await_slot(slot)
        self._held[slot] = None
        before = self._before(waiting)
        if before is not None:
            self._bring(before, slot=(slot + 1) % SLOTS)
        return self.slots.memory[slot][: waiting.bytes].view(waiting.dtype).view(waiting.shape)

    def close(self) -> None:
        """Give all memory back; nothing can be fetched any more."""
        unpin(self._memory, self.device)
        self._memory = []
        self.slots = Slots(self.device)

    def _before(self, waiting: Waiting) -> Waiting | None:
        for reference in reversed(self._waiting[: waiting.place]):
            before = reference()
            if before is not None:
                return before
        return None

    def _reserve(self, place: int, size: int) -> None:
        if place < len(self._memory):
            if self._memory[place].numel() >= size:
                return
            unpin([self._memory[place]], self.device)
            self._memory[place] = torch.empty(0, dtype=torch.uint8)
        memory = pinned(aligned(size), self.device, what="checkpoints")
        self._memory[place : place + 1] = [memory]

    def _send(self, x: torch.Tensor, waiting: Waiting) -> None:
        """Begin to copy an input to its place on the host."""
        self._reserve(waiting.place, waiting.bytes)
        there = self._memory[waiting.place][: waiting.bytes].view(x.dtype).view(x.shape)
        self.slots.copy(x, there)

    def _bring(self, waiting: Waiting, *, slot: int) -> None:
        """Begin to copy an input into a slot that nothing reads which is yet to be launched."""
        self.copies += 1
        self._held[slot] = waiting
        if self.slots.memory[slot].numel() < waiting.bytes:
            memory = torch.empty(waiting.bytes, dtype=torch.uint8, device=self.device)
            self.slots.memory[slot] = memory
        self.slots.fill(slot, self._memory[waiting.place][: waiting.bytes])


class Recomputing:
    """What takes the place of a layer's `_gradient_checkpointing_func`.

    A layer goes through torch's own function that cannot be one node: with several inputs that need
    a gradient, or one through which layers hand each other more.

    Args:
        host: where inputs wait; None where they stay on the device.
        is_trained: whether the layer has adapters; before the first one that has, nothing is kept.
        again: makes what is entered around the second time; None for autocast as it was the first
            time.
    """

    def __init__(
        self,
        host: CheckpointsOnHost | None = None,
        *,
        is_trained: bool = True,
        again: Again | None = None,
    ) -> None:
        self.host = host
        self.is_trained = is_trained
        self.again = again

    def __call__(self, run: Callable[..., Any], *inputs: Any) -> Any:
        """Return what a layer makes of its inputs, and compute it once more for the backward pass.

        Args:
            run: the layer's forward pass, with its other arguments bound to it.
            inputs: the hidden states (batch, tokens, width), and what else is given by position.
        """
        by_name = run.keywords if isinstance(run, partial) else {}
        first, *others = inputs
        is_kept = self.is_trained or first.requires_grad
        is_one = first.is_contiguous() and all(map(_is_constant, [*others, *by_name.values()]))
        if not is_one or not is_kept or not torch.is_grad_enabled():
            return checkpoint(run, *inputs, use_reentrant=False)
        # The embedding's output needs no gradient, though the layer's adapters do.
        anchor = torch.empty(0, device=first.device, requires_grad=True)
        return _Recomputed.apply(self, partial(_of_first, run, others), first, anchor)


def as_nodes(
    layers: Sequence[torch.nn.Module],
    host: CheckpointsOnHost | None = None,
    *,
    again: Again | None = None,
) -> None:
    """Let each layer that is recomputed be one node of the graph.

    Args:
        layers: that are recomputed, or not.
        host: where their inputs wait; None for where they are.
        again: see `Recomputing`.
    """
    layer: Any
    for layer in layers:
        is_trained = any(parameter.requires_grad for parameter in layer.parameters())
        how = Recomputing(host, is_trained=is_trained, again=again)
        layer._gradient_checkpointing_func = how


def _is_constant(value: Any) -> bool:
    """Return whether an input needs no gradient, and a layer writes nothing into it for others."""
    if isinstance(value, MutableMapping):
        return False
    return not any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(value))


def _of_first(run: Callable[..., Any], others: Sequence[Any], first: torch.Tensor) -> Any:
    return run(first, *others)


class _Recomputed(torch.autograd.Function):
    """A layer, of which nothing is kept but its input."""

    @staticmethod
    def forward(
        ctx: Any,
        how: Recomputing,
        run: Callable[[torch.Tensor], Any],
        x: torch.Tensor,
        _anchor: torch.Tensor,
    ) -> Any:
        ctx.how = how
        ctx.run = run
        ctx.needs_gradient = x.requires_grad
        ctx.again = how.again or _autocast_of(x.device.type)
        ctx.states = _states(x)
        if how.host is None:
            ctx.save_for_backward(x)
        else:
            ctx.waiting = how.host.keep(x)
        # As the second time, or the compiler would have another program for it.
        with torch.enable_grad():
            output = run(x.detach().requires_grad_(ctx.needs_gradient))
        if how.host is not None:
            how.host.leave()
        ctx.set_materialize_grads(False)
        if isinstance(output, torch.Tensor):
            return _cut(ctx, output)[0]
        return _cut(ctx, *output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        host = ctx.how.host
        if host is None:
            (x,) = ctx.saved_tensors
        else:
            x = host.fetched(ctx.waiting)
        x = x.detach().requires_grad_(ctx.needs_gradient)
        edges = []
        given = []
        with torch.enable_grad(), ctx.again(), _drawing_as(ctx.states, x):
            output = ctx.run(x)
            if isinstance(output, torch.Tensor):
                output = (output,)
            for value, gradient in zip(output, gradients, strict=True):
                if gradient is not None:
                    # Of the result nothing is needed but where its gradient goes.
                    edges.append(get_gradient_edge(value))
                    given.append(gradient)
            del output
        torch.autograd.backward(edges, given)
        ctx.run = ctx.waiting = None
        return None, None, x.grad, None


def _cut(ctx: Any, *outputs: Any) -> tuple[Any, ...]:
    """Return a layer's outputs without what they were made by."""
    returned: list[torch.Tensor | None] = []
    constant = []
    for output in outputs:
        if output is None:
            returned.append(None)
            continue
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"a decoder layer returns a {type(output).__name__} among its tensors")
        cut = output.detach()
        if not output.requires_grad:
            constant.append(cut)
        returned.append(cut)
    ctx.mark_non_differentiable(*constant)
    return tuple(returned)


def _autocast_of(device_type: str) -> Again:
    """Return what makes autocast as it is now."""
    return partial(
        torch.autocast,
        device_type=device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


def _states(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the states of the random numbers of the host, and of the GPU that a tensor is on."""
    of_device = None
    if x.is_cuda:
        of_device = torch.cuda.get_rng_state(x.device)
    return torch.get_rng_state(), of_device


@contextlib.contextmanager
def _drawing_as(
    states: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor
) -> Iterator[None]:
    """Draw the random numbers that followed some states; afterwards those that would have come."""
    of_host, of_device = states
    devices = [x.device] if of_device is not None else []
    with torch.random.fork_rng(devices):
        torch.set_rng_state(of_host)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, x.device)
        yield
