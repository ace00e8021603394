"""Owns a step replayed through a simulated allocator: what is reserved, and what is wasted.

Both depend on the order of all births and deaths, so that the segments' tapes are gone through one
by one, which takes milliseconds. Knows nothing of where tapes come from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sweep.predict.memory.allocator import (
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    CachingAllocator,
    Event,
    OutOfSegments,
    grains,
)
from sweep.predict.memory.polynomials import evaluate
from sweep.predict.memory.profiles import Segment
from sweep.predict.memory.step import Step, Visit

_HEAVY_STATES = 0.05
"""Share of what is allocated, above which it matters where the optimizer's states lie."""


Fetched = tuple[str, int | None] | None
"""As in `Stretch`."""


@dataclass(frozen=True)
class SizedTape:
    """A tape at real sizes; small requests, in segments of their own, are only summed up.

    Each is a MiB at most, in a pool that large ones never touch, so that all they change is how far
    that pool grows.
    """

    stretches: list[tuple[list[Event], Fetched]]
    """What happens, and what is fetched then."""
    leaves: list[tuple[str, int, int]]
    """Path, place, and the bytes of what is small, which has nothing in its place."""
    places: int
    small_peak_bytes: int
    """How high small requests rise above where the tape begins."""


class Sizes:
    """The sizes of a profile's tapes.

    Args:
        sizes: bytes, by the tapes' index.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._small = [size if size <= SMALL_BYTES else 0 for size in sizes]
        # A death, whose birth has the index -1, requests nothing.
        self._requests = [grains(size) if size > SMALL_BYTES else 0 for size in sizes] + [0]
        # At -1 - index is what a death gives back.
        self._changes = self._small + [-size for size in reversed(self._small)]

    def tape(self, segment: Segment) -> SizedTape:
        """Return a segment's tape at these sizes."""
        requests, small = self._requests, self._small
        parts = segment.stretches
        stretches = [
            ([(requests[birth], at) for birth, of, at in part.births if requests[of]], part.fetched)
            for part in parts
        ]
        leaves = [(path, at, small[of]) for part in parts for path, of, at in part.leaves]
        return SizedTape(stretches, leaves, segment.births, self._rise(segment))

    def _rise(self, segment: Segment) -> int:
        changes = self._changes
        moves = [
            changes[of if birth >= 0 else -1 - of]
            for part in segment.stretches
            for birth, of, _ in part.births
        ]
        return max(accumulate(moves, initial=0))


class Replay:
    """Replays tapes one after another, a layer's as often as there are such layers.

    What outlives its segment is kept by its path and the layer that left it, as `tapes` names it:
    a later segment finds it by how many layers lie between, whichever layers were traced. Of what
    is small its bytes are kept, negative, in place of an address.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._small_bytes = self._small_room_bytes = 0
        self._left: dict[str, dict[int, int]] = defaultdict(dict)

    def hold(self, sizes: Collection[int]) -> None:
        """Allocate what stays."""
        large = [size for size in sizes if size > SMALL_BYTES]
        self._allocator.run([(grains(size), 0) for size in large], [0])
        self._small_bytes += sum(sizes) - sum(large)
        self._make_small_room(0)

    def play(self, tape: SizedTape, *, layer: int) -> None:
        """Replay a segment of a layer of the whole model, or of the step as a whole."""
        self._make_small_room(tape.small_peak_bytes)
        addresses = [0] * tape.places
        events: list[Event] = []
        for before, fetched in tape.stretches:
            events += before
            if fetched is not None:
                self._fetch(*fetched, layer, events, addresses)
        self._allocator.run(events, addresses)
        for path, place, small_bytes in tape.leaves:
            self._left[path][layer] = addresses[place] or -small_bytes
            self._small_bytes += small_bytes

    def end_step(self) -> None:
        """Free what was left and never fetched: the gradients."""
        events: list[Event] = []
        addresses: list[int] = []
        for path in list(self._left):
            self._fetch(path, None, 0, events, addresses)
        self._allocator.run(events, addresses)

    def _fetch(
        self, path: str, back: int | None, layer: int, events: list[Event], addresses: list[int]
    ) -> None:
        """Add that it is freed what was left so many layers back, or in all."""
        left = self._left[path]
        layers = list(left) if back is None else [layer - back]
        for address in [left.pop(layer, 0) for layer in layers]:
            if address > 0:
                events.append((0, len(addresses)))
                addresses.append(address)
            else:
                self._small_bytes += address

    def _make_small_room(self, peak_bytes: int) -> None:
        missing = self._small_bytes + peak_bytes - self._small_room_bytes
        if missing > 0:
            length = -(-missing // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
            self._allocator.take_segment(length)
            self._small_room_bytes += length


def base_allocator(step: Step, *, limit_bytes: int | None = None) -> CachingAllocator:
    """Return the allocator as the frozen base and the libraries' workspaces leave it."""
    base = step.profile.base
    return CachingAllocator(
        allocated_bytes=base.allocated_bytes + step.workspace_bytes,
        reserved_bytes=base.reserved_bytes + step.workspace_bytes,
        holes=base.holes,
        limit_bytes=limit_bytes,
    )


