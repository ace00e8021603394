"""What is known of a structure's memory: which tensors a training step has, and when.

A structure is those settings of a configuration that decide which tensors exist; batch, length,
rank and number of steps only scale them. So bytes are polynomials in these. A polynomial maps a
monomial to its coefficient; a monomial is its symbols' letters in order (``bss`` is batch x length
x length, the empty one is a constant). The symbols:

    b   sequences in a micro-batch
    s   tokens in a sequence
    r   rank of the adapters
    c   tokens in a chunk of the fused loss, or of a tile of logits
    n   chunks of a sequence, as kernels of linear attention take it
    p   tokens in a sequence, padded to the blocks of an attention kernel

One trace holds for every batch, length and rank because it is made with a prime for each of them
(`Symbols`). A tensor's bytes are a product of the model's own dimensions, of which no prime that is
used is a factor, and of powers of the primes. The factors of a number are unique, so those that are
a symbol's prime say how often the symbol is in the product, and what is left is the coefficient. To
the model's code a prime is a number like any other: it compares, pads and slices as in a training.

Some profiles are made of traced ones. A model part of whose layers are in 4 bits is put together
out of the profiles of one kind each: both are traced of the same layers, so that the layers of one
are put behind those of the other, and each layer of the model is told which of them stands for it.
A base that FSDP2 shards is cut up as `sweep.training.process_group` and accelerate do it: each
decoder layer is a group, so are the embedding, and the head. What is gathered is received in one
tensor and copied out of it, so that for a moment it is there twice. Constants of 4-bit weights are
no parameters, so every GPU holds all of them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.search_spaces.config import SETTINGS, TrialConfig, canonical, parse_config
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.kinds import HOST_SLOTS
from qlora_sweep.search_spaces.linears import is_tied, linear_shapes, lora_parameters, parameters
from qlora_sweep.search_spaces.models import ModelSpec

Polynomial = dict[str, int]
Values = Mapping[str, Any]
"""A whole number for each symbol, or an array with one for each configuration."""

TRACED_KEYS = tuple(key for key, setting in SETTINGS.items() if setting.traced)
"""Settings that decide which tensors exist."""
_BLOCK_BYTES = 512
"""The caching allocator's granularity; what depends on no symbol is rounded to it here."""
_SMALLEST_PRIME = 101
"""Smaller primes are factors of too many dimensions: heads, experts, element sizes."""
_LARGEST_PRIME = 20011
_LENGTH_CHOICES = 100
"""Primes next to the length's limit, of which the one that is told apart best is taken."""
NEIGHBOURS = (1, -1)
"""A shifted or padded sequence has one token more or less."""
_ROW_BYTES = 16
"""Bytes a token, from which a tensor of a row is taken to be as long as the sequence."""


class Untraceable(InputError):  # noqa: N818 - the name says what happened
    """The model's code cannot be walked without data; the message names the module and why."""


_COMMON: Mapping[str, Any] = {"trainer": "sweep", "image_size": None, "checkpoint_offload": False}
"""Values that a structure's key leaves out."""


