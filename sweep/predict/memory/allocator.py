"""A simulation of torch's caching allocator: what blocks really take, and what is reserved.

A block may be larger than what was asked for, by a remainder that the allocator does not split off,
and that counts as allocated. Rules are those of torch's ``c10/cuda/CUDACachingAllocator.cpp`` with
its default settings (no ``max_split_size_mb``), sizes those of
``c10/core/AllocatorConfig.h``; their names are given beside ours. One stream is simulated, as a
training uses one: blocks of different streams never mix. Of expandable segments there is nothing to
simulate (`paged`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any

MIB = 2**20

GRAIN_BYTES = 512
"""``kMinBlockSize``: every request is rounded up to a multiple of this."""
SMALL_BYTES = MIB
"""``kSmallSize``: requests up to this have a pool of their own.

Of a block of the other pool, a remainder up to this is not split off: it could serve no large
request, and small ones never look there.
"""
SMALL_SEGMENT_BYTES = 2 * MIB
"""``kSmallBuffer``: what the driver is asked for when the small pool has no room."""
_MIDDLE_BYTES = 10 * MIB
"""``kMinLargeAlloc``: a larger request gets a segment of its own size, a smaller one shares."""
_MIDDLE_SEGMENT_BYTES = 20 * MIB
"""``large_segment_size`` (``kLargeBuffer`` in older versions): the segment that those share, and
the page of an expandable one."""
_LARGE_GRAIN_BYTES = 2 * MIB
"""``kRoundLarge``: a segment of a request's own size is rounded up to a multiple of this."""

Event = tuple[int, int]
"""The grains of a request, and the place where the address of its block is noted; or these grains,
negative, and where the address is noted of the block that is given back."""


