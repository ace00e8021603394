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
from sweep.predict.memory.step import Step

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
        for what, key, value in tape.entries:
            if what == BIRTH:
                temporaries[key] = self._allocator.allocate(value)
            elif what == DEATH:
                self._allocator.free(temporaries.pop(key))
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


def reserved_bytes(step: Step, *, limit_bytes: int | None = None) -> int | None:
    """Return the most that the allocator would hold in a step; None where it passes the limit."""
    try:
        return replayed(step, limit_bytes=limit_bytes).peak_reserved_bytes
    except OutOfSegments:
        return None


def wasted_bytes(step: Step) -> int:
    """Return by how much unsplit remainders of blocks raise the peak; some milliseconds."""
    allocator = replayed(step)
    return allocator.peak_allocated_bytes - allocator.peak_requested_bytes


def replayed(step: Step, *, limit_bytes: int | None = None) -> CachingAllocator:
    """Return the allocator as a step leaves it.

    Raises:
        OutOfSegments: it passes the limit.
    """
    allocator = base_allocator(step, limit_bytes=limit_bytes)
    replay = Replay(allocator)
    replay.hold(step.adapters)
    # A step that is not the first finds the states where the first one's end has put them. Where
    # they are small it makes no difference to assume that they were there from the start.
    is_heavy = sum(step.states) > _HEAVY_STATES * allocator.allocated_bytes
    if is_heavy or limit_bytes is not None:
        # They are made at the end of the first step, in what it has left free; and under a limit it
        # is the second step that must do with blocks that the first one has cut up.
        _play(step, replay)
    replay.hold(step.states)
    _play(step, replay)
    return allocator


def _play(step: Step, replay: Replay) -> None:
    if step.accumulates:
        replay.hold(step.adapters)
    tapes: dict[tuple[str, bool], SizedTape] = {}
    for visit in step.visits():
        key = (visit.name, visit.is_checkpointed)
        if key not in tapes:
            sizes = [evaluate(size, step.values) for size in step.profiles[key[1]].sizes]
            tapes[key] = sized(step.segment(visit).tape, sizes)
        elif visit.moment == "backward" and step.layer_keeps_bytes(visit) <= 0:
            # The same layer again, with less alive than before it, and free blocks that served the
            # last one: nothing new can come.
            break
        replay.play(tapes[key], layer=visit.layer)
    replay.end_step()
