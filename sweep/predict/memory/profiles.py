"""What is known of a structure's memory: which tensors a training step has, and when.

A structure is what of a configuration decides which tensors exist; batch, length, rank and number
of steps only scale them. So bytes are polynomials in these. A polynomial maps a monomial to its
coefficient; a monomial is its symbols' letters in order (``bss`` is batch x length x length, the
empty one is a constant). The symbols:

    b   sequences in a micro-batch
    s   tokens in a sequence
    r   rank of the adapters
    c   tokens in a chunk of the fused loss, or of a tile of logits
    p   tokens in a sequence, padded to the blocks of an attention kernel

One trace holds for every batch, length and rank because it is made with a prime for each of them
(`Symbols`). A tensor's bytes are a product of the model's own dimensions, of which no prime that is
used is a factor, and of powers of the primes. The factors of a number are unique, so those that are
a symbol's prime say how often the symbol is in the product, and what is left is the coefficient. To
the model's code a prime is a number like any other: it compares, pads and slices as in a training.

Some profiles are made of traced ones. A model part of whose layers are in 4 bits is put together
out of the profiles of one kind each: both are traced of the same layers, so that the layers of one
are put behind those of the other, and each layer of the model is told which of them stands for it.
A base that FSDP2 shards is cut up as `sweep.training.team` and accelerate do it: each decoder
layer is a group, so are the embedding, and the head. What is gathered is received in one tensor and
copied out of it, so that for a moment it is there twice. Constants of 4-bit weights are no
parameters, so every GPU holds all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.search_spaces.config import KNOBS, TrialConfig, canonical, parse_config
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.linears import is_tied, linear_shapes, lora_parameters, parameters
from qlora_sweep.search_spaces.models import ModelSpec

Polynomial = dict[str, int]
Values = Mapping[str, Any]
"""A whole number for each symbol, or an array with one for each configuration."""

_BLOCK_BYTES = 512
"""The caching allocator's granularity; what depends on no symbol is rounded to it here."""
_SMALLEST_PRIME = 101
"""Smaller primes are factors of too many dimensions: heads, experts, element sizes."""
_LARGEST_PRIME = 20011
_LENGTH_CHOICES = 100
"""Primes next to the length's limit, of which the one that is told apart best is taken."""
_NEIGHBOURS = (1, -1)
"""A shifted or padded sequence has one token more or less."""
_ROW_BYTES = 16
"""Bytes a token, from which a tensor of a row is taken to be as long as the sequence."""


class Untraceable(InputError):  # noqa: N818 - the name says what happened
    """The model's code cannot be walked without data; the message names the module and why."""


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
        shaping = {
            key: knob.traced(getattr(resolved, key)) for key, knob in KNOBS.items() if knob.traced
        }
        shaping["checkpoint_fraction"] = float(is_checkpointed)
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
        """What tells it apart, as JSON: the settings that shape tensors, and no others; the trainer
        where it is another one than sweep."""
        shaping = {key: getattr(self.config, key) for key, knob in KNOBS.items() if knob.traced}
        if self.config.trainer == "sweep":
            del shaping["trainer"]
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

BIRTH, DEATH, LEAVE, FETCH, FETCH_ALL, RECEIVE, RELEASE = range(7)
"""What happens in a segment: a temporary is born, or dies; something is left for a later segment;
what an earlier one left dies, in one layer or in all; something is received in memory that serves
nothing else, or is there no more.
"""
_SIGNS = (1, -1, 1, -1, -1, 1, -1)

Move = tuple[int, int, int]
"""Whether a tensor is born (1) or dies (-1), the index of its size, and its place: how many were
born in its segment before it."""
Entry = Sequence[Any]
"""What happens, to what (a temporary's number or a path), the index of its size, what it is for (an
index of `VARYING`), and the layers that what dies lived through. Where what all layers have left
dies, instead the traced layer that left it, which stands for several; -1 where it was no layer.
"""


