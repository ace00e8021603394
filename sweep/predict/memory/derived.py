"""Profiles that are made of traced ones: of a base in two kinds of layers, and of one of several
GPUs' share.

A model part of whose layers are in 4 bits is put together from the profiles of one kind each: both
are traced of the same layers, so that the layers of one are put behind those of the other, and each
layer of the model is told which of them stands for it.

A base that FSDP2 shards is cut up as `sweep.training.sharding` and accelerate do it: each decoder
layer is a group, so are the embedding, and the head. What is gathered is received in one tensor and
copied out of it, so that for a moment it is there twice. Constants of 4-bit weights are no
parameters, so every GPU holds all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.linears import is_tied, linear_shapes, lora_parameters, parameters
from search_spaces.models import ModelSpec
from sweep.predict.memory.profiles import (
    BIRTH,
    DEATH,
    LEAVE,
    Account,
    Base,
    Entry,
    Profile,
    Segment,
)

_ONCE = ("embed", "head", "head_backward")


def mixed(packed: Profile, wide: Profile, *, quantized: Collection[int]) -> Profile:
    """Return the profile of a model of whose layers some are in 4 bits.

    Args:
        packed: of the model with all layers in 4 bits.
        wide: of the model with none.
        quantized: the layers that are.
    """
    shift = len(packed.adapters)
    pairs = enumerate(zip(packed.positions, wide.positions, strict=True))
    segments = {
        name: _once(segment, wide.segments[name], shift=shift) if name in _ONCE else segment
        for name, segment in packed.segments.items()
    }
    for name, segment in wide.segments.items():
        kind, _, position = name.partition(" ")
        if name not in _ONCE:
            tape = _shifted(segment.tape, by=len(packed.sizes))
            segments[f"{kind} {int(position) + shift}"] = replace(segment, tape=tape)
    return replace(
        packed,
        positions=tuple(
            in_packed if layer in quantized else in_wide + shift
            for layer, (in_packed, in_wide) in pairs
        ),
        base=_base(packed.base, wide.base, share=len(quantized) / len(packed.positions)),
        adapters=(*packed.adapters, *wide.adapters),
        segments=segments,
        sizes=(*packed.sizes, *wide.sizes),
    )


def _once(packed: Segment, wide: Segment, *, shift: int) -> Segment:
    """Return a segment that happens once: beside what its own profile tells of it, what each layer
    of the other kind adds."""
    kept: Account = dict(packed.kept)
    for key, polynomial in wide.repeated.items():
        part, _, position = key.partition(" ")
        kept[f"{part} {int(position) + shift}"] = polynomial
    return replace(packed, kept=kept)


def _shifted(tape: tuple[Entry, ...], *, by: int) -> tuple[Entry, ...]:
    """Return a tape whose births name sizes further back."""
    return tuple(
        (what, key, value + by) if what in (BIRTH, LEAVE) else (what, key, value)
        for what, key, value in tape
    )


def _base(packed: Base, wide: Base, *, share: float) -> Base:
    """Return the base in between: layers are alike, and all else is in both."""

    def between(low: int, high: int) -> int:
        return round(share * low + (1 - share) * high)

    return Base(
        allocated_bytes=between(packed.allocated_bytes, wide.allocated_bytes),
        requested_bytes=between(packed.requested_bytes, wide.requested_bytes),
        reserved_bytes=between(packed.reserved_bytes, wide.reserved_bytes),
        holes=packed.holes,
    )


_WIDE_BYTES = 2
"""Of an element of the base that is not packed."""
_ADAPTER_BYTES = 4
"""Of one of the adapters, which are gathered as they are stored."""
_PACKED_BYTES = 0.5
LAYERS_GATHERED = 2
"""Decoder layers that are whole at once: the one that computes, and one that is on its way, or was
and is not let go of yet."""


@dataclass(frozen=True)
class _Gathered:
    """What a segment gathers. Bytes."""

    throughout: int
    """There as long as the segment lasts."""
    at_first: int
    """There at its beginning, while that is copied out of what was received."""
    copied: int
    """Of what is there throughout, what lies among the segment's own tensors."""


