"""Owns a step replayed through a simulated allocator: what is reserved, and what is wasted.

Both depend on the order of all births and deaths, so that the segments' tapes are gone through one
by one, which takes milliseconds. Knows nothing of where tapes come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sweep.predict.memory.allocator import (
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    CachingAllocator,
    OutOfSegments,
)
from sweep.predict.memory.polynomials import evaluate
from sweep.predict.memory.profiles import BIRTH, DEATH, FETCH, LEAVE, Entry
from sweep.predict.memory.step import Step, Visit

_HEAVY_STATES = 0.05
"""Share of what is allocated, above which it matters where the optimizer's states lie."""


@dataclass(frozen=True)
class SizedTape:
    """A tape at real sizes; small requests, in segments of their own, are only summed up.

    Each is a MiB at most, in a pool that large ones never touch, so that all they change is how far
    that pool grows.
    """

    entries: list[Entry]
    """With bytes for the index of a size; negative for what is small and outlives the tape."""
    small_peak_bytes: int
    """How high small requests rise above where the tape begins."""


def sized(tape: Sequence[Entry], sizes: Sequence[int]) -> SizedTape:
    """Return a tape at real sizes, given in bytes by the tape's index."""
    entries: list[Entry] = []
    small: dict[int | str, int] = {}
    rise = peak = 0
    for what, key, value in tape:
        is_birth = what in (BIRTH, LEAVE)
        size = sizes[value] if is_birth else 0
        if size > SMALL_BYTES:
            entries.append((what, key, size))
        elif is_birth:
            small[key] = size
            rise += size
            peak = max(peak, rise)
            if what == LEAVE:
                entries.append((LEAVE, key, -size))
        elif what == DEATH and key in small:
            rise -= small.pop(key)
        else:
            entries.append((what, key, value))
    return SizedTape(entries, peak)


class Replay:
    """Replays tapes one after another, a layer's as often as there are such layers.

    What outlives its segment is kept by its path and the layer that left it, as `tapes` names it:
    a later segment finds it by how many layers lie between, whichever layers were traced.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._small_bytes = self._small_room_bytes = 0
        self._left: dict[int | str, dict[int, int]] = {}

    def hold(self, sizes: Iterable[int]) -> None:
        """Allocate what stays."""
        for size in sizes:
            self._allocate(size if size > SMALL_BYTES else -size)
        self._make_small_room(0)

    def play(self, tape: SizedTape, *, layer: int) -> None:
        """Replay a segment of a layer of the whole model, or of the step as a whole."""
        self._make_small_room(tape.small_peak_bytes)
        temporaries: dict[int | str, int] = {}
        allocate, free = self._allocator.allocate, self._allocator.free
        for what, key, value in tape.entries:
            if what == BIRTH:
                temporaries[key] = allocate(value)
            elif what == DEATH:
                free(temporaries.pop(key))
            elif what == LEAVE:
                self._left.setdefault(key, {})[layer] = self._allocate(value)
            elif what == FETCH:
                self._free(self._left.get(key, {}).pop(layer - value, 0))
            else:
                for address in self._left.pop(key, {}).values():
                    self._free(address)

    def end_step(self) -> None:
        """Free what was left and never fetched: the gradients."""
        for addresses in self._left.values():
            for address in addresses.values():
                self._free(address)
        self._left.clear()

    def _allocate(self, size: int) -> int:
        """Return the block's address; for a small request, which comes negative, itself."""
        if size > 0:
            return self._allocator.allocate(size)
        self._small_bytes -= size
        return size

    def _free(self, address: int) -> None:
        if address > 0:
            self._allocator.free(address)
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
        self._sizes: dict[bool, list[int]] = {}
        self._known: dict[tuple[str, bool], SizedTape] = {}

    def of(self, visit: Visit) -> SizedTape:
        """Return the tape of a segment."""
        if visit.key not in self._known:
            sizes = self._sizes_of(visit.is_checkpointed)
            self._known[visit.key] = sized(self._step.segment(visit).tape, sizes)
        return self._known[visit.key]

    def _sizes_of(self, is_checkpointed: bool) -> list[int]:
        if is_checkpointed not in self._sizes:
            sizes = self._step.profiles[is_checkpointed].sizes
            self._sizes[is_checkpointed] = [evaluate(size, self._step.values) for size in sizes]
        return self._sizes[is_checkpointed]


def _play(step: Step, tapes: _Tapes, replay: Replay) -> None:
    if step.accumulates:
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
