"""Owns a simulation of torch's caching allocator: what blocks really take, and what is reserved.

A block may be larger than what was asked for, by a remainder that the allocator does not split off,
and that counts as allocated. Rules are those of torch's ``c10/cuda/CUDACachingAllocator.cpp`` with
its default settings (no ``max_split_size_mb``), sizes those of
``c10/core/AllocatorConfig.h``; their names are given beside ours. One stream is simulated, as a
training uses one: blocks of different streams never mix. Of expandable segments there is nothing to
simulate (`paged`). Knows nothing of tensors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
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


def rounded(size: int) -> int:
    """Return the bytes of the smallest block for a request of so many (``round_size``)."""
    return -(-size // GRAIN_BYTES) * GRAIN_BYTES


def paged(allocated_bytes: Any) -> Any:
    """Return what is reserved for so many bytes, or for an array of them, in expandable segments.

    Such a segment is a range of addresses whose pages are mapped as they are needed and given back,
    one by one, before memory runs out; blocks are split down to the grain (``should_split``). So
    nothing is cut up beyond the last page of either pool.
    """
    pages = -(-allocated_bytes // _MIDDLE_SEGMENT_BYTES)
    return pages * _MIDDLE_SEGMENT_BYTES + SMALL_SEGMENT_BYTES


@dataclass
class _Pool:
    """Free blocks of one kind: by size, to serve a request, and by their ends, to merge.

    Segments lie apart, so that blocks of two never touch: they could not be merged on a card.
    """

    unsplit_bytes: int
    """A remainder up to this stays with its block."""
    by_size: list[tuple[int, int]] = field(default_factory=list)
    """(size, address), in order."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Size by address."""
    starts: dict[int, int] = field(default_factory=dict)
    """Address by the address where the block ends."""

    def put(self, address: int, size: int) -> None:
        self.sizes[address] = size
        self.starts[address + size] = address
        insort(self.by_size, (size, address))

    def forget(self, address: int) -> int:
        """Drop a block and return its size."""
        size = self.sizes.pop(address)
        del self.starts[address + size]
        del self.by_size[bisect_left(self.by_size, (size, address))]
        return size


class OutOfSegments(Exception):  # noqa: N818 - an outcome of the simulation, not a fault
    """A request does not fit under the limit, even with every free segment given back."""


class CachingAllocator:
    """Serves requests as torch does.

    Args:
        allocated_bytes: what is in use from before, and never given back.
        reserved_bytes: what was taken from the driver before.
        holes: free blocks from before, that serve large requests.
        limit_bytes: the most that may be reserved; None where the card never fills up.

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
        self._small, self._large = _Pool(unsplit_bytes=0), _Pool(unsplit_bytes=SMALL_BYTES)
        self._limit_bytes = limit_bytes
        self._used: dict[int, int] = {}
        self._remainders: dict[int, int] = {}
        self._segments: dict[int, int] = {}
        self._next_address = GRAIN_BYTES
        for size in holes:
            self._large.put(self._place(size), size)

    def allocate(self, size: int) -> int:
        """Return the address of a block for a request: the smallest free one that holds it.

        Raises:
            OutOfSegments: it would pass the limit.
        """
        size = rounded(size)
        pool = self._small if size <= SMALL_BYTES else self._large
        # Best fit, of equal ones the lowest address: `get_free_block` takes the pool's lower bound,
        # in the order of `BlockComparatorSize`.
        index = bisect_left(pool.by_size, (size, 0))
        if index < len(pool.by_size):
            length, address = pool.by_size.pop(index)
            del pool.sizes[address], pool.starts[address + length]
        else:
            length, address = self._new_segment(size)
        # `should_split`: what stays with the block instead counts as allocated, in torch as here.
        if length - size > pool.unsplit_bytes:
            pool.put(address + size, length - size)
            length = size
        self._count(address, size, length)
        return address

    def free(self, address: int) -> None:
        """Give a block back; it merges with the free ones that it touches."""
        size = self._used.pop(address)
        self.allocated_bytes -= size
        self.requested_bytes -= size
        if address in self._remainders:
            self.requested_bytes += self._remainders.pop(address)
        # A small block is always cut to its request, so that the size in use tells the pool.
        pool = self._small if size <= SMALL_BYTES else self._large
        if address + size in pool.sizes:
            size += pool.forget(address + size)
        if address in pool.starts:
            address = pool.starts[address]
            size += pool.forget(address)
        pool.put(address, size)

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
            for address, size in list(pool.sizes.items()):
                if self._segments.get(address) == size:
                    self.reserved_bytes -= pool.forget(address)

    def holes(self) -> list[int]:
        """Return the sizes of the free blocks that serve large requests."""
        return [size for size, _ in self._large.by_size]

    def _count(self, address: int, size: int, length: int) -> None:
        """Note a block in use, of which so much was asked for."""
        self._used[address] = length
        if length > size:
            self._remainders[address] = length - size
        self.allocated_bytes += length
        self.requested_bytes += size
        # Not by `max`, which takes longer: this is gone through thousands of times in a step.
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes

    def _new_segment(self, size: int) -> tuple[int, int]:
        """Return the size and the address of a segment for a request (``get_allocation_size``)."""
        if size <= SMALL_BYTES:
            length = SMALL_SEGMENT_BYTES
        elif size < _MIDDLE_BYTES:
            length = _MIDDLE_SEGMENT_BYTES
        else:
            length = -(-size // _LARGE_GRAIN_BYTES) * _LARGE_GRAIN_BYTES
        self.take_segment(length)
        address = self._place(length)
        self._segments[address] = length
        return length, address

    def _place(self, length: int) -> int:
        address = self._next_address
        # A gap behind each segment, so that no block ends where the next segment starts.
        self._next_address += length + GRAIN_BYTES
        return address
