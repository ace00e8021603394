"""Owns what the frozen base takes on the card: its build, replayed block by block.

Follows `sweep.training.model`: one module after another, each linear layer wide for a moment and
then packed, as bitsandbytes packs it. The sum of the tensors would be too little: where a packed
weight is put into the block of a wide one that was freed, a remainder of up to a MiB stays with it
for good, and the free blocks in between are where the step's activations will go first. A base that
is loaded instead has the same tensors and nearly the same waste. Knows nothing of adapters or
steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from search_spaces.config import TrialConfig
from sweep.predict.memory.allocator import CachingAllocator
from sweep.predict.memory.tracing.fourbit import Linear4bit, Params4bit
from sweep.training.eight_bit import EightBitLinear
from sweep.training.model import compute_type, decoder_layers

_FP32_BYTES = 4

_LayerModule = tuple[int, torch.nn.Module]
"""A layer of the whole model (-1 outside of them) and a module of the excerpt that is in it."""

_Addresses = dict[tuple[int, int], int]
"""Where a tensor is, by layer and identity."""


def base_memory(
    base: torch.nn.Module, config: TrialConfig, positions: tuple[int, ...]
) -> dict[str, Any]:
    """Return what the whole base takes, as `profiles.Base.from_json` reads it.

    Args:
        base: the excerpt, before anything is patched or attached.
        config: how it was built.
        positions: for each layer of the whole model, the layer of the excerpt that stands for it.
    """
    allocator = CachingAllocator()
    width = compute_type(config).itemsize
    modules = list(_in_order(base, positions))
    narrow = _build(allocator, modules, width)
    _widen(allocator, modules, width, narrow)
    # The worker gives cached segments back after each trial (`Device.release`).
    allocator.empty_cache()
    return {
        "allocated_bytes": allocator.allocated_bytes,
        "requested_bytes": allocator.requested_bytes,
        "reserved_bytes": allocator.reserved_bytes,
        "holes": allocator.holes(),
    }


def _build(allocator: CachingAllocator, modules: list[_LayerModule], width: int) -> _Addresses:
    """Put every module on the card, and return where its unpacked tensors are."""
    addresses: _Addresses = {}
    twice: list[int] = []
    for layer, module in modules:
        wide = None
        if isinstance(module, Linear4bit):
            _pack(allocator, module, width)
        elif isinstance(module, EightBitLinear):
            wide = allocator.allocate(module.weight.numel() * width)
        for tensor in _plain_tensors(module):
            address = allocator.allocate(tensor.numel() * _built_width(tensor, width))
            if addresses.setdefault((layer, id(tensor)), address) != address:
                twice.append(address)
        if wide is not None:
            allocator.free(wide)
    # Tied weights are built apart and then tied.
    for address in twice:
        allocator.free(address)
    return addresses


def _widen(
    allocator: CachingAllocator, modules: list[_LayerModule], width: int, narrow: _Addresses
) -> None:
    """Put what is wanted in fp32 there, one tensor after another, narrow and wide at once."""
    for layer, module in modules:
        for tensor in _plain_tensors(module):
            if _built_width(tensor, width) < tensor.element_size():
                address = narrow.pop((layer, id(tensor)), None)
                if address is not None:
                    allocator.allocate(tensor.nbytes)
                    allocator.free(address)


def _in_order(base: torch.nn.Module, positions: tuple[int, ...]) -> Iterator[_LayerModule]:
    """Yield the whole model's modules in the order in which they are built."""
    layers = decoder_layers(base)
    layer_of = {id(m): index for index, layer in enumerate(layers) for m in layer.modules()}
    grouped = itertools.groupby(base.modules(), key=lambda m: id(m) in layer_of)
    for is_layers, modules in grouped:
        if not is_layers:
            yield from ((-1, module) for module in modules)
            continue
        members = list(modules)
        for index, position in enumerate(positions):
            yield from ((index, m) for m in members if layer_of[id(m)] == position)


def _plain_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return [tensor for tensor in tensors if not isinstance(tensor, Params4bit)]


def _built_width(tensor: torch.Tensor, width: int) -> int:
    """Return the bytes an element had before fp32 was asked for."""
    is_widened = isinstance(tensor, torch.nn.Parameter) and tensor.dtype == torch.float32
    return width if is_widened else tensor.element_size()


def _pack(allocator: CachingAllocator, layer: Linear4bit, width: int) -> None:
    """Quantize one layer's random weights, in the order in which bitsandbytes does it on the card.

    The order counts: what is freed last leaves the hole that the next layer's weights go into.
    """
    wide = allocator.allocate(layer.in_features * layer.out_features * width)
    scales = allocator.allocate(layer.scales * _FP32_BYTES)
    allocator.allocate(layer.weight.numel())
    kept = layer.constant_bytes()
    if layer.is_nested:
        centred = allocator.allocate(layer.scales * _FP32_BYTES)
        for size in kept:
            allocator.allocate(size)
        allocator.free(centred)
        allocator.free(scales)
    else:
        for size in kept[1:]:
            allocator.allocate(size)
    allocator.free(wide)