def sharded(profile: Profile, config: TrialConfig, model: ModelSpec) -> Profile:
    """Return a profile whose base is what one of several cards holds of it, and whose segments
    gather what they need.

    Raises:
        InputError: the model's layers are not known.
    """
    layer, head = _layer_bytes(config, model), _head_bytes(model)
    has_own_head = not is_tied(model)
    held = _held_bytes(profile.base, config, model) + head * (not has_own_head)
    # What is received is of a stream of its own, whose memory serves nothing else. Where the
    # embedding was received lies a layer when the head is, which takes as much anew.
    received = max(head, LAYERS_GATHERED * layer) + head * has_own_head
    base = Base(held, held, held + received, holes=())
    of_layer = _Gathered(LAYERS_GATHERED * layer, 0, layer)
    gathered = _at_the_ends(config, layer, head) if has_own_head else _of_one_weight(layer, head)
    kinds = {name: gathered.get(name, of_layer) for name in profile.segments}
    copied = [{"": kind.copied} for kind in kinds.values()]
    places = {name: len(profile.sizes) + at for at, name in enumerate(kinds)}
    segments = {
        name: _gathering(segment, kinds[name], size=places[name])
        for name, segment in profile.segments.items()
    }
    return replace(profile, base=base, segments=segments, sizes=(*profile.sizes, *copied))


def _at_the_ends(config: TrialConfig, layer: int, head: int) -> dict[str, _Gathered]:
    """Return what is gathered for the embedding and for the loss, of so many bytes each."""
    if config.kernels == "hf":
        # What it was received in is kept until something else is.
        loss, back = _Gathered(2 * head, 0, head), _Gathered(head, 0, head)
    else:
        # What the last layer was received in is still there. A fused loss has its gradient by the
        # backward pass, and the head is given up with it.
        loss, back = _Gathered(layer + head, layer + 2 * head, head), _Gathered(0, 0, 0)
    return {"embed": _Gathered(head, 2 * head, head), "head": loss, "head_backward": back}


def _of_one_weight(layer: int, head: int) -> dict[str, _Gathered]:
    """Return the same of a head that is the embedding: it is whole from the embedding on, which
    counts as held throughout."""
    return {
        "embed": _Gathered(head, 0, 0),
        "head": _Gathered(layer, 0, 0),
        "head_backward": _Gathered(0, 0, 0),
    }


def _gathering(segment: Segment, gathered: _Gathered, *, size: int) -> Segment:
    """Return a segment that gathers; ``size`` is the index of what it copies out."""
    first: tuple[Account, ...] = ({"activations": {"": gathered.at_first}},)
    peaks = tuple(_with(peak, gathered.throughout) for peak in segment.peaks or ({},))
    name = "gathered"
    tape = ((BIRTH, name, size), *segment.tape, (DEATH, name, size))
    return replace(segment, peaks=(*peaks, *first), tape=tape)


def _with(account: Account, constant: int) -> Account:
    """Return an account with so many bytes more."""
    activations = dict(account.get("activations", {}))
    activations[""] = activations.get("", 0) + constant
    return {**account, "activations": activations}


def _held_bytes(base: Base, config: TrialConfig, model: ModelSpec) -> int:
    """Return a card's share of all parameters, and all constants."""
    movable = _parameter_bytes(config, model)
    constants = max(0.0, base.requested_bytes - movable)
    return round(movable / config.data_parallel + constants)


def _parameter_bytes(config: TrialConfig, model: ModelSpec) -> float:
    """Return the bytes of all parameters of the base."""
    whole, linears = parameters(model), _layer_linears(model)
    if whole is None:
        raise _unknown(model)
    in_layers = model.hidden_layers * linears
    return in_layers * _linear_bytes(config) + (whole - in_layers) * _WIDE_BYTES


def _layer_bytes(config: TrialConfig, model: ModelSpec) -> int:
    """Return what a decoder layer takes when it is whole, its adapters included."""
    adapters = (lora_parameters(config, model) or 0) / model.hidden_layers
    return round(_layer_linears(model) * _linear_bytes(config) + adapters * _ADAPTER_BYTES)


def _head_bytes(model: ModelSpec) -> int:
    """Return what the head takes when it is whole, and the embedding too."""
    return model.vocab_size * model.hidden_size * _WIDE_BYTES


def _linear_bytes(config: TrialConfig) -> float:
    return _PACKED_BYTES if config.is_quantized else _WIDE_BYTES


def _layer_linears(model: ModelSpec) -> int:
    """Return the weights of a decoder layer's matrices."""
    shapes = linear_shapes(model)
    if shapes is None:
        raise _unknown(model)
    return sum(rows * columns for rows, columns in shapes.values())


def _unknown(model: ModelSpec) -> InputError:
    return InputError(
        f"model '{model.name}': the layers of model type '{model.model_type}' are not known, so "
        "what each card holds of them is not predicted"
    )
