"""When one configuration needs at least the memory of another, whatever the device.

Only relations that hold by construction are claimed, setting by setting: what is not claimed costs
one trial, what is claimed wrongly hides a configuration that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.knobs import KNOBS
from search_spaces.linears import resolve_targets
from search_spaces.models import ModelSpec


@dataclass(frozen=True)
class Footprint:
    """A configuration as far as memory goes, by knob: what it grows with, and what must be equal.

    With the knobs that shape the base alone, it is the footprint of that base.
    """

    sizes: Mapping[str, Any]
    """Of what memory grows with; ``>=`` compares two of one knob."""
    kinds: Mapping[str, Any]
    """Of what memory may go either way with: only equal ones compare."""


@dataclass(frozen=True)
class _Recomputed:
    """A number of layers, of which more need less memory."""

    layers: int

    def __ge__(self, other: _Recomputed) -> bool:
        """Whether recomputing so many layers keeps at least as much as recomputing the others.

        A recomputed layer is whole again during its own backward pass, with its output's gradient
        beside it, so recomputing one layer more may save nothing. Two more always save.
        """
        return self.layers == other.layers or self.layers + 2 <= other.layers


@dataclass(frozen=True)
class _Cards:
    """A number of cards that train together: the more, the less each holds of what is sharded."""

    count: int
    """Of those that hold all of the model two stand for any number above one."""
    is_sharded: bool

    def __ge__(self, other: _Cards) -> bool:
        """Whether one of so many cards needs at least as much as one of the others.

        Those that hold all of the model keep the gradients in buckets for as long as they train,
        however many they are; one alone does not. How the model is held must be equal anyway.
        """
        return self.count <= other.count if self.is_sharded else self.count >= other.count


def _cards(config: TrialConfig) -> _Cards:
    count = config.data_parallel
    return _Cards(count if config.is_sharded else min(count, 2), config.is_sharded)


_SIZES: Mapping[str, Callable[[TrialConfig, ModelSpec], Any]] = {
    "lora_dropout": lambda config, _: config.lora_dropout > 0,
    "target_modules": lambda config, model: frozenset(resolve_targets(config, model)),
    "effective_batch_size": lambda config, _: config.accumulation_steps > 1,
    "checkpoint_fraction": lambda config, model: _Recomputed(
        config.checkpointed_count(model.hidden_layers)
    ),
    "data_parallel": lambda config, _: _cards(config),
}
"""What memory grows with, of the knobs whose value is not itself that.

What memory shrinks with is among them, and what it grows with under one value of another knob and
shrinks with under another.
"""


def footprint(config: TrialConfig, *, model: ModelSpec, has_texts: bool = False) -> Footprint:
    """Return what of ``config`` matters to memory. The scale of LoRA, for one, does not.

    Args:
        config: what would be trained.
        model: of which.
        has_texts: whether its rows are of texts, so that few are as long as the sequence length.
    """
    sizes: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    widens = not has_texts or _widens_with_length(config)
    for key, knob in KNOBS.items():
        has_order = knob.memory in ("grows", "shrinks") or key in _SIZES
        is_ordered = has_order and (key != "seq_len" or widens)
        if is_ordered and (knob.survives_compiler or not config.compile):
            sizes[key] = _size(key, config, model)
        elif knob.memory != "untouched":
            kinds[key] = _size(key, config, model) if is_ordered else getattr(config, key)
    return Footprint(sizes, kinds)


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
    assert KNOBS[key].memory == "grows", f"more of {key} needs less memory"
    value, lean_first = getattr(config, key), KNOBS[key].lean_first
    if not lean_first:
        return value
    return lean_first.index(value) if value in lean_first else len(lean_first)


def base_alone(whole: Footprint) -> Footprint:
    """Return the least that any configuration like ``whole`` can need: its base, without training.

    What could not even be loaded cannot be trained with smaller adapters or shorter rows either.
    """
    # Of what is sharded each GPU's share of the base depends on how many they are.
    keys = {key for key, knob in KNOBS.items() if knob.shapes_base or key == "data_parallel"}
    return Footprint(
        {key: value for key, value in whole.sizes.items() if key in keys},
        {key: value for key, value in whole.kinds.items() if key in keys},
    )


class RanOut:
    """The footprints of what ran out of memory, by the trial that did; told one by one.

    Only what is equal in all that must be equal compares, so each is looked up by that: of hundreds
    a configuration is held against the few of its kind.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], dict[tuple[Any, ...], list[tuple[int, int, Footprint]]]]
        """By the settings that must be equal, of a base alone fewer than of others, and by their
        values: the order of learning, the trial and its footprint."""
        self._known = {}
        self._count = 0

    def learn(self, number: int, known: Footprint) -> None:
        """Remember what ran out of memory."""
        alike = self._known.setdefault(tuple(known.kinds), {})
        of_kind = alike.setdefault(tuple(known.kinds.values()), [])
        of_kind.append((self._count, number, known))
        self._count += 1

    def below(self, larger: Footprint) -> int | None:
        """Return the trial that was learned first of those that a footprint dominates; None for
        none."""
        values = {**larger.sizes, **larger.kinds}
        found = [
            (place, number)
            for keys, alike in self._known.items()
            if values.keys() >= set(keys)
            for place, number, known in alike.get(tuple(values[key] for key in keys), ())
            if dominates(larger, known)
        ]
        return min(found)[1] if found else None


def dominates(larger: Footprint, smaller: Footprint) -> bool:
    """Return whether ``larger`` is at least as large in all that ``smaller`` has."""
    known = {**larger.sizes, **larger.kinds}
    return all(known[key] == kind for key, kind in smaller.kinds.items()) and all(
        known[key] >= size if key in larger.sizes else known[key] == size
        for key, size in smaller.sizes.items()
    )
