"""One structure's profile: build the model's excerpt, walk a step, reduce what was counted.

The excerpt is the real model's modules without data, in as few layers as tell all.

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
import inspect
import itertools
import re
import sys
import traceback
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel, masking_utils

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError, in_percent, words_of
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.linears import LEAST_QUANTIZED_SHARE
from qlora_sweep.search_spaces.models import WHOLE, ModelSpec
from qlora_sweep.search_spaces.quantized import of_chosen_layers, unquantized_of_layer
from qlora_sweep.search_spaces.recurrent import recurrent_kind
from qlora_sweep.search_spaces.vision import vision_kind, whole_config
from qlora_sweep.sweep.predict.memory.allocator import GRAIN_BYTES, CachingAllocator, grains
from qlora_sweep.sweep.predict.memory.profiles import (
    NEIGHBOURS,
    Structure,
    Symbols,
    Untraceable,
    alive,
    coefficients,
    highest,
)
from qlora_sweep.sweep.predict.memory.tracing import fused, recurrent, vision
from qlora_sweep.sweep.predict.memory.tracing.stand_ins import Linear4bit, Params4bit
from qlora_sweep.sweep.predict.memory.tracing.walk import (
    PlainLoop,
    Traceable,
    Walk,
    tapes,
    walk,
)
from qlora_sweep.sweep.training.adapters import target_modules, with_adapters
from qlora_sweep.sweep.training.eight_bit import EightBitLinear, compute_in_8_bits
from qlora_sweep.sweep.training.experts import is_packed
from qlora_sweep.sweep.training.model import (
    BaseModel,
    architecture_of,
    compute_type,
    decoder_layers,
    quantized_share,
    skeleton,
    upcast,
)

_FP16 = re.compile(r"(?<!b)float16|\.half\b")
_SHAPE_FAULTS = ("shape", "size of tensor", "invalid for input", "must match", "split")

# transformers asks whether a mask hides anything by a sum, which has no value without data; of
# `torch.all` the ledger knows the answer.
masking_utils.fast_all = torch.all


def trace(spec: ModelSpec, structure: Structure) -> dict[str, Any]:
    """Return a structure's profile as JSON values, as `profiles.Profile.from_json` reads them.

    Raises:
        Untraceable: the model's code cannot be walked without data.
        InputError: the config cannot be built, or contradicts itself.
    """
    with fused.product_kernels(is_compiled=structure.config.compile):
        return _traced(spec, structure)


def _traced(spec: ModelSpec, structure: Structure) -> dict[str, Any]:
    check_recurrent(spec)
    try:
        config = structure.config
        part = _excerpt_of(spec, config)
        is_whole = len(set(part.positions)) == len(part.positions)
        assert is_whole or not structure.is_mixed, "an excerpt's layers are of one kind"
        symbols = symbols_of(part, is_long=structure.is_long)
        base = build_base(config, part.spec)
        share = base.quantized_share
        # It would be called a 4-bit one and is not; its worker would say so, too late.
        if share is not None and share < LEAST_QUANTIZED_SHARE:
            raise Untraceable(
                f"only {in_percent(share)} of its matrices' weights would be in "
                f"{base.config.weight_bits} bits, the others in 16: use quantization none"
            )
        # Neither kernels nor adapters have a part in what the base takes.
        plain = base.config.changed(kernels="hf")
        key = part.spec.whole_fingerprint, part.positions, plain
        if key not in _known_bases:
            _known_bases[key] = _base_memory(base.model, base.config, part.positions)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"it cannot be built: {line_of(error)}") from error
    # On completions, and by TRL, the head is called chunk by chunk, whatever the kernels.
    is_in_chunks = config.is_on_completions or config.has_head_of_trl
    fuses_loss = config.kernels_kind.fuses_loss and not is_in_chunks
    # The compiler recomputes what is elementwise, as Liger's kernels do; not quite, so the
    # prediction says that it is less certain.
    fuses_layers = config.kernels_kind.fuses_layers or config.compile
    if config.compile:
        # Casts are recomputed, as under ``torch.compile``.
        for module in filter(lambda m: isinstance(m, Linear4bit), base.model.modules()):
            module.is_compiled = True
    with (
        fused.patched(
            base.model,
            loss=fuses_loss,
            layers=fuses_layers,
            is_compiled=config.compile,
            chunk_tokens=symbols.c,
        ),
        recurrent.kernels(base.model, recurrent_kind(spec), chunks=symbols.n),
        vision.known_images(base.model, config.image_size),
    ):
        target = _attach(base, config, symbols)
        if config.compile:
            _share_input_copies(target.base)
        walked = _walk(target, symbols, structure)
    sizes, tape_of = tapes(walked.ledger, symbols, gradients=walked.gradients)
    matrix = coefficients(sizes, sorted(set().union(*sizes)))
    segments: dict[str, Any] = {}
    for name, tape in tape_of.items():
        segments[name] = {"tape": tape, "highest": highest(tape, alive(tape, matrix))}
    adapters: list[list[int]] = []
    for index, layer in enumerate(target.layers):
        # Before the first adapter there is no backward pass.
        segments.setdefault(f"backward {index}", {"tape": [], "highest": []})
        trained = filter(attrgetter("requires_grad"), layer.parameters())
        adapters.append([parameter.numel() // symbols.r for parameter in trained])
    return {
        "positions": part.positions,
        "base": _known_bases[key],
        "adapters": adapters,
        "segments": segments,
        "sizes": sizes,
        "window": part.window,
        "quantized_share": base.quantized_share,
        "is_same_in_fp16": not walked.tells_halves_apart
        and not any(_names_fp16(type(module).__module__) for module in target.base.modules()),
    }


def check_recurrent(spec: ModelSpec) -> None:
    """See that what runs a model's recurrent layers is modelled.

    Raises:
        Untraceable: it is not.
    """
    kind = recurrent_kind(spec)
    if kind is not None and not kind.is_predicted:
        raise Untraceable(kind.unpredicted)


def symbols_of(part: Excerpt, *, is_long: bool = False) -> Symbols:
    """Return what stands for sizes in a walk of an excerpt, longer than its window or not."""
    if is_long and part.window is not None:
        return _known_symbols(part.dimensions, longer_than=part.window, steps=part.steps)
    limits = filter(None, (part.longest, part.window and part.window - 1))
    longest = min(limits, default=None)
    return _known_symbols(part.dimensions, longest=longest, steps=part.steps)


_known_symbols = cache(Symbols)


def _excerpt_of(spec: ModelSpec, config: TrialConfig) -> Excerpt:
    """Return the layers that tell all of a model with a configuration's adapters."""
    sees = config.image_size is not None
    part = excerpt(spec, sees=sees)
    if recurrent_kind(spec) is None:
        # Each layer attends, and has adapters.
        return part
    base = build_base(config, part.spec)
    targets = target_modules(base, config)
    if isinstance(targets, str):
        # Every linear layer has one.
        return part
    trained = set()
    for index, layer in enumerate(decoder_layers(base.model)):
        names = [name for name, _ in layer.named_modules()]
        for target in targets:
            if any(f".{name}".endswith(f".{target}") for name in names):
                trained.add(index)
    before = itertools.takewhile(lambda position: position not in trained, part.positions)
    first = len(list(before))
    if first in (0, len(part.positions)):
        return part
    return excerpt(spec, first_trained=first, sees=sees)