@dataclass(frozen=True)
class Segment:
    """A stretch of a training step."""

    tape: Sequence[Entry]
    """Its births and deaths in order."""
    highest: Sequence[int]
    """Its births after which most is alive, at some size."""

    @cached_property
    def births(self) -> int:
        """How many tensors are born in it."""
        return sum(what in (BIRTH, LEAVE) for what, *_ in self.tape)

    @cached_property
    def leaves(self) -> Sequence[tuple[str, int, int]]:
        """Those of them that outlive it: path, place, and the index of the size."""
        born = [entry for entry in self.tape if entry[0] in (BIRTH, LEAVE)]
        return [(e[1], place, e[2]) for place, e in enumerate(born) if e[0] == LEAVE]

    @cached_property
    def stretches(self) -> Sequence[tuple[Sequence[Move], tuple[str, int | None] | None]]:
        """What happens up to where something dies that an earlier segment has left: the path of
        that, and the layers it lived through; None for all layers'. At the end nothing does."""
        found: list[tuple[list[Move], tuple[str, int | None] | None]] = []
        moves: list[Move] = []
        born: dict[Any, tuple[int, int]] = {}
        for what, key, size, _, by in self.tape:
            if what in (BIRTH, LEAVE):
                place = len(born)
                born[key if what == BIRTH else (key, place)] = size, place
                moves.append((1, size, place))
            elif what == DEATH:
                moves.append((-1, *born[key]))
            elif what in (FETCH, FETCH_ALL):
                found.append((moves, (key, by if what == FETCH else None)))
                moves = []
        return [*found, (moves, None)]


