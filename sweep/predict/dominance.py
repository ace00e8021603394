"""When one configuration needs at least the memory of another, whatever the device.

Only relations that hold by construction are claimed, setting by setting: what is not claimed costs
one trial, what is claimed wrongly hides a configuration that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qlora_sweep.search_spaces.config import SETTINGS, TrialConfig
from qlora_sweep.search_spaces.linears import resolve_targets
from qlora_sweep.search_spaces.models import ModelSpec

Footprint = Mapping[str, tuple[Any, bool]]
"""A configuration as far as memory goes: of every setting that matters to it, the value (for those
with an order, a size) and whether memory grows with it; of the others only equal values compare.

With the settings that shape the base alone, it is the footprint of that base.
"""

_SIZES: Mapping[str, Callable[[TrialConfig, ModelSpec], Any]] = {
    "lora_dropout": lambda config, _: config.lora_dropout > 0,
    "target_modules": lambda config, model: frozenset(resolve_targets(config, model)),
    "effective_batch_size": lambda config, _: config.accumulation_steps > 1,
    "checkpoint_fraction": lambda config, model: config.checkpointed_count(model.hidden_layers),
    # The more GPUs, the less each holds of what is sharded. Those that hold all of the model keep
    # the gradients in buckets for as long as they train, however many they are; one alone does not.
    "offload_fraction": lambda config, _: -config.offload_fraction,
    "checkpoint_offload": lambda config, _: -int(config.checkpoint_offload),
    "data_parallel": lambda config, _: (
        -config.data_parallel if config.is_sharded else min(config.data_parallel, 2)
    ),
}
"""What memory goes by, of the settings whose value is not itself that."""


def footprint(config: TrialConfig, *, model: ModelSpec, has_dataset: bool = False) -> Footprint:
    """Return the settings of ``config`` that matter to memory, which LoRA's scale does not.

    Args:
        config: what would be trained.
        model: of which.
        has_dataset: whether its rows are of texts, so that few are as long as the sequence length.
    """
    values: dict[str, tuple[Any, bool]] = {}
    widens = not has_dataset or _widens_with_length(config)
    for key, setting in SETTINGS.items():
        has_order = setting.memory in ("grows", "shrinks") or key in _SIZES
        if has_order and (key != "seq_len" or widens):
            is_ordered = setting.survives_compiler or not config.compile
            values[key] = _size(key, config, model), is_ordered
        elif setting.memory != "untouched":
            values[key] = getattr(config, key), False
    return values


def _widens_with_length(config: TrialConfig) -> bool:
    """Whether a longer sequence length makes the largest micro-batch of texts at least as wide.

    Compiled, rows are padded to quarters of the length: 260 tokens take 384 of 512, and 260 of 520.
    Packed rows are as wide as the length, unless flash attention has them in one row of all their
    tokens: how full that is may go either way.
    """
    if config.packing == "packed":
        return config.attention != "flash_attention_2"
    return not config.compile


def _size(key: str, config: TrialConfig, model: ModelSpec) -> Any:
    if key in _SIZES:
        return _SIZES[key](config, model)
    assert SETTINGS[key].memory == "grows", f"more of {key} needs less memory"
    value = getattr(config, key)
    lean_first = SETTINGS[key].lean_first
    if not lean_first:
        return value
    if value not in lean_first:
        return len(lean_first)
    return lean_first.index(value)


def base_alone(whole: Footprint) -> Footprint:
    """Return the least that any configuration like ``whole`` can need: its base, without training.

    What could not even be loaded cannot be trained with smaller adapters or shorter rows either.
    """
    base: dict[str, tuple[Any, bool]] = {}
    for key, value in whole.items():
        # Each GPU's share of a sharded base depends on how many GPUs there are.
        if SETTINGS[key].shapes_base or key == "data_parallel":
            base[key] = value
    return base


def dominates(larger: Footprint, smaller: Footprint) -> bool:
    """Return whether ``larger`` is at least as large in all that ``smaller`` has."""
    for key, (value, is_ordered) in smaller.items():
        own, is_own_ordered = larger[key]
        # A loop, as hundreds that ran out are held against every configuration.
        if own == value:
            continue
        if not is_ordered or not is_own_ordered:
            return False
        # A recomputed layer is whole again during its own backward pass, with its output's gradient
        # beside it, so recomputing one layer more may save nothing. Two more always save.
        if key == "checkpoint_fraction" and own + 2 > value:
            return False
        if key != "checkpoint_fraction" and own < value:
            return False
    return True


class RanOut:
    """Trials that ran out of memory."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], dict[tuple[Any, ...], list[tuple[int, Footprint]]]] = {}
        """Numbers and footprints, by the settings of which only equal values compare and by those
        values: one in thousands has to be looked at."""

    def add(self, number: int, least: Footprint) -> None:
        """Take in a trial of which at least ``least`` ran out of memory."""
        keys = tuple(key for key, (_, is_ordered) in least.items() if not is_ordered)
        of_keys = self._known.setdefault(keys, {})
        of_keys.setdefault(_values(keys, least), []).append((number, least))

    def by(self, whole: Footprint) -> int | None:
        """Return the number of the first trial that ran out and needs no more than ``whole``."""
        numbers: list[int] = []
        for keys, of_keys in self._known.items():
            for number, least in of_keys.get(_values(keys, whole), ()):
                if dominates(whole, least):
                    numbers.append(number)
        return min(numbers, default=None)


def _values(keys: tuple[str, ...], of: Footprint) -> tuple[Any, ...]:
    return tuple(of[key][0] for key in keys)