@dataclass(frozen=True)
class Structure:
    """What of a configuration decides which tensors exist."""

    config: TrialConfig
    """A configuration that has it: what only scales tensors is the recipe's, and all decoder layers
    are recomputed or none; both together give what lies between.
    """
    has_flash: bool
    """Whether the GPU has flash attention."""
    is_long: bool = False
    """Whether the sequence passes the attention window, so that a mask has to exist."""

    @classmethod
    def of(
        cls,
        config: TrialConfig,
        *,
        is_checkpointed: bool,
        has_flash: bool = True,
        is_long: bool = False,
    ) -> Structure:
        """Return a configuration's structure, with all layers recomputed or none."""
        resolved = canonical(config)
        shaping: dict[str, Any] = {}
        for key in TRACED_KEYS:
            traced = SETTINGS[key].traced
            assert traced is not None
            shaping[key] = traced(getattr(resolved, key))
        shaping["checkpoint_fraction"] = float(is_checkpointed)
        shaping["checkpoint_offload"] &= is_checkpointed
        return cls(TrialConfig.model_construct(**shaping), has_flash, is_long)

    def in_bf16(self) -> Structure | None:
        """Return the structure that has bf16 wherever this has fp16; None where it has none.

        An adapter in bf16 is of the type of what goes through it in the one, and not in the other.
        """
        if self.config.compute_dtype != "fp16" or self.config.adapter_dtype != "fp32":
            return None
        return replace(self, config=self.config.changed(compute_dtype="bf16"))

    @property
    def key(self) -> str:
        """What tells it apart, as JSON: the settings that shape tensors, and no others; some only
        where they are others than what is common."""
        shaping = {key: getattr(self.config, key) for key in TRACED_KEYS}
        for key, common in _COMMON.items():
            if shaping[key] == common:
                del shaping[key]
        return json.dumps([shaping, self.is_checkpointed, self.has_flash, self.is_long])

    @property
    def is_checkpointed(self) -> bool:
        """Whether all decoder layers are recomputed."""
        return self.config.checkpoint_fraction > 0

    @property
    def is_mixed(self) -> bool:
        """Whether it is put together from the profiles of `parts`, and not traced itself."""
        return self.config.quantized_fraction < 1

    def parts(self) -> tuple[Structure, ...]:
        """Return the structures to trace for it: the same with all layers in 4 bits, and with none;
        where it has layers of one kind only, itself."""
        if not self.is_mixed:
            return (self,)
        alike = self.config.changed(quantized_fraction=1.0)
        wide = alike.changed(quantization="none", double_quant=False)
        return replace(self, config=alike), replace(self, config=wide)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**vars(self), "config": self.config.model_dump(mode="json")}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Structure:
        """Read what `to_json` wrote."""
        return cls(**{**values, "config": parse_config(values["config"])})


VARYING = ("gradients", "activations", "loss")
"""What bytes that come and go are for."""
GRADIENTS, ACTIVATIONS, LOSS = range(3)


class Change(IntEnum):
    """How a tensor comes or goes in a segment."""

    BIRTH = 0
    """A temporary tensor is born."""
    DEATH = 1
    """A temporary tensor dies."""
    LEAVE = 2
    """A tensor is born that a later segment needs."""
    FETCH = 3
    """What an earlier segment left dies, in one layer."""
    FETCH_ALL = 4
    """What an earlier segment left dies, in all layers."""
    RECEIVE = 5
    """Something is received, in memory that serves nothing else."""
    RELEASE = 6
    """That is there no more."""


_CHANGES = tuple(Change)
_SIGNS = np.array([1, -1, 1, -1, -1, 1, -1])
"""Whether there is more alive after a change (1) or less, by its number."""


class TapeEntry(NamedTuple):
    """One change of what is alive in a segment."""

    change: Change
    key: int | str
    """Number of a temporary tensor, or the path of one that outlives its segment."""
    size: int
    """Index of its bytes in `Profile.sizes`."""
    purpose: int
    """Index of `VARYING`."""
    layers: int
    """Of a `FETCH` the layers that it lived through. Of a `FETCH_ALL` the traced layer that left
    it, which stands for several; -1 where it was no layer."""


_NUMBERS = attrgetter("change", "size", "purpose", "layers")