def alive(tape: Sequence[Entry], coefficients: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how much more is alive after each entry of a tape than at its beginning.

    Args:
        tape: a segment's.
        coefficients: of each size, by monomial.

    Returns:
        Coefficients by entry, `VARYING`, layer and monomial. What stands at a traced layer is there
        once for each that this one stands for; what stands before the first of them, once.
    """
    if not tape:
        return np.zeros((0, len(VARYING), 1, coefficients.shape[1]), np.int64)
    whats, _, sizes, parts, bys = zip(*tape, strict=True)
    layers = [by + 1 if what == FETCH_ALL else 0 for what, by in zip(whats, bys, strict=True)]
    change = np.zeros((len(tape), len(VARYING), max(layers) + 1, coefficients.shape[1]), np.int64)
    signs = np.array([_SIGNS[what] for what in whats])
    change[range(len(tape)), parts, layers] = signs[:, None] * coefficients[list(sizes)]
    return change.cumsum(axis=0)


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
        base = values["base"]
        return cls(
            **{
                **values,
                "positions": tuple(values["positions"]),
                "base": Base(**{**base, "holes": tuple(base["holes"])}),
                "adapters": tuple(map(tuple, values["adapters"])),
                "segments": {n: Segment(**part) for n, part in values["segments"].items()},
            }
        )

    @cached_property
    def monomials(self) -> Sequence[str]:
        """Those in the sizes."""
        return sorted({monomial for size in self.sizes for monomial in size})

    @cached_property
    def coefficients(self) -> NDArray[np.int64]:
        """Of each size, by monomial."""
        return coefficients(self.sizes, self.monomials)

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The place of each segment among those of `ends`."""
        return {name: place for place, name in enumerate(self.levels)}

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """How much more is alive at the end of each segment than at its beginning (`levels`)."""
        return np.stack([levels[-1] for levels in self.levels.values()])

    @cached_property
    def births(self) -> NDArray[np.int64]:
        """How much more is alive after the highest births of all segments, one after another."""
        return np.concatenate([levels[:-1] for levels in self.levels.values()])

    @cached_property
    def births_of(self) -> Mapping[str, slice]:
        """Which of those are each segment's."""
        counts = [len(levels) - 1 for levels in self.levels.values()]
        ends = np.cumsum(counts).tolist()
        return {
            name: slice(end - count, end)
            for name, count, end in zip(self.levels, counts, ends, strict=True)
        }

    @cached_property
    def worked_out(self) -> dict[Hashable, Any]:
        """What `peaks` has worked out of it, and need not work out again."""
        return {}

    def scale(self, values: Values, *, one: Any = 1) -> list[Any]:
        """Return each monomial's value; ``one`` is as long as those of ``values`` are."""
        return [math.prod((values[s] for s in m), start=one) for m in self.monomials]

    @cached_property
    def levels(self) -> Mapping[str, NDArray[np.int64]]:
        """How much more is alive after the highest births of each segment than at its beginning
        (`alive`), and last how much it leaves; of all traced layers."""
        monomials = len(self.monomials)
        found = {}
        for name, segment in self.segments.items():
            shape = len(segment.highest) + 1, len(VARYING), len(self.adapters) + 1, monomials
            found[name] = np.zeros(shape, np.int64)
            if segment.tape:
                after = alive(segment.tape, self.coefficients)
                found[name][:, :, : after.shape[2]] = after[[*segment.highest, -1]]
        return found


def coefficients(sizes: Sequence[Polynomial], monomials: Sequence[str]) -> NDArray[np.int64]:
    """Return the coefficients of polynomials as a matrix, by monomial."""
    rows = [[size.get(monomial, 0) for monomial in monomials] for size in sizes]
    return np.array(rows, np.int64).reshape(len(sizes), len(monomials))


class Symbols:
    """A prime for each symbol.

    Args:
        dimensions: the model's own sizes, which must not hide a symbol's prime.
        longest: length that the traced sequence must not exceed; None where any will do.
        longer_than: length that the traced sequence must exceed.
    """

    def __init__(
        self, dimensions: Iterable[int], *, longest: int | None = None, longer_than: int = 0
    ) -> None:
        sizes = {abs(size) for size in dimensions if size}
        usable = [p for p in _primes() if not any(size % p == 0 for size in sizes)]
        top = min(longest or _LARGEST_PRIME, _LARGEST_PRIME)
        lengths = [p for p in usable if longer_than < p <= top]
        if not lengths:
            raise ValueError(f"no traceable length above {longer_than} and up to {top}")
        # Any prime does for batch and rank. A length has to stay on its side of the attention
        # window and within the positions that the model knows: beyond, its code goes another way.
        near = lengths[:_LENGTH_CHOICES] if longer_than else lengths[-_LENGTH_CHOICES:]
        # Large prime factors tell a sequence with one token more or less.
        self.s = max(near, key=lambda p: min(_largest_factor(p + step) for step in _NEIGHBOURS))
        # The largest ones: a product of dimensions is the less likely to have one as its factor.
        others = [p for p in reversed(usable) if p != self.s]
        self.b, self.r, self.c, self.p = others[:4]
        self._primes = {"b": self.b, "c": self.c, "p": self.p, "r": self.r, "s": self.s}
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
        lengths = (self.s, *(self.s + step for step in _NEIGHBOURS), self.c, self.p)
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
        for step in _NEIGHBOURS:
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
    largest, factor = 1, 2
    while factor * factor <= number:
        while number % factor == 0:
            number, largest = number // factor, factor
        factor += 1
    return max(largest, number)


@cache
def _primes() -> tuple[int, ...]:
    numbers = range(_SMALLEST_PRIME, _LARGEST_PRIME + 1)
    return tuple(number for number in numbers if _largest_factor(number) == number)


def mixed(packed: Profile, wide: Profile, *, quantized: Collection[int]) -> Profile:
    """Return the profile of a model of whose layers some are in 4 bits.

    Args:
        packed: of the model with all layers in 4 bits.
        wide: of the model with none.
        quantized: the layers that are.
    """
    shift, share = len(packed.adapters), len(quantized) / len(packed.positions)

    def between(low: int, high: int) -> int:
        """Return a size of the base in between: layers are alike, and all else is in both."""
        return round(share * low + (1 - share) * high)

    pairs = enumerate(zip(packed.positions, wide.positions, strict=True))
    segments = dict(packed.segments)
    for name, segment in wide.segments.items():
        kind, _, position = name.partition(" ")
        tape = [
            (
                what,
                key,
                size + len(packed.sizes),
                part,
                by + shift * (what == FETCH_ALL and by >= 0),
            )
            for what, key, size, part, by in segment.tape
        ]
        if position:
            segments[f"{kind} {int(position) + shift}"] = replace(segment, tape=tape)
        else:
            # What happens once: beside the packed model's, what each layer of the other kind adds.
            further = [entry for entry in tape if entry[0] == FETCH_ALL and entry[-1] >= 0]
            segments[name] = replace(segments[name], tape=[*segments[name].tape, *further])
    return replace(
        packed,
        positions=tuple(
            in_packed if layer in quantized else in_wide + shift
            for layer, (in_packed, in_wide) in pairs
        ),
        base=Base(
            allocated_bytes=between(packed.base.allocated_bytes, wide.base.allocated_bytes),
            requested_bytes=between(packed.base.requested_bytes, wide.base.requested_bytes),
            reserved_bytes=between(packed.base.reserved_bytes, wide.base.reserved_bytes),
            holes=packed.base.holes,
        ),
        adapters=(*packed.adapters, *wide.adapters),
        segments=segments,
        sizes=(*packed.sizes, *wide.sizes),
    )


_WIDE_BYTES = 2
"""Of an element of the base that is not packed."""
_ADAPTER_BYTES = 4
"""Of one of the adapters, which are gathered as they are stored."""
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
    """Return a profile whose base is what one of several GPUs holds of it, and whose segments
    gather what they need.

    Raises:
        InputError: the model's layers are not known.
    """
    whole, shapes = parameters(model), linear_shapes(model)
    if whole is None or shapes is None:
        raise InputError(
            f"model '{model.name}': the layers of model type '{model.model_type}' are not known, "
            "so what each GPU holds of them is not predicted"
        )
    linears = sum(rows * columns for rows, columns in shapes.values())
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
    held = round(movable / config.data_parallel + constants) + head * (not has_own_head)
    # What is received is of a stream of its own, whose memory serves nothing else. Where the
    # embedding was received lies a layer when the head is, which takes as much anew.
    received = max(head, LAYERS_GATHERED * layer) + head * has_own_head
    base = Base(held, held, held + received, holes=())
    gathered = _at_the_ends(config, layer, head, has_own_head=has_own_head)
    sizes, segments = list(profile.sizes), {}
    for name, segment in profile.segments.items():
        each = gathered.get(name, _Gathered(LAYERS_GATHERED * layer, 0, layer))
        segments[name] = _gathering(segment, each, size=len(sizes))
        sizes += [{"": each.at_first}, {"": each.throughout - each.copied}, {"": each.copied}]
    return replace(profile, base=base, segments=segments, sizes=sizes)


def _at_the_ends(
    config: TrialConfig, layer: int, head: int, *, has_own_head: bool
) -> dict[str, _Gathered]:
    """Return what is gathered for the embedding and for the loss, of so many bytes each."""
    if not has_own_head:
        # The head is the embedding: it is whole from there on, which counts as held throughout.
        gathered = _Gathered(head, 0, 0), _Gathered(layer, 0, 0), _Gathered(0, 0, 0)
    elif not config.kernels_kind.fuses_loss:
        # What it was received in is kept until something else is.
        loss, back = _Gathered(2 * head, 0, head), _Gathered(head, 0, head)
        gathered = _Gathered(head, 2 * head, head), loss, back
    else:
        # What the last layer was received in is still there. A fused loss has its gradient by the
        # backward pass, and the head is given up with it.
        loss = _Gathered(layer + head, layer + 2 * head, head)
        gathered = _Gathered(head, 2 * head, head), loss, _Gathered(0, 0, 0)
    return dict(zip(("embed", "head", "head_backward"), gathered, strict=True))


def _gathering(segment: Segment, gathered: _Gathered, *, size: int) -> Segment:
    """Return a segment that gathers; ``size`` is the index of what is there at first."""
    first, beside, copied = range(size, size + 3)
    before = [
        (RECEIVE, "", first, ACTIVATIONS, 0),
        (RELEASE, "", first, ACTIVATIONS, 0),
        (RECEIVE, "", beside, ACTIVATIONS, 0),
        (BIRTH, "gathered", copied, ACTIVATIONS, 0),
    ]
    after = [(DEATH, "gathered", copied, ACTIVATIONS, 0), (RELEASE, "", beside, ACTIVATIONS, 0)]
    highest = [at + len(before) for at in segment.highest or (-1,)]
    return Segment([*before, *segment.tape, *after], highest=[*highest, 0])
