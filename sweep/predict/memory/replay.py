"""A training step at real sizes, replayed through a simulated allocator: what is reserved, and what
is wasted.

Both depend on the order of all births and deaths, so that the segments' tapes are gone through one
by one, which takes milliseconds; equal steps are replayed once, many on all processors.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, get_args

import numpy as np

from qlora_sweep.search_spaces.config import AdapterDtype, TrialConfig
from qlora_sweep.search_spaces.kinds import COMPUTE_DTYPES, OPTIMIZERS, OptimizerName
from qlora_sweep.sweep.predict.memory.allocator import (
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    CachingAllocator,
    Event,
    OutOfSegments,
    grains,
)
from qlora_sweep.sweep.predict.memory.profile_store import OnProgress, ignore_progress
from qlora_sweep.sweep.predict.memory.profiles import (
    Fetched,
    Profile,
    Segment,
    Values,
)
from qlora_sweep.sweep.processes import process_pool

WORTH_PROCESSES = 300
"""Steps whose replays take longer than starting processes for them: one or two seconds."""
_AT_ONCE = 50
"""Steps that a process is given at a time: so few that all processes end together."""
_HEAVY_STATES = 0.05
"""Share of what is allocated, above which it matters where the optimizer's states lie."""
_FP32_BYTES = 4
_ADAPTER_BYTES = {name: COMPUTE_DTYPES[name].bits // 8 for name in get_args(AdapterDtype)}
"""Bytes of an element of an adapter, and of its gradient."""

_MIN_8BIT_ELEMENTS = 4096
"""bitsandbytes keeps the states of smaller tensors in fp32 (``min_8bit_size``)."""
_MIN_PAGED_ELEMENTS = 100_000
"""bitsandbytes keeps smaller states on the GPU; larger ones are in memory no counter sees."""
_BLOCK_ELEMENTS = 256
"""Elements that share a scale."""


class Visit(NamedTuple):
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
    benchmark_bytes: int = 0
    """What the compiler clears between the runs of a kernel that it tries out."""
    checkpoint_host_bytes: int = 0
    """What of recomputed layers waits in the host's memory."""
    is_unseen: bool = False
    """Whether it runs layers in a way in which no peak was measured."""

    @property
    def first_step_bytes(self) -> int:
        """How much more there is when the first backward pass tries out its kernels than in later
        steps, which have the optimizer's states."""
        if not self.config.compile:
            return 0
        return max(0, self.benchmark_bytes - sum(self.states))

    @property
    def profile(self) -> Profile:
        """The last layer's: where it ends, the loss begins. What does not vary is alike in both."""
        return self.profiles[self.flags[-1]]

    @property
    def held_gradients(self) -> int:
        """How many times the adapters' gradients are there throughout.

        Once as those of earlier micro-batches; once as the buckets in which several GPUs send
        each other theirs, which are never given back. Where GPUs accumulate, each keeps its own
        beside the buckets until the last micro-batch.
        """
        if self.config.is_sharded:
            # A GPU's share of them, and all of them as long as nothing is sent.
            return 1 + self._shares * (self.config.accumulation_steps > 1)
        return (self.config.accumulation_steps > 1) + (self.config.data_parallel > 1)

    @property
    def _shares(self) -> int:
        """Into how many parts every trained tensor is cut."""
        if not self.config.is_sharded:
            return 1
        return self.config.data_parallel

    def visits(self) -> Iterator[Visit]:
        """Yield the step's segments in order."""
        last = self.flags[-1]
        layers = list(enumerate(zip(self.profile.positions, self.flags, strict=True)))
        yield Visit("embed", self.flags[0])
        for layer, (at, flag) in layers:
            yield Visit(f"forward {at}", flag, layer)
        yield Visit("head", last)
        yield Visit("head_backward", last)
        for layer, (at, flag) in reversed(layers):
            yield Visit(f"backward {at}", flag, layer)

    def segment(self, visit: Visit) -> Segment:
        """Return the traced segment of a visit."""
        return self.profiles[visit.is_checkpointed].segments[visit.name]

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
        left = 0
        born = 0
        for segment in map(self.segment, self.visits()):
            left += len(segment.leaves)
            born = max(born, segment.births)
        return SMALL_BYTES * (left + born)

    @property
    def adapters(self) -> Sequence[int]:
        """Bytes of each trained tensor, in the order they are attached, as far as it is this
        GPU's."""
        return self._held[0]

    @property
    def states(self) -> Sequence[int]:
        """Bytes of each of the optimizer's tensors that are on the GPU."""
        return self._held[1]

    @cached_property
    def _held(self) -> tuple[Sequence[int], Sequence[int]]:
        config = self.config
        profile = self.profile
        of_layers = tuple(map(profile.adapters.__getitem__, profile.positions))
        return _held_sizes(
            of_layers, config.lora_rank, config.adapter_dtype, config.optimizer, self._shares
        )


@lru_cache(maxsize=1024)
def _held_sizes(
    of_layers: Sequence[Sequence[int]],
    rank: int,
    dtype: AdapterDtype,
    optimizer: OptimizerName,
    shares: int,
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the bytes of each adapter's tensor, and of each of the optimizer's on the GPU."""
    adapters: list[int] = []
    states: list[int] = []
    states_of: dict[int, tuple[int, ...]] = {}
    for elements_per_rank in itertools.chain.from_iterable(of_layers):
        elements = -(-elements_per_rank * rank // shares)
        adapters.append(elements * _ADAPTER_BYTES[dtype])
        if elements not in states_of:
            states_of[elements] = state_bytes(optimizer, dtype, elements)
        states += states_of[elements]
    return tuple(adapters), tuple(states)


def state_bytes(optimizer: OptimizerName, dtype: AdapterDtype, elements: int) -> tuple[int, ...]:
    """Return the bytes of each tensor that is kept on the GPU for a trained one."""
    kind = OPTIMIZERS[optimizer]
    moment = elements * _ADAPTER_BYTES[dtype]
    tensors: list[int] = []
    scales: list[int] = []
    if kind.counts_on_gpu:
        tensors.append(_FP32_BYTES)
    if kind.has_8_bit_moments:
        moment = elements * _FP32_BYTES
        if elements >= _MIN_8BIT_ELEMENTS:
            moment = elements
            scales = [math.ceil(elements / _BLOCK_ELEMENTS) * _FP32_BYTES] * kind.moments
    if kind.unpaged is None or elements < _MIN_PAGED_ELEMENTS:
        tensors += [moment] * kind.moments
    return tuple(tensors + scales)


@dataclass(frozen=True)
class _SizedTape:
    """A tape at real sizes; small requests, in segments of their own, are only summed up.

    Each is a MiB at most, in a pool that large ones never touch, so that all they change is how far
    that pool grows. Every tensor that is born in a tape has a place, counted from zero.
    """

    stretches: list[tuple[list[Event], Fetched | None]]
    """As in `Segment.stretches`."""
    leaves: list[tuple[str, int, int, int]]
    """Path, place, the grains of what is large, and the bytes of what is small."""
    places: int
    small_peak_bytes: int
    """How high small requests rise above where the tape begins."""


class _Replay:
    """Replays tapes one after another, a layer's as often as there are such layers.

    What outlives its segment is kept by its path and the layer that left it, as `tapes` names it:
    a later segment finds it by how many layers lie between, whichever layers were traced: its
    address and grains, or 0 and the bytes of what is small.

    Args:
        allocator: what is asked.
        is_large: whether it is asked for what is large, too.
    """

    def __init__(self, allocator: CachingAllocator, *, is_large: bool = True) -> None:
        self.allocator = allocator
        self._is_large = is_large
        self.small_room_bytes = self._small_bytes = 0
        self._left: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)

    def hold(self, sizes: Collection[int]) -> None:
        """Allocate what stays."""
        large = _large(sizes)
        if self._is_large:
            self.allocator.run([(grains(size), 0) for size in large], [0])
        self._small_bytes += sum(sizes) - sum(large)
        self._make_small_room(0)

    def play(self, tape: _SizedTape, *, layer: int) -> None:
        """Replay a segment of a layer of the whole model, or of the step as a whole."""
        self._make_small_room(tape.small_peak_bytes)
        addresses = [0] * tape.places
        events: list[Event] = []
        for before, fetched in tape.stretches:
            if self._is_large:
                events += before
            if fetched is not None:
                self._fetch(*fetched, layer, events, addresses)
        if events:
            self.allocator.run(events, addresses)
        for path, place, wanted, small_bytes in tape.leaves:
            address = addresses[place]
            self._left[path][layer] = address, wanted if address else small_bytes
            self._small_bytes += small_bytes

    def end_step(self) -> None:
        """Free what was left and never fetched: the gradients."""
        events: list[Event] = []
        addresses: list[int] = []
        for path in list(self._left):
            self._fetch(path, None, 0, events, addresses)
        self.allocator.run(events, addresses)

    def _fetch(
        self, path: str, back: int | None, layer: int, events: list[Event], addresses: list[int]
    ) -> None:
        """Add that it is freed what was left so many layers back, or in all."""
        left = self._left[path]
        layers = list(left)
        if back is not None:
            layers = [layer - back]
        for of in layers:
            address, size = left.pop(of, (0, 0))
            if address:
                events.append((-size, len(addresses)))
                addresses.append(address)
            else:
                self._small_bytes -= size

    def _make_small_room(self, peak_bytes: int) -> None:
        missing = self._small_bytes + peak_bytes - self.small_room_bytes
        if missing > 0:
            length = -(-missing // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
            self.allocator.take_segment(length)
            self.small_room_bytes += length


def base_allocator(step: Step, *, limit_bytes: int | None = None) -> CachingAllocator:
    """Return the allocator as the frozen base and the libraries' workspaces leave it."""
    base = step.profile.base
    return CachingAllocator(
        allocated_bytes=base.allocated_bytes + step.workspace_bytes,
        reserved_bytes=base.reserved_bytes + step.workspace_bytes,
        holes=base.holes,
        limit_bytes=limit_bytes,
    )


class _SizedStep:
    """A step, and all that is made of it once, however often it is replayed."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.visits = list(_played(step))
        self.sizes = {flag: _sizes(profile, step.values) for flag, profile in step.profiles.items()}
        self._tapes: dict[tuple[str, bool], _SizedTape] = {}

    def _tape(self, name: str, flag: bool) -> _SizedTape:
        if (name, flag) not in self._tapes:
            segment = self.step.profiles[flag].segments[name]
            self._tapes[name, flag] = _sized(segment, *self.sizes[flag])
        return self._tapes[name, flag]

    @cached_property
    def is_heavy(self) -> bool:
        """Whether it makes a difference that the optimizer's states are made at the end of the
        first step, in what it has left free; else they may as well be there from the start."""
        replay = _Replay(base_allocator(self.step))
        replay.hold(self.step.adapters)
        return sum(self.step.states) > _HEAVY_STATES * replay.allocator.allocated_bytes

    def replayed(
        self, *, is_twice: bool, limit_bytes: int | None = None, is_large: bool = True
    ) -> _Replay:
        """Replay a step that finds the optimizer's states where the first one's end has put them,
        or where they have been from the start.

        Under a limit it is the second step that must do with blocks that the first has cut up.

        Args:
            is_twice: whether there is a first step.
            limit_bytes: the most that may be reserved.
            is_large: whether what is large is replayed, too.

        Raises:
            OutOfSegments: it passes the limit.
        """
        allocator = base_allocator(self.step, limit_bytes=limit_bytes)
        replay = _Replay(allocator, is_large=is_large)
        replay.hold(self.step.adapters)
        if is_twice:
            self.play(replay)
            replay.end_step()
        replay.hold(self.step.states)
        self.play(replay)
        return replay

    def play(self, replay: _Replay) -> None:
        """Replay the step."""
        for _ in range(self.step.held_gradients):
            replay.hold(self.step.adapters)
        for visit in self.visits:
            replay.play(self._tape(*visit.key), layer=visit.layer)

    def alike(self) -> Hashable:
        """Return what decides over what the large pool comes to."""
        return (
            _structure(self.step),
            len(self.visits),
            self.is_heavy,
            tuple(_large(self.step.adapters)),
            tuple(_large(self.step.states)),
            tuple(tuple(requests) for requests, _ in self.sizes.values()),
        )


def _played(step: Step) -> Iterator[Visit]:
    """Yield the segments up to where nothing new can come: the same layer again, with less alive
    than before it, and free blocks that served the last one."""
    seen = set()
    for visit in step.visits():
        if visit.key in seen and visit.name[0] == "b" and _keeps_bytes(step, visit) <= 0:
            return
        seen.add(visit.key)
        yield visit


def _keeps_bytes(step: Step, visit: Visit) -> int:
    """Return what a layer's segment leaves; negative where it frees more."""
    profile = step.profiles[visit.is_checkpointed]
    kept = profile.levels[visit.name][-1].sum(axis=(0, 1))
    return int(kept @ np.array(profile.scale(step.values), object))


def runs_under(step: Step, *, limit_bytes: int) -> bool:
    """Return whether a step runs where no more than so much may be reserved; some milliseconds."""
    try:
        _SizedStep(step).replayed(is_twice=True, limit_bytes=limit_bytes)
    except OutOfSegments:
        return False
    return True


class Uncapped(NamedTuple):
    """What a step comes to where nothing limits what may be reserved."""

    reserved_bytes: int
    """The most that the allocator holds."""
    wasted_bytes: int
    """By how much unsplit remainders of blocks raise the peak."""
    least_bytes: int
    """No more than what is asked for at once: it runs under no limit below."""
    twice_bytes: int | None
    """The most that the allocator holds where a first step makes the optimizer's states: it runs
    under every limit from there on. None where that was not replayed."""


class _Large:
    """What the large pool comes to in steps alike; without a limit, pools are each on their own.

    Args:
        sized: the first of them.

    Attributes:
        small_room_bytes: what the small pool of that one holds at most.
        reserved_bytes: what the large pool holds at most.
        requested_bytes: the most that is asked for at once.
        wasted_bytes: by how much unsplit remainders raise the peak.
    """

    def __init__(self, sized: _SizedStep) -> None:
        self._replay = sized.replayed(is_twice=sized.is_heavy)
        allocator = self._replay.allocator
        self.small_room_bytes = self._replay.small_room_bytes
        self.reserved_bytes = self._reserved_bytes
        self.requested_bytes = allocator.peak_requested_bytes
        self.wasted_bytes = allocator.peak_allocated_bytes - self.requested_bytes
        self._twice_bytes: int | None = None

    @property
    def _reserved_bytes(self) -> int:
        return self._replay.allocator.peak_reserved_bytes - self._replay.small_room_bytes

    def play_twice(self, sized: _SizedStep) -> int:
        """Return the most that is held over a first step and a second one."""
        if self._twice_bytes is None:
            if _large(sized.step.states):
                self._replay = sized.replayed(is_twice=True)
            else:
                # What there is was a first step: nothing that is large would come before it.
                self._replay.end_step()
                sized.play(self._replay)
            self._twice_bytes = self._reserved_bytes
        return self._twice_bytes


def replay_uncapped(
    step: Step, *, is_near: bool = False, known: dict[Hashable, _Large] | None = None
) -> Uncapped:
    """Return what a step comes to without a limit; some milliseconds.

    Args:
        step: what is replayed.
        is_near: whether limits are going to be asked about, so that `Uncapped.twice_bytes` pays.
        known: what large pools came to; what is new is added.
    """
    known = {} if known is None else known
    sized = _SizedStep(step)
    key = sized.alike()
    large = known.get(key)
    if large is None:
        large = known[key] = _Large(sized)
        own_bytes = large.small_room_bytes
    else:
        own_bytes = sized.replayed(is_twice=sized.is_heavy, is_large=False).small_room_bytes
    twice_bytes = None
    if sized.is_heavy:
        twice_bytes = large.reserved_bytes + own_bytes
    elif is_near:
        room_bytes = own_bytes
        if step.held_gradients:
            # Gradients that are held beside others stay, so that a first step leaves less room.
            room_bytes = sized.replayed(is_twice=True, is_large=False).small_room_bytes
        twice_bytes = large.play_twice(sized) + room_bytes
    held_bytes = 0
    for sizes in (step.adapters, step.states):
        held_bytes += sum(sizes) - sum(_large(sizes))
    return Uncapped(
        large.reserved_bytes + own_bytes,
        large.wasted_bytes,
        large.requested_bytes + held_bytes,
        twice_bytes,
    )


def _sizes(profile: Profile, values: Values) -> tuple[list[int], list[int]]:
    """Return the grains of large requests and the bytes of small ones, by the tapes' index."""
    sizes = (profile.coefficients @ np.array(profile.scale(values), object)).tolist()
    requests: list[int] = []
    small: list[int] = []
    for size in sizes:
        is_large = size > SMALL_BYTES
        requests.append(grains(size) if is_large else 0)
        small.append(0 if is_large else size)
    return requests, small


def _large(sizes: Iterable[int]) -> list[int]:
    """Return the sizes that are asked of the pool for large ones."""
    return [size for size in sizes if size > SMALL_BYTES]


def _sized(segment: Segment, requests: Sequence[int], small: Sequence[int]) -> _SizedTape:
    stretches: list[tuple[list[Event], Fetched | None]] = []
    small_bytes = 0
    small_peak_bytes = 0
    for moves, fetched in segment.stretches:
        events: list[Event] = []
        for sign, size, place in moves:
            if requests[size]:
                events.append((sign * requests[size], place))
            small_bytes += sign * small[size]
            small_peak_bytes = max(small_peak_bytes, small_bytes)
        stretches.append((events, fetched))
    leaves = [(path, place, requests[size], small[size]) for path, place, size in segment.leaves]
    return _SizedTape(stretches, leaves, segment.births, small_peak_bytes)


def replay_all(
    steps: Sequence[Step],
    *,
    near: Collection[int] = (),
    on_progress: OnProgress = ignore_progress,
) -> Iterator[tuple[Sequence[int], Uncapped]]:
    """Yield what steps come to without a limit as soon as they are replayed, with the rows of all
    that come to the same.

    Args:
        steps: of any structures, and of any sizes.
        near: which of them limits are going to be asked about.
        on_progress: told how many different ones have been replayed, of how many.
    """
    alike: dict[tuple[tuple[int, ...], Hashable], list[int]] = defaultdict(list)
    for row, step in enumerate(steps):
        alike[_alike(step)].append(row)

    # Neighbours are of one structure, so that a process is sent few profiles at a time, and of as
    # many tokens, so that it finds what they ask for alike.
    def order(group: tuple[tuple[tuple[int, ...], Hashable], list[int]]) -> tuple[Any, int]:
        (profiles, _), of = group
        return profiles, steps[of[0]].config.tokens_per_micro_batch

    rows = [of for _, of in sorted(alike.items(), key=order)]
    is_near = set(near)
    done = 0
    on_progress(done, len(rows))
    for found in _in_parts([(steps[of[0]], not is_near.isdisjoint(of)) for of in rows]):
        yield from zip(rows[done : done + len(found)], found, strict=True)
        done += len(found)
        on_progress(done, len(rows))


def _structure(step: Step) -> tuple[tuple[int, ...], tuple[bool, ...], int, int]:
    """Return what decides over a replay beside sizes; its profiles come first."""
    ids = tuple(map(id, step.profiles.values()))
    return ids, step.flags, step.workspace_bytes, step.held_gradients


def _alike(step: Step) -> tuple[tuple[int, ...], Hashable]:
    """Return what decides over a replay."""
    config = step.config
    structure = _structure(step)
    gpus = config.is_sharded and config.data_parallel
    sizes = tuple(step.values.items())
    return structure[0], (structure, sizes, config.adapter_dtype, config.optimizer, gpus)


def _in_parts(steps: Sequence[tuple[Step, bool]]) -> Iterator[list[Uncapped]]:
    """Yield replays in order, some at a time."""
    chunks = [steps[start : start + _AT_ONCE] for start in range(0, len(steps), _AT_ONCE)]
    processors = len(os.sched_getaffinity(0))
    done = 0
    if len(steps) >= WORTH_PROCESSES and processors > 1:
        # Replays leave no garbage, and it would be looked for all the time.
        with (
            contextlib.suppress(BrokenProcessPool),
            process_pool(processors, settle_in=gc.disable) as pool,
        ):
            for results in pool.map(_replay, chunks):
                done += 1
                yield results
    # What a process that died has left is done here.
    yield from map(_replay, chunks[done:])


def _replay(steps: Sequence[tuple[Step, bool]]) -> list[Uncapped]:
    known: dict[Hashable, _Large] = {}
    return [replay_uncapped(step, is_near=is_near, known=known) for step, is_near in steps]