Move = tuple[int, int, int]
"""Whether a tensor is born (1) or dies (-1), the index of its size, and its place: how many were
born in its segment before it."""
Fetched = tuple[str, int | None]
"""Path of what dies that an earlier segment has left, and the layers it lived through; None for all
layers'."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a training step."""

    tape: Sequence[TapeEntry]
    """Its births and deaths in order."""
    highest: Sequence[int]
    """Its births after which most is alive, at some size."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Segment:
        """Read a segment of what the tracing child writes."""
        tape = [
            TapeEntry(_CHANGES[change], key, size, purpose, layers)
            for change, key, size, purpose, layers in values["tape"]
        ]
        return cls(tape, values["highest"])

    @cached_property
    def _born(self) -> Sequence[TapeEntry]:
        return [entry for entry in self.tape if entry.change in (Change.BIRTH, Change.LEAVE)]

    @property
    def births(self) -> int:
        """How many tensors are born in it."""
        return len(self._born)

    @cached_property
    def leaves(self) -> Sequence[tuple[str, int, int]]:
        """Those of them that outlive it: path, place, and the index of the size."""
        left: list[tuple[str, int, int]] = []
        for place, entry in enumerate(self._born):
            if entry.change == Change.LEAVE:
                left.append((str(entry.key), place, entry.size))
        return left

    @cached_property
    def stretches(self) -> Sequence[tuple[Sequence[Move], Fetched | None]]:
        """The moves up to each death of what an earlier segment has left, and what that is; None
        after the last moves."""
        stretches: list[tuple[list[Move], Fetched | None]] = []
        moves: list[Move] = []
        born: dict[int | str, tuple[int, int]] = {}
        place = 0
        for change, key, size, _, layers in self.tape:
            match change:
                case Change.BIRTH | Change.LEAVE:
                    if change == Change.BIRTH:
                        born[key] = (size, place)
                    moves.append((1, size, place))
                    place += 1
                case Change.DEATH:
                    born_size, born_place = born[key]
                    moves.append((-1, born_size, born_place))
                case Change.FETCH:
                    stretches.append((moves, (str(key), layers)))
                    moves = []
                case Change.FETCH_ALL:
                    stretches.append((moves, (str(key), None)))
                    moves = []
        stretches.append((moves, None))
        return stretches


def alive(tape: Sequence[TapeEntry], coefficients: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how much more is alive after each entry of a tape than at its beginning.

    Args:
        tape: a segment's.
        coefficients: of each size, by monomial.

    Returns:
        Coefficients by entry, `VARYING`, layer and monomial. What stands at a traced layer is there
        once for each that this one stands for; what stands before the first of them, once.
    """
    monomials = coefficients.shape[1]
    if not tape:
        return np.zeros((0, len(VARYING), 1, monomials), np.int64)
    rows = list(map(_NUMBERS, tape))
    changes, sizes, purposes, left_by = np.array(rows).T  # (entries,) each
    layers = np.where(changes == Change.FETCH_ALL, left_by + 1, 0)  # (entries,)
    shape = (len(tape), len(VARYING), layers.max() + 1, monomials)
    change = np.zeros(shape, np.int64)
    signs = _SIGNS[changes]  # (entries,)
    change[np.arange(len(tape)), purposes, layers] = signs[:, None] * coefficients[sizes]
    return change.cumsum(axis=0)


def highest(tape: Sequence[TapeEntry], after: NDArray[np.int64]) -> list[int]:
    """Return the births after which no other has more alive at every batch, length, rank and number
    of layers; ``after`` is what `alive` returns."""
    totals = after.sum(axis=1).reshape(len(tape), -1)
    is_birth = np.array([entry.change in (Change.BIRTH, Change.LEAVE) for entry in tape], bool)
    is_followed = np.append(is_birth[1:], False)
    left = np.flatnonzero(is_birth & ~is_followed)
    kept: list[int] = []
    while len(left):
        kept.append(int(left[totals[left].sum(axis=1).argmax()]))
        left = left[(totals[left] > totals[kept[-1]]).any(axis=1)]
    return sorted(kept)


@dataclass(frozen=True)
class Base:
    """The frozen base on the GPU."""

    allocated_bytes: int
    """What its tensors take, remainders that the allocator does not split off included."""
    requested_bytes: int
    """What they take without those remainders, of which expandable segments leave none."""
    reserved_bytes: int
    """The segments that hold it."""
    holes: tuple[int, ...]
    """Free blocks within those segments."""
    experts: tuple[int, ...] = ()
    """What the packed experts of each layer that has some take of it, as far as it can lie on the
    host instead."""
    host_bytes: int = 0
    """Of them, what does."""