def _attach(base: BaseModel, config: TrialConfig, symbols: Symbols) -> Traceable:
    """Put adapters on the configuration's target modules."""
    try:
        layers = decoder_layers(base.model)
        # With a symbol for a rank it is no configuration.
        ranked = replaced(config, lora_rank=symbols.r)
        with torch.device("meta"):
            model = with_adapters(base, ranked, init_lora_weights=False)
    except InputError:
        raise
    except Exception as error:
        raise Untraceable(f"adapters cannot be attached: {line_of(error)}") from error
    return Traceable(base=base.model, model=model.train(), layers=layers)


@cache
def _names_fp16(name: str) -> bool:
    """Whether a module's code has anything to say of fp16 by itself."""
    is_modelling = name.startswith("transformers.models.")
    return is_modelling and _FP16.search(inspect.getsource(sys.modules[name])) is not None


def _walk(target: Traceable, symbols: Symbols, structure: Structure) -> Walk:
    try:
        return walk(target, symbols, structure)
    except PlainLoop as error:
        raise Untraceable(f"{module_at_fault(error, target.base)} {error}") from error
    except Exception as error:
        where = module_at_fault(error, target.base)
        if isinstance(error, RuntimeError) and any(f in str(error) for f in _SHAPE_FAULTS):
            raise InputError(
                f"its config contradicts itself in {where}: {line_of(error)}"
            ) from error
        raise Untraceable(f"{where}: {line_of(error)}") from error


