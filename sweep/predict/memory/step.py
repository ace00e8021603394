"""One training step as memory sees it: what stays, and its segments in order, at real sizes.

A profile has a few layers; here each of the model's layers gets the segments of the one that stands
for it, recomputed or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from search_spaces.config import TrialConfig
from sweep.predict.memory.allocator import SMALL_BYTES
from sweep.predict.memory.polynomials import Values, evaluate
from sweep.predict.memory.profiles import Profile, Segment

_FP32_BYTES = 4
_ADAPTER_BYTES = {"fp32": _FP32_BYTES, "bf16": 2}
"""Bytes of an element of an adapter, and of its gradient."""

_MIN_8BIT_ELEMENTS = 4096
"""bitsandbytes keeps the states of smaller tensors in fp32 (``min_8bit_size``)."""
_MIN_PAGED_ELEMENTS = 100_000
"""bitsandbytes keeps smaller states on the card; larger ones are in memory no counter sees."""
_BLOCK_ELEMENTS = 256
"""Elements that share a scale."""

_MOMENTS = {"embed": "forward", "head": "loss", "head_backward": "loss"}


@dataclass(frozen=True)
class Visit:
    """One segment of the step."""

    name: str
    """As in `Profile.segments`."""
    is_checkpointed: bool
    """Whose profile it is from."""
    layer: int = 0
    """Decoder layer of the whole model; 0 for what happens once."""

    @property
    def key(self) -> tuple[str, bool]:
        """The segment and whose it is; the layers that share it are alike."""
        return self.name, self.is_checkpointed

    @property
    def moment(self) -> str:
        """``forward``, ``loss`` or ``backward``."""
        kind = self.name.partition(" ")[0]
        return _MOMENTS.get(kind, kind)


@dataclass(frozen=True)
class Step:
    """A step that has the optimizer's states from the start, as every step but the first."""

    config: TrialConfig
    profiles: Mapping[bool, Profile]
    """The structures' profiles, by whether layers are recomputed."""
    flags: tuple[bool, ...]
    """For each decoder layer, whether it is recomputed."""
    values: Values
    """Of the polynomials' symbols."""
    workspace_bytes: int
    """What the libraries keep for themselves."""
    is_unseen: bool = False
    """Whether nothing like it was ever measured: several cards share a model whose head is its
    embedding."""

    @property
    def profile(self) -> Profile:
        """The last layer's: where it ends, the loss begins. What does not vary is alike in both."""
        return self.profiles[self.flags[-1]]

    @property
    def held_gradients(self) -> int:
        """How many times the adapters' gradients are there throughout.

        Once as those of earlier micro-batches; once as the buckets in which several cards send
        each other theirs, which are never given back. Where cards accumulate, each keeps its own
        beside the buckets until the last micro-batch.
        """
        if self.config.is_sharded:
            # A card's share of them, and all of them as long as nothing is sent.
            return 1 + self._shares * (self.config.accumulation_steps > 1)
        return (self.config.accumulation_steps > 1) + (self.config.data_parallel > 1)

    @property
    def _shares(self) -> int:
        """Into how many parts every trained tensor is cut."""
        return self.config.data_parallel if self.config.is_sharded else 1

    @property
    def accumulates(self) -> bool:
        """Whether a layer's gradients have their place before its backward pass begins."""
        return self.held_gradients > 0

    def visits(self) -> Iterator[Visit]:
        """Yield the step's segments in order."""
        last = self.flags[-1]
        layers = list(enumerate(zip(self.profile.positions, self.flags, strict=True)))
        yield Visit("embed", self.flags[0])
        yield from (Visit(f"forward {at}", flag, layer) for layer, (at, flag) in layers)
        yield Visit("head", last)
        yield Visit("head_backward", last)
        yield from (Visit(f"backward {at}", flag, layer) for layer, (at, flag) in reversed(layers))

    def segment(self, visit: Visit) -> Segment:
        """Return the traced segment of a visit."""
        return self.profiles[visit.is_checkpointed].segments[visit.name]

    def layer_keeps_bytes(self, visit: Visit) -> int:
        """Return what a layer's segment leaves; negative where it frees more."""
        kept = self.segment(visit).kept
        return sum(evaluate(polynomial, self.values) for polynomial in kept.values())

    @property
    def base_bytes(self) -> int:
        """What the frozen base takes."""
        base = self.profile.base
        expands = self.config.expandable_segments
        return base.requested_bytes if expands else base.allocated_bytes

    @property
    def may_waste(self) -> bool:
        """Whether unsplit remainders of blocks may be worth a replay.

        What layers keep is hundreds of blocks, each of which may hold up to a MiB too much. A
        recomputed layer keeps one. Expandable segments leave no remainder.
        """
        return not all(self.flags) and not self.config.expandable_segments

    @property
    def most_wasted_bytes(self) -> int:
        """No more than this do unsplit remainders take: one for each block that may be alive."""
        if not self.may_waste:
            return 0
        segments = [self.segment(visit) for visit in self.visits()]
        left = sum(segment.leaves for segment in segments)
        return SMALL_BYTES * (left + max(segment.births for segment in segments))

    @cached_property
    def adapters(self) -> list[int]:
        """Bytes of each trained tensor, in the order they are attached."""
        size = _ADAPTER_BYTES[self.config.adapter_dtype]
        return [elements * size for elements in self._trained]

    @cached_property
    def states(self) -> list[int]:
        """Bytes of each of the optimizer's tensors that are on the card."""
        sizes = {n: state_bytes(self.config, n) for n in set(self._trained)}
        return [size for elements in self._trained for size in sizes[elements]]

    @cached_property
    def _trained(self) -> list[int]:
        """Elements of each trained tensor, as far as they are this card's."""
        rank, of_layer = self.config.lora_rank, self.profile.adapters
        whole = (n * rank for position in self.profile.positions for n in of_layer[position])
        return [-(-elements // self._shares) for elements in whole]


def state_bytes(config: TrialConfig, elements: int) -> tuple[int, ...]:
    """Return the bytes of each tensor that is kept on the card for a trained one."""
    optimizer = config.optimizer
    if optimizer == "adamw_torch_fused":
        # Moments of the parameter's own type; the step count is on the card too, always in fp32.
        moment = elements * _ADAPTER_BYTES[config.adapter_dtype]
        return (_FP32_BYTES, moment, moment)
    if elements < _MIN_8BIT_ELEMENTS:
        return (elements * _FP32_BYTES,) * 2
    scales = -(-elements // _BLOCK_ELEMENTS) * _FP32_BYTES
    if optimizer == "paged_adamw_8bit" and elements >= _MIN_PAGED_ELEMENTS:
        return (scales, scales)
    return (elements, elements, scales, scales)