@dataclass(frozen=True)
class Profile:
    """A structure's memory over one step, for every batch, length and rank."""

    positions: tuple[int, ...]
    """For each decoder layer, the traced layer that stands for it."""
    base: Base
    adapters: tuple[tuple[int, ...], ...]
    """Elements of every trained tensor for each unit of rank, by traced layer, as attached."""
    segments: Mapping[str, Segment]
    """``embed``, ``forward 0``..., ``head``, ``head_backward``, ``backward 0``..., as traced."""
    sizes: Sequence[Polynomial]
    """Bytes, by the tapes' index."""
    window: int | None
    """Length from which the structure is another one; None where there is none."""
    quantized_share: float | None = None
    """Of the weights that QLoRA means to hold in 4 bits, how many are; None for a 16-bit base."""
    is_same_in_fp16: bool = False
    """Whether it is known that fp16 in bf16's place comes to the same profile."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Profile:
        """Read what the tracing child writes."""
        known = dict(values)
        base = Base(**values["base"])
        known["base"] = replace(base, holes=tuple(base.holes), experts=tuple(base.experts))
        known["positions"] = tuple(values["positions"])
        known["adapters"] = tuple(map(tuple, values["adapters"]))
        segments = values["segments"].items()
        known["segments"] = {name: Segment.from_json(segment) for name, segment in segments}
        return cls(**known)

    @cached_property
    def monomials(self) -> Sequence[str]:
        """Those in the sizes."""
        return sorted(set().union(*self.sizes))

    @cached_property
    def coefficients(self) -> NDArray[np.int64]:
        """Of each size, by monomial."""
        return coefficients(self.sizes, self.monomials)

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The place of each segment among those of `ends`."""
        return dict(zip(self.levels, itertools.count()))

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """How much more is alive at the end of each segment than at its beginning (`levels`).
        (segments, varying, layers, monomials)"""
        return np.stack([levels[-1] for levels in self.levels.values()])

    @cached_property
    def births(self) -> NDArray[np.int64]:
        """How much more is alive after the highest births of all segments, one after another.
        (births, varying, layers, monomials)"""
        return np.concatenate([levels[:-1] for levels in self.levels.values()])

    @cached_property
    def births_of(self) -> Mapping[str, slice]:
        """Which of those are each segment's."""
        births_of: dict[str, slice] = {}
        start = 0
        for name, levels in self.levels.items():
            end = start + len(levels) - 1
            births_of[name] = slice(start, end)
            start = end
        return births_of

    @cached_property
    def worked_out(self) -> dict[Hashable, Any]:
        """What `peaks` has worked out of it, and need not work out again."""
        return {}

    def scale(self, values: Values, *, one: Any = 1) -> list[Any]:
        """Return each monomial's value; ``one`` is as long as those of ``values`` are."""
        return [math.prod(map(values.__getitem__, m), start=one) for m in self.monomials]

    @cached_property
    def levels(self) -> Mapping[str, NDArray[np.int64]]:
        """How much more is alive after the highest births of each segment than at its beginning
        (`alive`), and last how much it leaves; of all traced layers."""
        levels: dict[str, NDArray[np.int64]] = {}
        of_birth = (len(VARYING), len(self.adapters) + 1, len(self.monomials))
        for name, segment in self.segments.items():
            of_segment = np.zeros((len(segment.highest) + 1,) + of_birth, np.int64)
            if segment.tape:
                after = alive(segment.tape, self.coefficients)  # (entries, varying, layers, ...)
                layers = after.shape[2]
                of_segment[:-1, :, :layers] = after[list(segment.highest)]
                of_segment[-1, :, :layers] = after[-1]
            levels[name] = of_segment
        return levels


def coefficients(sizes: Sequence[Polynomial], monomials: Sequence[str]) -> NDArray[np.int64]:
    """Return the coefficients of polynomials as a matrix, by monomial."""
    matrix = np.zeros((len(sizes), len(monomials)), np.int64)
    columns = dict(zip(monomials, itertools.count()))
    for row, size in enumerate(sizes):
        for monomial, coefficient in size.items():
            matrix[row, columns[monomial]] = coefficient
    return matrix


