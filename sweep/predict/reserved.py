"""Owns the reserved memory of a step: the tapes of its segments replayed through a simulated
allocator.

Knows nothing of where tapes come from, nor of what their tensors are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sweep.predict.allocator import (
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    CachingAllocator,
    OutOfSegments,
)
from sweep.predict.polynomials import evaluate
from sweep.predict.profiles import BIRTH, DEATH, LEAVE, TAKE, Entry
from sweep.predict.step import Step

_HEAVY_STATES = 0.05
"""Share of what is allocated, above which it matters where the optimizer's states lie."""


@dataclass(frozen=True)
class Take:
    """A tape at real sizes. Small requests are only summed up: they have segments of their own,
    that waste little.
    """

    entries: list[tuple[int, int | str, int]]
    """As `Entry`, with bytes for the index, and without what is small."""
    small_kept_bytes: int
    small_hump_bytes: int


def take(tape: Sequence[Entry], sizes: Sequence[int]) -> Take:
    """Return a tape at real sizes, given in bytes by the tape's index."""
    entries: list[tuple[int, int | str, int]] = []
    small: dict[int | str, int] = {}
    kept = hump = 0
    for what, key, value in tape:
        if what in (BIRTH, LEAVE):
            size = sizes[value]
            if size > SMALL_BYTES:
                entries.append((what, key, size))
            else:
                small[key] = size
                kept += size
                hump = max(hump, kept)
        elif key in small and what == DEATH:
            kept -= small.pop(key)
        else:
            entries.append((what, key, value))
    return Take(entries, kept, hump)


class Replay:
    """Replays segments one after another."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._small_bytes = self._small_room_bytes = 0
        self._left: dict[int | str, dict[int, int]] = {}

    def hold(self, sizes: Iterable[int]) -> None:
        """Allocate what stays."""
        for size in sizes:
            if size > SMALL_BYTES:
                self._allocator.allocate(size)
            else:
                self._small_bytes += size
        self._make_small_room(0)

    def play(self, part: Take, *, layer: int = 0) -> None:
        """Replay a segment of a layer of the whole model, or of the step as a whole."""
        self._make_small_room(part.small_hump_bytes)
        self._small_bytes += part.small_kept_bytes
        allocate, free, left = self._allocator.allocate, self._allocator.free, self._left
        temporaries: dict[int | str, int] = {}
        for what, key, value in part.entries:
            if what == BIRTH:
                temporaries[key] = allocate(value)
            elif what == DEATH:
                free(temporaries.pop(key))
            elif what == LEAVE:
                left.setdefault(key, {})[layer] = allocate(value)
            elif what == TAKE:
                address = left.get(key, {}).pop(layer - value, None)
                if address is not None:
                    free(address)
            else:
                for address in left.pop(key, {}).values():
                    free(address)


    def let_go(self) -> None:
        """Free what was left and never taken: the gradients, at the end of a step."""
        for addresses in self._left.values():
            for address in addresses.values():
                self._allocator.free(address)
        self._left.clear()

    def _make_small_room(self, hump_bytes: int) -> None:
        missing = self._small_bytes + hump_bytes - self._small_room_bytes
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
    allocator = base_allocator(step, limit_bytes=limit_bytes)
    replay = Replay(allocator)
    try:
        replay.hold(step.adapters)
        if sum(step.states) > _HEAVY_STATES * allocator.allocated_bytes:
            # They are made at the end of the first step, in what it has left free.
            _play(step, replay)
        replay.hold(step.states)
        _play(step, replay)
    except OutOfSegments:
        return None
    return allocator.peak_reserved_bytes


def _play(step: Step, replay: Replay) -> None:
    if step.accumulates:
        replay.hold(step.adapters)
    takes: dict[tuple[str, bool], Take] = {}
    for visit in step.visits():
        key = (visit.name, visit.is_checkpointed)
        if key not in takes:
            sizes = [evaluate(size, step.values) for size in step.profiles[key[1]].sizes]
            takes[key] = take(step.segment(visit).tape, sizes)
        elif visit.moment == "backward" and sum(step.kept(visit).values()) <= 0:
            # The same layer again, with less alive than before it: nothing new can come.
            break
        replay.play(takes[key], layer=visit.layer)
    replay.let_go()
