"""The model that is traced: the real one's modules without data, in as few layers as tell all.

Two decoder layers that are configured alike run the same code on tensors of the same shapes, so
what one keeps and takes, the other does: one of each kind is traced and stands for the rest, and a
model of 80 layers takes as long as one of three. The base is built by the same functions as the one
that trains (`sweep.training.model`), so that there is one truth.

What the frozen base takes is its build, replayed block by block: one module after another, each
linear layer wide for a moment and then packed, as bitsandbytes packs it. The sum of the tensors
would be too little: where a packed weight is put into the block of a wide one that was freed, a
remainder of up to a MiB stays with it for good, and the free blocks in between are where the step's
activations will go first. A base that is loaded instead has the same tensors and nearly the same
waste.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoConfig, PreTrainedModel

from search_spaces.config import TrialConfig
from search_spaces.models import ModelSpec
from sweep.predict.memory.allocator import CachingAllocator
from sweep.predict.memory.tracing.fourbit import Linear4bit, Params4bit
from sweep.training.adapters import with_adapters
from sweep.training.eight_bit import EightBitLinear, compute_in_8_bits
from sweep.training.model import (
    BaseModel,
    compute_type,
    decoder_layers,
    share_quantized,
    skeleton,
    upcast,
)

_DYNAMIC_ROPES = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that read the positions' values; their tensors have the default's shapes."""

_BY_INDEX = {
    "attn_layer_indices": 0,
    "attn_layer_period": 1,
    "decoder_sparse_step": 1,
    "expert_layer_period": 1,
    "first_k_dense_replace": 1,
    "interleave_moe_layer_step": 1,
    "mlp_only_layers": 0,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "num_dense_layers": 1,
}
"""Keys that tell layers apart by their index, and the value up to which the ends alone differ.

Layers taken out would change what the others are, so all of them are traced.
"""


@dataclass(frozen=True)
class Excerpt:
    """A model cut down to the decoder layers that differ."""

    spec: ModelSpec
    """The model with the chosen layers only."""
    positions: tuple[int, ...]
    """For each layer of the whole model, the layer of the excerpt that stands for it."""
    dimensions: tuple[int, ...]
    """Every whole number in the config."""
    longest: int | None
    """Positions that the model knows; None where the config does not say."""
    window: int | None
    """Shortest window of its attention; None where it sees everything."""


@dataclass
class Traceable:
    """A frozen base with adapters, ready for one step."""

    base: PreTrainedModel
    model: PeftModel
    layers: list[Any]
    """The decoder layers."""

    def adapters(self) -> list[torch.nn.Parameter]:
        """Return the trained parameters."""
        return [p for p in self.model.parameters() if p.requires_grad]


def excerpt(spec: ModelSpec) -> Excerpt:
    """Choose the first layer, the last, and between them one of each kind.

    The first differs because nothing before it is trained, so that no gradient goes past it; the
    last because what reads its output is the head, and not a layer like itself. Kinds are told
    apart by the per-layer lists of the config.

    Raises:
        ValueError, KeyError, TypeError: transformers cannot read the config.
    """
    config = AutoConfig.for_model(spec.model_type, **_without_type(spec.config))
    values, count = config.to_dict(), int(config.num_hidden_layers)
    lists = {k: v for k, v in values.items() if isinstance(v, list) and len(v) == count}
    kinds = [repr([column[i] for column in lists.values()]) for i in range(count)]
    if any(_means_a_layer(values.get(key), least) for key, least in _BY_INDEX.items()):
        kinds = [str(i) for i in range(count)]
    first_of = {kind: i for i, kind in reversed(list(enumerate(kinds[1:-1], 1)))}
    chosen = sorted({0, count - 1, *first_of.values()})
    stands_for = [chosen.index(first_of[kind]) for kind in kinds[1:-1]]
    ends = [0, len(chosen) - 1] if count > 1 else [0]
    name = type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers")
    columns = {key: [column[i] for i in chosen] for key, column in lists.items()}
    # A config may say it in transformers' word and in its own.
    counts = {key: len(chosen) for key in (name, "num_hidden_layers") if key in spec.config}
    reduced: dict[str, Any] = {name: len(chosen), **counts, **columns, **_plain_rope(values)}
    return Excerpt(
        spec=dataclasses.replace(spec, config={**spec.config, **reduced}),
        positions=(*ends[:1], *stands_for, *ends[1:]),
        dimensions=tuple(_whole_numbers(values)),
        longest=getattr(config, "max_position_embeddings", None),
        window=_window(values),
    )


def _means_a_layer(value: object, least: int) -> bool:
    """Whether a config's value singles out layers between the first and the last by their index."""
    if isinstance(value, list):
        return bool(value)
    return isinstance(value, int) and value > least


def _without_type(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "model_type"}


def _plain_rope(values: dict[str, Any]) -> dict[str, Any]:
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_type") not in _DYNAMIC_ROPES:
        return {}
    return {"rope_parameters": {**rope, "rope_type": "default"}, "rope_scaling": None}


def _window(values: dict[str, Any]) -> int | None:
    windows = [values.get("sliding_window"), values.get("attention_chunk_size")]
    return min((w for w in windows if isinstance(w, int) and w > 0), default=None)


def _whole_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _whole_numbers(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def build_base(config: TrialConfig, spec: ModelSpec) -> BaseModel:
    """Return the frozen base as it trains, but without data and without other kernels."""
    # flash-attn's kernel keeps what torch's flash attention keeps, and need not be installed here.
    attention = "eager" if config.attention == "eager" else "sdpa"
    traced = config.base().model_copy(update={"attention": attention})
    model = skeleton(traced, spec=spec)
    if traced.is_8bit_compute:
        compute_in_8_bits(model, traced.compute_dtype)
    model.config.use_cache = False
    if traced.upcast_fp32:
        upcast(model, traced)
    model.requires_grad_(False)
    return BaseModel(
        config=traced,
        spec=spec,
        model=model.train(),
        undo=contextlib.ExitStack(),
        quantized_share=share_quantized(model, traced),
    )


def attach(base: BaseModel, config: TrialConfig, *, rank: int) -> Traceable:
    """Put adapters of the given rank on the configuration's target modules.

    Raises:
        InputError: the architecture has no such modules.
    """
    layers = decoder_layers(base.model)
    ranked = config.model_copy(update={"lora_rank": rank})
    with torch.device("meta"):
        model = with_adapters(base, ranked, init_lora_weights=False)
    return Traceable(base=base.model, model=model.train(), layers=layers)


def share_input_copies(model: torch.nn.Module) -> None:
    """Let adapters beside 16-bit layers keep their input as they do under ``torch.compile``.

    PEFT casts it to the adapters' type, and autocast casts it back. The compiler keeps neither but
    one copy in the type that it had, for all layers that read it: measured on an H200, 8 KiB a
    token and layer of width 4,096 where q, k, v and o are adapted, which is attention's output
    twice.
    """
    copies = _Copies()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module._cast_input_dtype = copies.of


class _Copies:
    """Copies of tensors, each made once for as long as somebody holds it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] = {}

    def of(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of a tensor; itself where it needs no cast."""
        if x.dtype == dtype:
            return x
        known, copy = (look() for look in self._known.get(id(x), (_nothing, _nothing)))
        if known is not x or copy is None:
            copy = x.clone()
            self._known[id(x)] = weakref.ref(x), weakref.ref(copy)
        return copy


def _nothing() -> None:
    return None


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