class Symbols:
    """A prime for each symbol.

    Args:
        dimensions: the model's own sizes, which must not hide a symbol's prime.
        longest: length that the traced sequence must not exceed; None where any will do.
        longer_than: length that the traced sequence must exceed.
        steps: by how many tokens a tensor may be longer or shorter than the sequence.
    """

    def __init__(
        self,
        dimensions: Iterable[int],
        *,
        longest: int | None = None,
        longer_than: int = 0,
        steps: Sequence[int] = NEIGHBOURS,
    ) -> None:
        self._steps = steps
        sizes = set(map(abs, dimensions)) - {0}
        usable = [p for p in _primes() if all(size % p for size in sizes)]
        top = min(longest or _LARGEST_PRIME, _LARGEST_PRIME)
        lengths = [p for p in usable if longer_than < p <= top]
        if not lengths:
            raise ValueError(f"no traceable length above {longer_than} and up to {top}")
        # Any prime does for batch and rank. A length has to stay on its side of the attention
        # window and within the positions that the model knows: beyond, its code goes another way.
        near = lengths[-_LENGTH_CHOICES:]
        if longer_than:
            near = lengths[:_LENGTH_CHOICES]
        # Large prime factors tell a sequence with one token more or less.
        self.s = max(near, key=lambda p: min(_largest_factor(p + step) for step in steps))
        # The largest ones: a product of dimensions is the less likely to have one as its factor.
        usable.remove(self.s)
        self.n, self.p, self.c, self.r, self.b = usable[-5:]
        self._primes = {
            "b": self.b,
            "c": self.c,
            "n": self.n,
            "p": self.p,
            "r": self.r,
            "s": self.s,
        }
        self._known: dict[int, Polynomial] = {}

    def polynomial(self, size: int) -> Polynomial:
        """Return the polynomial that has this value where each symbol is its prime."""
        if size not in self._known:
            self._known[size] = self._factor(size)
        return self._known[size]

    def is_unexplained(self, size: int) -> bool:
        """Whether so many bytes are of a length that no symbol gives.

        They grow with the batch and are more than a row of the model's own sizes could be, but
        nothing of the sequence divides them: padded to whole chunks they would be taken for as
        large at every length.
        """
        if size % self.b or size // self.b < _ROW_BYTES * self.s:
            return False
        lengths = [self.s, self.c, self.n, self.p]
        lengths += map(self.s.__add__, self._steps)
        return all(size % length for length in lengths)

    def _factor(self, size: int) -> Polynomial:
        if size == 0:
            return {}
        monomial = ""
        for symbol, prime in self._primes.items():
            while size % prime == 0:
                size //= prime
                monomial += symbol
        # (s + 1) times so many bytes is a sum of two monomials. The neighbour is not a prime, so a
        # length was chosen whose neighbours have a large prime factor: that a product of dimensions
        # has it as well is as unlikely as with a prime of that size.
        for step in self._steps:
            if size % (self.s + step) == 0:
                per_token = size // (self.s + step)
                longer = "".join(sorted(monomial + "s"))
                return {longer: per_token, monomial: step * per_token}
        if not monomial:
            # A constant's block is known here; what a symbol scales is rounded when replayed.
            size = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        return {monomial: size}


@cache
def _largest_factor(number: int) -> int:
    largest = 1
    factor = 2
    while factor * factor <= number:
        while number % factor == 0:
            number //= factor
            largest = factor
        factor += 1
    return max(largest, number)


@cache
def _primes() -> tuple[int, ...]:
    numbers = range(_SMALLEST_PRIME, _LARGEST_PRIME + 1)
    return tuple(filter(lambda number: _largest_factor(number) == number, numbers))


