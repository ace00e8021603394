"""Owns what a card holds of a base that is sharded by FSDP2: its share, and what is gathered when.

As `sweep.training.sharding` and accelerate cut it up: each decoder layer is a group, so are the
embedding, and the head. What is gathered is received in one tensor and copied out of it, so that
for a moment it is there twice. Constants of 4-bit weights are no parameters, so every card holds
all of them. Knows nothing of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.linears import is_tied, linear_shapes, lora_parameters, parameters
from search_spaces.models import ModelSpec
from sweep.predict.memory.profiles import BIRTH, DEATH, Account, Base, Profile, Segment

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