def paged(allocated_bytes: Any) -> Any:
    """Return what is reserved for so many bytes, or for an array of them, in expandable segments.

    Such a segment is a range of addresses whose pages are mapped as they are needed and given back,
    one by one, before memory runs out; blocks are split down to the grain (``should_split``). So
    nothing is cut up beyond the last page of either pool.
    """
    pages = -(-allocated_bytes // _MIDDLE_SEGMENT_BYTES)
    return pages * _MIDDLE_SEGMENT_BYTES + SMALL_SEGMENT_BYTES


def grains(size: int) -> int:
    """Return how many grains a request for so many bytes takes."""
    return -(-size // GRAIN_BYTES)


class _Pool:
    """Free blocks of one kind, in grains: small numbers are fast.

    Segments lie apart, so that blocks of two never touch: they could not be merged on a GPU.
    """

    def __init__(self, unsplit: int) -> None:
        self.unsplit = unsplit
        """A remainder up to this stays with its block."""
        self.free: list[tuple[int, int]] = []
        """Size and address, in order."""
        self.starts: dict[int, int] = {}
        """Size by address."""
        self.ends: dict[int, int] = {}
        """Address by the address where the block ends."""


class OutOfSegments(Exception):  # noqa: N818 - an outcome of the simulation, not a fault
    """A request does not fit under the limit, even with every free segment given back."""


class CachingAllocator:
    """Serves requests as torch does.

    Args:
        allocated_bytes: what is in use from before, and never given back.
        reserved_bytes: what was taken from the driver before.
        holes: free blocks from before, that serve large requests.
        limit_bytes: the most that may be reserved; None where the GPU never fills up.

    Attributes:
        allocated_bytes: sum of the blocks in use.
        reserved_bytes: sum of the segments taken from the driver.
        requested_bytes: sum of what was asked for, without the remainders that are not split off.
        peak_allocated_bytes: the most that `allocated_bytes` was.
        peak_requested_bytes: the most that `requested_bytes` was.
        peak_reserved_bytes: the most that `reserved_bytes` was.
    """

    def __init__(
        self,
        *,
        allocated_bytes: int = 0,
        reserved_bytes: int = 0,
        holes: Iterable[int] = (),
        limit_bytes: int | None = None,
    ) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = allocated_bytes
        self.requested_bytes = self.peak_requested_bytes = allocated_bytes
        self.reserved_bytes = self.peak_reserved_bytes = reserved_bytes
        self._small = _Pool(0)
        self._large = _Pool(grains(SMALL_BYTES))
        self._limit_bytes = limit_bytes
        # In grains, by address; what is in use only of blocks that were allocated one by one.
        self._used: dict[int, int] = {}
        self._remainders: dict[int, int] = {}
        self._segments: dict[int, int] = {}
        self._next_address = 1
        for size in map(grains, holes):
            address = self._place(size)
            insort(self._large.free, (size, address))
            self._large.starts[address] = size
            self._large.ends[address + size] = address

    def allocate(self, size: int) -> int:
        """Return the address of a block for a request: the smallest free one that holds it.

        Raises:
            OutOfSegments: it would pass the limit.
        """
        addresses = [0]
        pool = self._small if size <= SMALL_BYTES else self._large
        self._run(pool, [(grains(size), 0)], addresses)
        self._used[addresses[0]] = grains(size)
        return addresses[0]

    def free(self, address: int) -> None:
        """Give a block back; it merges with the free ones that it touches."""
        wanted = self._used.pop(address)
        is_small = wanted <= grains(SMALL_BYTES)
        self._run(self._small if is_small else self._large, [(-wanted, 0)], [address])

    def run(self, events: Iterable[Event], addresses: list[int]) -> None:
        """Serve many large requests and give blocks back, in order.

        Args:
            events: what happens.
            addresses: of blocks, by place.

        Raises:
            OutOfSegments: a request would pass the limit.
        """
        self._run(self._large, events, addresses)

    def _run(self, pool: _Pool, events: Iterable[Event], addresses: list[int]) -> None:
        # One loop without calls, as a step goes through it thousands of times.
        free = pool.free
        starts = pool.starts
        ends = pool.ends
        unsplit = pool.unsplit
        remainders = self._remainders
        requested = wasted = most_requested = most = 0
        try:
            for wanted, place in events:
                if wanted > 0:
                    # Best fit, of equal ones the lowest address: `get_free_block` takes the pool's
                    # lower bound, in the order of `BlockComparatorSize`.
                    index = bisect_left(free, (wanted, 0))
                    if index < len(free):
                        size, address = free.pop(index)
                        del starts[address]
                    else:
                        address, size = self._new_segment(wanted)
                    rest = size - wanted
                    # `should_split`: what stays with the block instead counts as allocated, in
                    # torch as here.
                    if rest > unsplit:
                        start = address + wanted
                        starts[start] = rest
                        ends[address + size] = start
                        insort(free, (rest, start))
                    else:
                        ends.pop(address + size, None)
                        if rest:
                            remainders[address] = rest
                            wasted += rest
                    addresses[place] = address
                    requested += wanted
                    if requested > most_requested:
                        most_requested = requested
                    if requested + wasted > most:
                        most = requested + wasted
                else:
                    address = addresses[place]
                    requested += wanted
                    size = -wanted
                    if address in remainders:
                        rest = remainders.pop(address)
                        wasted -= rest
                        size += rest
                    end = address + size
                    if end in starts:
                        more = starts.pop(end)
                        del free[bisect_left(free, (more, end))]
                        size += more
                        end += more
                    if address in ends:
                        start = ends.pop(address)
                        del free[bisect_left(free, (address - start, start))]
                        size += address - start
                        address = start
                    starts[address] = size
                    ends[end] = address
                    insort(free, (size, address))
        finally:
            self.peak_requested_bytes = max(
                self.peak_requested_bytes, self.requested_bytes + most_requested * GRAIN_BYTES
            )
            self.peak_allocated_bytes = max(
                self.peak_allocated_bytes, self.allocated_bytes + most * GRAIN_BYTES
            )
            self.requested_bytes += requested * GRAIN_BYTES
            self.allocated_bytes += (requested + wasted) * GRAIN_BYTES

    def take_segment(self, length: int) -> None:
        """Reserve so many bytes, for good where the caller keeps them.

        Raises:
            OutOfSegments: it would pass the limit, even with every free segment given back.
        """
        limit = self._limit_bytes
        # The order of torch's `malloc`: ask the driver, give back every cached segment that nothing
        # uses (`release_cached_blocks`), ask once more, and only then is it out of memory. So a
        # training may reserve more where it has more, and the largest segments it would like to
        # have say nothing of what it can run in.
        if limit is not None and self.reserved_bytes + length > limit:
            self.empty_cache()
            if self.reserved_bytes + length > limit:
                raise OutOfSegments
        self.reserved_bytes += length
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def empty_cache(self) -> None:
        """Give the segments in which nothing is in use back to the driver.

        One block in use keeps the whole of a segment: that is what fragmentation costs.
        """
        for pool in (self._small, self._large):
            for size, address in list(pool.free):
                if self._segments.get(address) == size:
                    pool.free.remove((size, address))
                    del pool.starts[address], pool.ends[address + size]
                    self.reserved_bytes -= size * GRAIN_BYTES

    def holes(self) -> list[int]:
        """Return the sizes of the free blocks that serve large requests."""
        return [size * GRAIN_BYTES for size, _ in self._large.free]

    def _new_segment(self, wanted: int) -> tuple[int, int]:
        """Return where a segment for a request is and its size (``get_allocation_size``)."""
        size = wanted * GRAIN_BYTES
        if size <= SMALL_BYTES:
            length = SMALL_SEGMENT_BYTES
        elif size < _MIDDLE_BYTES:
            length = _MIDDLE_SEGMENT_BYTES
        else:
            length = -(-size // _LARGE_GRAIN_BYTES) * _LARGE_GRAIN_BYTES
        self.take_segment(length)
        address = self._place(grains(length))
        self._segments[address] = grains(length)
        return address, grains(length)

    def _place(self, size: int) -> int:
        address = self._next_address
        # A gap behind each segment, so that no block ends where the next segment starts.
        self._next_address += size + 1
        return address