def mixed(packed: Profile, wide: Profile, *, quantized: Collection[int]) -> Profile:
    """Return the profile of a model of whose layers some are in 4 bits.

    Args:
        packed: of the model with all layers in 4 bits.
        wide: of the model with none.
        quantized: the layers that are.
    """
    shift = len(packed.adapters)
    share = len(quantized) / len(packed.positions)

    def between(low: int, high: int) -> int:
        """Return a size of the base in between: layers are alike, and all else is in both."""
        return round(share * low + (1 - share) * high)

    segments = dict(packed.segments)
    for name, segment in wide.segments.items():
        tape = [_behind(entry, layers=shift, sizes=len(packed.sizes)) for entry in segment.tape]
        kind, _, position = name.partition(" ")
        if position:
            segments[f"{kind} {int(position) + shift}"] = replace(segment, tape=tape)
        else:
            # What happens once: beside the packed model's, what each layer of the other kind adds.
            once = list(segments[name].tape)
            once += filter(_is_of_each_layer, tape)
            segments[name] = replace(segments[name], tape=once)
    positions = list(packed.positions)
    for layer, position_in_wide in enumerate(wide.positions):
        if layer not in quantized:
            positions[layer] = position_in_wide + shift
    return replace(
        packed,
        positions=tuple(positions),
        base=Base(
            allocated_bytes=between(packed.base.allocated_bytes, wide.base.allocated_bytes),
            requested_bytes=between(packed.base.requested_bytes, wide.base.requested_bytes),
            reserved_bytes=between(packed.base.reserved_bytes, wide.base.reserved_bytes),
            holes=packed.base.holes,
        ),
        adapters=packed.adapters + wide.adapters,
        segments=segments,
        sizes=tuple(packed.sizes) + tuple(wide.sizes),
    )


def _behind(entry: TapeEntry, *, layers: int, sizes: int) -> TapeEntry:
    """Return an entry of a profile whose traced layers and sizes come behind so many others."""
    if not _is_of_each_layer(entry):
        layers = 0
    return entry._replace(size=entry.size + sizes, layers=entry.layers + layers)


def _is_of_each_layer(entry: TapeEntry) -> bool:
    """Whether something dies that each layer has left."""
    return entry.change == Change.FETCH_ALL and entry.layers >= 0


def offloaded(profile: Profile, config: TrialConfig) -> Profile:
    """Return a profile whose base has the experts of some layers on the host, and room for those
    that are on their way."""
    sizes = profile.base.experts
    gone = [sizes[layer] for layer in config.offloaded_layers(len(sizes))]
    slots = min(HOST_SLOTS, len(gone)) * max(gone, default=0)
    less = sum(gone) - slots
    base = replace(
        profile.base,
        allocated_bytes=profile.base.allocated_bytes - less,
        requested_bytes=profile.base.requested_bytes - less,
        reserved_bytes=profile.base.reserved_bytes - less,
        host_bytes=sum(gone),
    )
    return replace(profile, base=base)


_GRADIENT = ("backward>backward", "head_backward>backward")
"""Beginnings of the paths of what one layer's backward pass, or the loss's, leaves to the next."""


def as_nodes(profile: Profile) -> Profile:
    """Return a profile, traced of torch's own checkpointing, whose recomputed layers are one node
    of the graph each: the gradient of a layer's output is there until its backward pass is done."""
    segments = dict(profile.segments)
    for name, segment in profile.segments.items():
        if not name.startswith("backward"):
            continue
        held: list[TapeEntry] = []
        others: list[TapeEntry] = []
        for entry in segment.tape:
            is_fetched = entry.change in (Change.FETCH, Change.FETCH_ALL)
            if is_fetched and str(entry.key).startswith(_GRADIENT):
                held.append(entry)
            else:
                others.append(entry)
        tape = others + held
        segments[name] = Segment(tape, highest(tape, alive(tape, profile.coefficients)))
    return replace(profile, segments=segments)


_WIDE_BYTES = 2
"""Of an element of the base that is not packed."""
_ADAPTER_BYTES = 4
"""Of one of the adapters, which are gathered as they are stored."""
LAYERS_ALL_GATHERED = 2
"""Decoder layers that are whole at once: the one that computes, and one that is on its way, or was
and is not let go of yet."""


@dataclass(frozen=True)
class _AllGathered:
    """What a segment gathers. Bytes."""

    throughout: int
    """There as long as the segment lasts."""
    at_first: int
    """There at its beginning, while that is copied out of what was received."""
    copied: int
    """Of what is there throughout, what lies among the segment's own tensors."""