def module_at_fault(error: BaseException, base: PreTrainedModel) -> str:
    """Return the name of the innermost module that was running."""
    names = {id(module): name for name, module in base.named_modules()}
    fault = f"model type '{base.config.model_type}'"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if names.get(id(module)):
            fault = f"module '{names[id(module)]}'"
    return fault


def line_of(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return words_of(error)[:300]


_DYNAMIC_ROPES = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that read the positions' values; their tensors have the default's shapes."""

_BY_INDEX = {
    "attn_layer_indices": 0,
    "attn_layer_period": 1,
    "decoder_sparse_step": 1,
    "expert_layer_period": 1,
    "first_k_dense_replace": 1,
    # Of an embedding that holds a share for each layer, so that it is as wide as there are layers.
    "hidden_size_per_layer_input": 0,
    "interleave_moe_layer_step": 1,
    "mlp_only_layers": 0,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "num_dense_layers": 1,
    # The last layers take keys and values of earlier ones.
    "num_kv_shared_layers": 0,
}
"""Keys that tell layers apart by their index, and the value up to which the ends alone differ.

Layers taken out would change what the others are, so all of them are traced.
"""
_CONVOLUTIONS = ("linear_conv_kernel_dim", "conv_L_cache")
"""Keys of the width of causal convolutions over the sequence."""


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
    steps: tuple[int, ...]
    """By how many tokens a tensor may be longer or shorter than the sequence."""


def excerpt(spec: ModelSpec, *, first_trained: int = 0, sees: bool = False) -> Excerpt:
    """Choose the first layer that is trained, the last, and between them one of each kind.

    The first differs because nothing before it is trained, so that no gradient goes past it; the
    last because what reads its output is the head, and not a layer like itself. Kinds are told
    apart by the per-layer lists of the config. Of layers before the first that is trained, which
    keep nothing, one of each kind is chosen, and the last, whose output is kept by the next.

    Args:
        spec: the model.
        first_trained: number of the first layer with an adapter.
        sees: whether its tower is there too, to whose output some layers' is added.

    Raises:
        InputError: transformers has no such decoder, or nothing sees for it.
        ValueError, KeyError, TypeError: it cannot read the config.
    """
    config = architecture_of(spec)
    values = config.to_dict()
    count = int(config.num_hidden_layers)
    lists = {k: v for k, v in values.items() if isinstance(v, list) and len(v) == count}
    added = _added_layers(spec) if sees else 0
    kinds = _kinds_of_layers(spec, values, lists, count, added=added)
    # The first trained layer and the last one are walked, and of the others the first of each kind.
    first_of: dict[str, int] = {}
    stands_for = list(range(count))
    for layer, kind in enumerate(kinds):
        if layer < first_trained - 1:
            stands_for[layer] = first_of.setdefault(f"before {kind}", layer)
        elif first_trained < layer < count - 1:
            stands_for[layer] = first_of.setdefault(kind, layer)
    chosen = sorted(set(stands_for))
    name = type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers")
    reduced: dict[str, Any] = {name: len(chosen)}
    if "num_hidden_layers" in spec.config:
        # A config may say it in transformers' word and in its own.
        reduced["num_hidden_layers"] = len(chosen)
    for key, column in lists.items():
        reduced[key] = [column[layer] for layer in chosen]
    reduced |= of_chosen_layers(spec.config, chosen)
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and (static := _static(rope)) != rope:
        reduced |= {"rope_parameters": static, "rope_scaling": None}
    windows = [values.get("sliding_window"), values.get("attention_chunk_size")]
    if sees:
        whole = whole_config(spec)
        reduced[WHOLE] = {**whole, "text_config": {**whole["text_config"], **reduced}}
        values = {**values, WHOLE: architecture_of(spec, sees=True).to_dict()}
    return Excerpt(
        spec=dataclasses.replace(spec, config={**spec.config, **reduced}),
        positions=tuple(map(chosen.index, stands_for)),
        dimensions=tuple(_whole_numbers(values)),
        longest=getattr(config, "max_position_embeddings", None),
        window=min((w for w in windows if isinstance(w, int) and w > 0), default=None),
        steps=tuple(_steps(values)),
    )


def _kinds_of_layers(
    spec: ModelSpec, values: dict[str, Any], lists: dict[str, list[Any]], count: int, *, added: int
) -> list[str]:
    """Return a word for each layer of a model that is the same for layers that are alike.

    Args:
        spec: the model.
        values: its config's.
        lists: those of them with a value for each layer.
        count: of layers.
        added: to the output of how many of the first ones something is added.
    """
    left: Sequence[str] = ()
    if spec.stored is not None:
        left = spec.stored.left or ()
    is_each_its_own = any(_means_a_layer(values.get(key), _BY_INDEX[key]) for key in _BY_INDEX)
    kinds: list[str] = []
    for layer in range(count):
        # The first after those to which something is added finds what they alone have left.
        is_among_added = added > 0 and layer <= added
        if is_each_its_own or is_among_added:
            kinds.append(str(layer))
        else:
            own = [column[layer] for column in lists.values()]
            kinds.append(repr([own, unquantized_of_layer(left, layer)]))
    return kinds


def _added_layers(spec: ModelSpec) -> int:
    """Return to how many layers' outputs that of a model's tower is added.

    Raises:
        InputError: nothing sees for it.
    """
    kind = vision_kind(spec)
    if kind is None:
        raise InputError(spec.vision_fault or "it has no vision tower that is known here")
    return kind.added_layers(whole_config(spec))


def _steps(values: dict[str, Any]) -> Iterator[int]:
    """Yield by how many tokens tensors of a config's model may differ from the sequence."""
    yield from NEIGHBOURS
    # A causal convolution is padded at both ends, and what is too long is cut off.
    for key in _CONVOLUTIONS:
        width = values.get(key)
        if isinstance(width, int) and width > 2:
            yield width - 1


def _static(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the scaling of rotary embeddings, of all layers or of each kind, without types that
    read the positions."""
    if rope.get("rope_type") in _DYNAMIC_ROPES:
        return {**rope, "rope_type": "default"}
    return {key: _static(of) if isinstance(of, dict) else of for key, of in rope.items()}


def _means_a_layer(value: object, least: int) -> bool:
    """Whether a config's value singles out layers between the first and the last by their index."""
    if isinstance(value, list):
        return bool(value)
    return isinstance(value, int) and value > least


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
    traced = config.base().changed(attention=attention)
    model = skeleton(traced, spec=spec)
    if traced.is_8bit_compute:
        compute_in_8_bits(model, traced.compute_dtype)
    model.config.use_cache = model.config.get_text_config().use_cache = False
    if traced.upcast_fp32:
        upcast(model, traced)
    model.requires_grad_(False)
    return BaseModel(
        config=traced,
        spec=spec,
        model=model.train(),
        undo=contextlib.ExitStack(),
        quantized_share=quantized_share(model, traced, spec=spec),
    )


def _share_input_copies(model: torch.nn.Module) -> None:
    """Let adapters beside 16-bit layers keep their input as they do under ``torch.compile``.

    PEFT casts it to the adapters' type, and autocast casts it back. The compiler keeps neither but
    one copy in the type that it had, for all layers that read it: measured on an H200, 8 KiB a
    token and layer of width 4,096 where q, k, v and o are adapted, which is attention's output
    twice.
    """
    known: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] = {}

    def copy_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of a tensor, made once for as long as somebody holds it; itself where it
        needs no cast."""
        if x.dtype == dtype:
            return x
        same = None
        copy = None
        if id(x) in known:
            look_same, look_copy = known[id(x)]
            same = look_same()
            copy = look_copy()
        if same is not x or copy is None:
            copy = x.clone()
            known[id(x)] = weakref.ref(x), weakref.ref(copy)
        return copy

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module._cast_input_dtype = copy_of


_FP32_BYTES = 4

_LayerModule = tuple[int, torch.nn.Module]
"""A layer of the whole model (-1 outside of them) and a module of the excerpt that is in it."""

_known_bases: dict[tuple[str, tuple[int, ...], TrialConfig], dict[str, Any]] = {}


def _base_memory(
    base: torch.nn.Module, config: TrialConfig, positions: tuple[int, ...]
) -> dict[str, Any]:
    """Return what the whole base takes, as `profiles.Base.from_json` reads it.

    Args:
        base: the excerpt, before anything is patched or attached.
        config: how it was built.
        positions: for each layer of the whole model, the layer of the excerpt that stands for it.
    """
    allocator = CachingAllocator()
    addresses: dict[Hashable, int] = {}
    for key, size in _building(list(_in_order(base, positions)), compute_type(config).itemsize):
        if size:
            addresses[key] = allocator.allocate(size)
        else:
            allocator.free(addresses.pop(key))
    # The worker gives cached segments back after each trial (`Device.release`).
    allocator.empty_cache()
    return {
        "allocated_bytes": allocator.allocated_bytes,
        "requested_bytes": allocator.requested_bytes,
        "reserved_bytes": allocator.reserved_bytes,
        "holes": allocator.holes(),
        "experts": _experts_by_layer(base, positions),
    }


def _experts_by_layer(base: torch.nn.Module, positions: tuple[int, ...]) -> list[int]:
    """Return what of the packed experts can lie on the host, in bytes by layer that has some: what
    is packed, and its scales."""
    sizes: dict[int, int] = {}
    for layer, module in _in_order(base, positions):
        for weight in filter(is_packed, module.parameters(recurse=False)):
            if not isinstance(weight, Params4bit):
                continue
            scales = weight.scales
            if not weight.compress_statistics:
                scales *= _FP32_BYTES
            moved = grains(weight.numel()) + grains(scales)
            sizes[layer] = sizes.get(layer, 0) + moved * GRAIN_BYTES
    return list(sizes.values())


def _building(modules: Sequence[_LayerModule], width: int) -> Iterator[tuple[Hashable, int]]:
    """Yield what is put on the GPU and its bytes, and with 0 bytes what is given back."""
    there: set[Hashable] = set()
    twice: list[Hashable] = []
    for layer, module in modules:
        for parameter in module.parameters(recurse=False):
            if isinstance(parameter, Params4bit):
                yield from _packing(parameter, width)
        if isinstance(module, EightBitLinear):
            yield "wide", module.weight.numel() * width
        for tensor in _plain_tensors(module):
            if is_packed(tensor):
                yield "wide", tensor.numel() * width
            key: Hashable = (layer, id(tensor))
            if key in there:
                key = (layer, id(tensor), len(twice))
                twice.append(key)
            there.add(key)
            yield key, tensor.numel() * _built_width(tensor, width)
            if is_packed(tensor):
                yield "wide", 0
        if isinstance(module, EightBitLinear):
            yield "wide", 0
    # Tied weights are built apart and then tied.
    for key in twice:
        yield key, 0
    # What is wanted in fp32 becomes that, one tensor after another, narrow and wide at once.
    for layer, module in modules:
        for tensor in _plain_tensors(module):
            key = (layer, id(tensor))
            if key in there and _built_width(tensor, width) < tensor.element_size():
                there.remove(key)
                yield (*key, "in fp32"), tensor.nbytes
                yield key, 0


def _in_order(base: torch.nn.Module, positions: tuple[int, ...]) -> Iterator[_LayerModule]:
    """Yield the whole model's modules in the order in which they are built."""
    layers = decoder_layers(base)
    layer_of: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for module in layer.modules():
            layer_of[id(module)] = index
    grouped = itertools.groupby(base.modules(), key=lambda m: id(m) in layer_of)
    for is_layers, modules in grouped:
        if not is_layers:
            for module in modules:
                yield -1, module
            continue
        members = list(modules)
        for index, position in enumerate(positions):
            for module in members:
                if layer_of[id(module)] == position:
                    yield index, module


def _plain_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    tensors = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    return [tensor for tensor in tensors if not isinstance(tensor, Params4bit)]


def _built_width(tensor: torch.Tensor, width: int) -> int:
    """Return the bytes an element had before fp32 was asked for."""
    is_widened = isinstance(tensor, torch.nn.Parameter) and tensor.dtype == torch.float32
    if is_widened:
        return width
    return tensor.element_size()


def _packing(weight: Params4bit, width: int) -> Iterator[tuple[Hashable, int]]:
    """Yield what quantizing random weights takes and gives back, in the order in which bitsandbytes
    does it on the GPU.

    The order counts: what is freed last leaves the hole that the next layer's weights go into.
    """
    scales = weight.scales * _FP32_BYTES
    yield "wide", weight.weights * width
    yield "scales", scales
    yield "packed", weight.numel()
    kept = weight.constant_bytes()
    if weight.compress_statistics:
        yield "centred", scales
        for size in kept:
            yield "kept", size
        yield "centred", 0
        yield "scales", 0
    else:
        for size in kept[1:]:
            yield "kept", size
    yield "wide", 0
