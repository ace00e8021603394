"""Owns what a card holds of a base that is sharded by FSDP2: its share, and what is gathered.

As accelerate cuts it up: each decoder layer is a group, so are the embedding, and the last norm
with the head, which stays gathered from the end of the forward pass on. Constants of 4-bit weights
are no parameters, so every card holds all of them. Knows nothing of steps or of the allocator.
"""

from __future__ import annotations

from dataclasses import replace

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.linears import linear_shapes, lora_parameters, parameters
from search_spaces.models import ModelSpec
from sweep.predict.memory.profiles import Base, Profile

_WIDE_BYTES = 2
"""Of an element of the base that is not packed."""
_ADAPTER_BYTES = 4
"""Of one of the adapters, which are gathered as they are stored."""
_PACKED_BYTES = 0.5
LAYERS_GATHERED = 2
"""Decoder layers that are whole at once: the one that computes, and the next on its way."""


def sharded(profile: Profile, config: TrialConfig, model: ModelSpec) -> Profile:
    """Return a profile whose base is what one of several cards holds of it, gathered layers and
    head included.

    Raises:
        InputError: the model's layers are not known.
    """
    taken = _held_bytes(profile.base, config, model) + _gathered_bytes(config, model)
    base = Base(allocated_bytes=taken, requested_bytes=taken, reserved_bytes=taken, holes=())
    return replace(profile, base=base)


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


def _gathered_bytes(config: TrialConfig, model: ModelSpec) -> int:
    """Return what is gathered beside the shares when most of it is: layers in the middle of the
    backward pass, or the head at its beginning."""
    adapters = (lora_parameters(config, model) or 0) / model.hidden_layers
    layer = _layer_linears(model) * _linear_bytes(config) + adapters * _ADAPTER_BYTES
    head = model.vocab_size * model.hidden_size * _WIDE_BYTES
    return round(max(LAYERS_GATHERED * layer, layer + head))


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
