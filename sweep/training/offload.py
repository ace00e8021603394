"""Weights of experts that lie in the host's memory, and come to the GPU a layer ahead.

The packed experts of a layer are one stretch of pinned memory on the host. On the device there are
two slots, each as large as the largest layer's: one has the layer that computes, into the other one
the next layer's is copied meanwhile, on a stream of its own; going back, the one before. A layer
that is recomputed is there already when its gradient is worked out, so that each layer comes twice
in a micro-batch. An exported script carries this file beside it: it needs torch, bitsandbytes,
`eight_bit` and `host_memory` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qlora_sweep.sweep.training.eight_bit import Parts, widened
from qlora_sweep.sweep.training.host_memory import SLOTS, Slots, aligned, check_apart, pinned, unpin

_MOVED = 2
"""Of the parts of a packed weight, those that are large: what is packed, and its scales."""


@dataclass(frozen=True)
class _Place:
    """Where a part of a weight lies among those of its layer."""

    weights: WeightsOnHost
    layer: int
    """Number of its layer among those on the host."""
    start: int
    """Byte of the layer's."""


_PLACES: dict[int, _Place] = {}
"""By address on the host: an operator that the compiler knows takes tensors, and no objects."""


class WeightsOnHost:
    """Weights of layers in the host's memory, in the order in which a forward pass asks for them.

    Args:
        device: what asks for them.

    Raises:
        HostMemoryError: the device has no memory beside the host's.
    """

    def __init__(self, device: torch.device) -> None:
        check_apart(device)
        self.device = device
        self._layers: list[torch.Tensor] = []
        """What lies on the host (bytes,), by layer."""
        self._slots = Slots(device, count=0)
        self._held: list[int | None] = []
        """The layer in each slot."""
        self._last = 0
        """The layer that was asked for last."""
        self._direction = 1
        self.copies = 0
        """Layers that were copied to the device since somebody began to count."""

    @property
    def bytes(self) -> int:
        """What lies on the host."""
        return sum(layer.numel() for layer in self._layers)

    def __len__(self) -> int:
        """Return of how many layers."""
        return len(self._layers)

    def add(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the parts of the next layer to the host, and return them as they lie there.

        Raises:
            HostMemoryError: there is too little memory.
        """
        size = sum(aligned(part.nbytes) for part in parts)
        memory = pinned(size, self.device, what="experts")
        placed: list[torch.Tensor] = []
        start = 0
        for part in parts:
            there = memory[start : start + part.nbytes].view(part.dtype).view(part.shape)
            there.copy_(part)
            _PLACES[there.data_ptr()] = _Place(self, len(self._layers), start)
            placed.append(there)
            start += aligned(part.nbytes)
        self._layers.append(memory)
        return placed

    def open(self) -> None:
        """Make the slots, once all layers are there."""
        largest = max((layer.numel() for layer in self._layers), default=0)
        count = min(SLOTS, len(self._layers))
        self._held = [None] * count
        self._slots = Slots(self.device, count=count, size=largest)

    def fetched(self, layer: int) -> torch.Tensor:
        """Return a layer's bytes (bytes,) on the device, for work that is launched before another
        layer is asked for; and have the next one on its way."""
        if layer not in self._held:
            self._copy(layer)
        slot = self._held.index(layer)
        self._slots.await_slot(slot)
        self._turn(layer)
        following = layer + self._direction
        if 0 <= following < len(self._layers) and following not in self._held:
            self._copy(following)
        return self._slots.memory[slot]

    def _turn(self, layer: int) -> None:
        """Note which layer was asked for, and whether the next one comes after it or before."""
        if layer == 0:
            self._direction = 1
        elif layer == len(self._layers) - 1:
            self._direction = -1
        elif layer != self._last:
            self._direction = 1 if layer > self._last else -1
        self._last = layer

    def _copy(self, layer: int) -> None:
        """Begin to copy a layer into a slot that the last one asked for is not in."""
        slot = next(at for at, held in enumerate(self._held) if held is None or held != self._last)
        self._held[slot] = layer
        self.copies += 1
        # What reads the slot is launched already.
        self._slots.fill(slot, self._layers[layer])

    def close(self) -> None:
        """Give the memory back; nothing can be fetched any more."""
        for address, place in list(_PLACES.items()):
            if place.weights is self:
                del _PLACES[address]
        unpin(self._layers, self.device)
        self._layers = []
        self._slots = Slots(self.device, count=0)


def large_parts(parts: Parts) -> Parts:
    """Return those parts of a packed weight that go to the host; the others are small."""
    return parts[:_MOVED]


@torch.library.custom_op("sweep::widened_from_host", mutates_args=())
def widened_from_host(
    parts: list[torch.Tensor], like: torch.Tensor, is_again: bool
) -> torch.Tensor:
    """Return what `eight_bit.widened` does, of a weight on the host.

    Args:
        parts: as `eight_bit.Parts` says, the large ones on the host.
        like: of the device and the type of the result.
        is_again: whether it is on the way back.
    """
    large = large_parts(parts)
    there: Parts = []
    for part in large:
        place = _PLACES[part.data_ptr()]
        layer = place.weights.fetched(place.layer)
        there.append(layer[place.start : place.start + part.nbytes].view(part.dtype))
    return widened(there + parts[len(large) :], like.dtype, is_again=is_again)


@widened_from_host.register_fake
def _(parts: list[torch.Tensor], like: torch.Tensor, is_again: bool) -> Any:
    return like.new_empty(2 * parts[0].numel())