def sharded(profile: Profile, config: TrialConfig, model: ModelSpec) -> Profile:
    """Return a profile whose base is what one of several GPUs holds of it, and whose segments
    gather what they need.

    Raises:
        InputError: the model's layers are not known.
    """
    whole = parameters(model)
    shapes = linear_shapes(model)
    if whole is None or shapes is None:
        raise InputError(
            f"model '{model.name}': the layers of model type '{model.model_type}' are not known, "
            "so what each GPU holds of them is not predicted"
        )
    linears = sum(map(math.prod, shapes.values()))
    width = config.weight_bits / 8
    # What a decoder layer takes when it is whole, its adapters included; and what the head does.
    adapters = (lora_parameters(config, model) or 0) / model.hidden_layers
    layer = round(linears * width + adapters * _ADAPTER_BYTES)
    head = model.vocab_size * model.hidden_size * _WIDE_BYTES
    # A GPU holds its share of all parameters, and all constants.
    in_layers = model.hidden_layers * linears
    movable = in_layers * width + (whole - in_layers) * _WIDE_BYTES
    constants = max(0.0, profile.base.requested_bytes - movable)
    has_own_head = not is_tied(model)
    held = round(movable / config.data_parallel + constants)
    # What is received is of a stream of its own, whose memory serves nothing else. Where the
    # embedding was received lies a layer when the head is, which takes as much anew.
    received = max(head, LAYERS_ALL_GATHERED * layer)
    if has_own_head:
        received += head
    else:
        held += head
    base = Base(held, held, held + received, holes=())
    gathered = _at_the_ends(config, layer, head, has_own_head=has_own_head)
    sizes = list(profile.sizes)
    segments: dict[str, Segment] = {}
    for name, segment in profile.segments.items():
        each = gathered.get(name, _AllGathered(LAYERS_ALL_GATHERED * layer, 0, layer))
        segments[name] = _gathering(segment, each, size=len(sizes))
        sizes += [{"": each.at_first}, {"": each.throughout - each.copied}, {"": each.copied}]
    return replace(profile, base=base, segments=segments, sizes=sizes)


def _at_the_ends(
    config: TrialConfig, layer: int, head: int, *, has_own_head: bool
) -> dict[str, _AllGathered]:
    """Return what is gathered for the embedding and for the loss, of so many bytes each."""
    nothing = _AllGathered(0, 0, 0)
    if not has_own_head:
        # The head is the embedding: it is whole from there on, which counts as held throughout.
        return {
            "embed": _AllGathered(head, 0, 0),
            "head": _AllGathered(layer, 0, 0),
            "head_backward": nothing,
        }
    embed = _AllGathered(head, 2 * head, head)
    if config.kernels_kind.fuses_loss:
        # What the last layer was received in is still there. A fused loss has its gradient by the
        # backward pass, and the head is given up with it.
        loss = _AllGathered(layer + head, layer + 2 * head, head)
        return {"embed": embed, "head": loss, "head_backward": nothing}
    # What it was received in is kept until something else is.
    return {
        "embed": embed,
        "head": _AllGathered(2 * head, 0, head),
        "head_backward": _AllGathered(head, 0, head),
    }


def _gathering(segment: Segment, gathered: _AllGathered, *, size: int) -> Segment:
    """Return a segment that gathers; ``size`` is the index of what is there at first."""
    first, beside, copied = range(size, size + 3)
    tape = [
        TapeEntry(Change.RECEIVE, "", first, ACTIVATIONS, 0),
        TapeEntry(Change.RELEASE, "", first, ACTIVATIONS, 0),
        TapeEntry(Change.RECEIVE, "", beside, ACTIVATIONS, 0),
        TapeEntry(Change.BIRTH, "gathered", copied, ACTIVATIONS, 0),
    ]
    before = len(tape)
    tape += segment.tape
    tape.append(TapeEntry(Change.DEATH, "gathered", copied, ACTIVATIONS, 0))
    tape.append(TapeEntry(Change.RELEASE, "", beside, ACTIVATIONS, 0))
    highest = [before + birth for birth in segment.highest or (-1,)]
    highest.append(0)
    return Segment(tape, highest)