def runs_under(step: Step, *, limit_bytes: int) -> bool:
    """Return whether a step runs where no more than so much may be reserved; some milliseconds."""
    try:
        replayed(step, limit_bytes=limit_bytes)
    except OutOfSegments:
        return False
    return True


@dataclass(frozen=True)
class Uncapped:
    """What a step comes to where nothing limits what may be reserved."""

    reserved_bytes: int
    """The most that the allocator holds."""
    wasted_bytes: int
    """By how much unsplit remainders of blocks raise the peak."""


def replay_uncapped(step: Step) -> Uncapped:
    """Return what a step comes to without a limit; some milliseconds."""
    allocator = replayed(step)
    wasted = allocator.peak_allocated_bytes - allocator.peak_requested_bytes
    return Uncapped(allocator.peak_reserved_bytes, wasted)


def replayed(step: Step, *, limit_bytes: int | None = None) -> CachingAllocator:
    """Return the allocator as a step leaves it.

    Raises:
        OutOfSegments: it passes the limit.
    """
    allocator = base_allocator(step, limit_bytes=limit_bytes)
    replay, tapes = Replay(allocator), _Tapes(step)
    replay.hold(step.adapters)
    # A step that is not the first finds the states where the first one's end has put them. Where
    # they are small it makes no difference to assume that they were there from the start.
    is_heavy = sum(step.states) > _HEAVY_STATES * allocator.allocated_bytes
    if is_heavy or limit_bytes is not None:
        # They are made at the end of the first step, in what it has left free; and under a limit it
        # is the second step that must do with blocks that the first one has cut up.
        _play(step, tapes, replay)
    replay.hold(step.states)
    _play(step, tapes, replay)
    return allocator


class _Tapes:
    """The tapes of a step's segments at real sizes."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._sizes: dict[bool, Sizes] = {}
        self._known: dict[tuple[str, bool], SizedTape] = {}

    def of(self, visit: Visit) -> SizedTape:
        """Return the tape of a segment."""
        key = visit.key
        if key not in self._known:
            sizes = self._sizes_of(visit.is_checkpointed)
            self._known[key] = sizes.tape(self._step.segment(visit))
        return self._known[key]

    def _sizes_of(self, is_checkpointed: bool) -> Sizes:
        if is_checkpointed not in self._sizes:
            sizes = self._step.profiles[is_checkpointed].sizes
            values = self._step.values
            self._sizes[is_checkpointed] = Sizes([evaluate(size, values) for size in sizes])
        return self._sizes[is_checkpointed]


def _play(step: Step, tapes: _Tapes, replay: Replay) -> None:
    for _ in range(step.held_gradients):
        replay.hold(step.adapters)
    seen: set[tuple[str, bool]] = set()
    for visit in step.visits():
        is_again = visit.key in seen
        if is_again and visit.moment == "backward" and step.layer_keeps_bytes(visit) <= 0:
            # The same layer again, with less alive than before it, and free blocks that served the
            # last one: nothing new can come.
            break
        seen.add(visit.key)
        replay.play(tapes.of(visit), layer=visit.layer)
    replay.end_step()
