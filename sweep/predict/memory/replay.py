"""A step replayed through a simulated allocator: what is reserved, and what is wasted.

Both depend on the order of all births and deaths, so that the segments' tapes are gone through one
by one, which takes milliseconds; equal steps are replayed once, many on all processors.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import accumulate

from sweep.pools import process_pool, unheard_by_new_processes
from sweep.predict.memory.allocator import (
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    CachingAllocator,
    Event,
    OutOfSegments,
    grains,
)
from sweep.predict.memory.polynomials import evaluate
from sweep.predict.memory.profile_store import OnProgress, tell_nobody
from sweep.predict.memory.step import Step, Visit

WORTH_PROCESSES = 300
"""Steps whose replays take longer than starting processes for them: one or two seconds."""
_AT_ONCE = 50
"""Steps that a process is given at a time: so few that all processes end together."""
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
        self._known: dict[tuple[str, bool], SizedTape] = {}
        self._sizes = {flag: _sizes(step, flag) for flag in step.profiles}

    def of(self, visit: Visit) -> SizedTape:
        """Return the tape of a segment."""
        if visit.key not in self._known:
            self._known[visit.key] = self._sized(visit)
        return self._known[visit.key]

    def _sized(self, visit: Visit) -> SizedTape:
        requests, changes = self._sizes[visit.is_checkpointed]
        segment = self._step.segment(visit)
        parts = segment.stretches
        moves = [
            changes[of if birth >= 0 else -1 - of] for part in parts for birth, of, _ in part.births
        ]
        return SizedTape(
            stretches=[
                ([(requests[birth], at) for birth, of, at in p.births if requests[of]], p.fetched)
                for p in parts
            ],
            leaves=[(path, at, changes[of]) for part in parts for path, of, at in part.leaves],
            places=segment.births,
            small_peak_bytes=max(accumulate(moves, initial=0)),
        )


def _sizes(step: Step, is_checkpointed: bool) -> tuple[list[int], list[int]]:
    """Return the grains of large requests and the bytes of small ones, by the tapes' index.

    A death, whose birth has the index -1, requests nothing; at -1 - index is what it gives back of
    small ones.
    """
    sizes = [evaluate(size, step.values) for size in step.profiles[is_checkpointed].sizes]
    requests = [grains(size) if size > SMALL_BYTES else 0 for size in sizes]
    small = [size if size <= SMALL_BYTES else 0 for size in sizes]
    return [*requests, 0], [*small, *(-size for size in reversed(small))]


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


def replay_all(steps: Sequence[Step], *, on_progress: OnProgress = tell_nobody) -> list[Uncapped]:
    """Return what each step comes to without a limit.

    Args:
        steps: of any structures, and of any sizes.
        on_progress: told how many different ones have been replayed, of how many.
    """
    distinct = {_alike(step): step for step in steps}
    # Neighbours are of one structure, so that a process is sent few profiles at a time.
    keys = sorted(distinct, key=lambda key: key[0])
    results: list[Uncapped] = []
    on_progress(0, len(keys))
    for more in _replayed([distinct[key] for key in keys]):
        results += more
        on_progress(len(results), len(keys))
    known = dict(zip(keys, results, strict=True))
    return [known[_alike(step)] for step in steps]


def _alike(step: Step) -> tuple[tuple[int, ...], Hashable]:
    """Return what decides over a replay."""
    config = step.config
    sizes = tuple(step.values.items()), step.flags, step.workspace_bytes, step.held_gradients
    gpus = config.is_sharded and config.data_parallel
    states = config.adapter_dtype, config.optimizer, gpus
    return tuple(map(id, step.profiles.values())), (*sizes, *states)


def _replayed(steps: Sequence[Step]) -> Iterator[list[Uncapped]]:
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
            with unheard_by_new_processes():
                answers = pool.map(_replay, chunks)
            for results in answers:
                done += 1
                yield results
    # What a process that died has left is done here.
    yield from map(_replay, chunks[done:])


def _replay(steps: Sequence[Step]) -> list[Uncapped]:
    return [replay_uncapped(step) for step in steps]
