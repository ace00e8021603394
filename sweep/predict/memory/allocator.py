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
_ADDRESS_BITS = 96
"""More than the addresses of any simulation take."""
_ADDRESS = (1 << _ADDRESS_BITS) - 1

Block = int
"""A block's size above its address, as one number: blocks are then in the order they are searched
in, and of a block and a request's size the difference is what is left over."""
Event = tuple[Block, int]
"""A request, as the block of its size at address zero, and where to note the block that serves it;
or zero, and where the block is noted that is given back."""


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


def request(size: int) -> Block:
    """Return a request for so many bytes, rounded up, for an `Event`."""
    return -(-size // GRAIN_BYTES) * GRAIN_BYTES << _ADDRESS_BITS


@dataclass
class _Pool:
    """Free blocks of one kind: by size, to serve a request, and by their ends, to merge.

    Segments lie apart, so that blocks of two never touch: they could not be merged on a card.
    """

    unsplit_bytes: int
    """A remainder up to this stays with its block."""
    by_size: list[Block] = field(default_factory=list)
    """In order; of equal ones the lowest address first."""
    starts: dict[int, Block] = field(default_factory=dict)
    """By the address where it starts."""
    ends: dict[int, Block] = field(default_factory=dict)
    """By the address where it ends."""

    def put(self, block: Block) -> None:
        address = block & _ADDRESS
        self.starts[address] = self.ends[address + (block >> _ADDRESS_BITS)] = block
        insort(self.by_size, block)

    def forget(self, block: Block) -> None:
        address = block & _ADDRESS
        del self.starts[address], self.ends[address + (block >> _ADDRESS_BITS)]
        del self.by_size[bisect_left(self.by_size, block)]


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
        self._used: dict[int, Block] = {}
        self._remainders: dict[Block, int] = {}
        self._segments: dict[int, int] = {}
        self._next_address = GRAIN_BYTES
        for size in holes:
            self._large.put(size << _ADDRESS_BITS | self._place(size))

    def allocate(self, size: int) -> int:
        """Return the address of a block for a request: the smallest free one that holds it.

        Raises:
            OutOfSegments: it would pass the limit.
        """
        blocks = [0]
        self._run(self._small if size <= SMALL_BYTES else self._large, [(request(size), 0)], blocks)
        address = blocks[0] & _ADDRESS
        self._used[address] = blocks[0]
        return address

    def free(self, address: int) -> None:
        """Give a block back; it merges with the free ones that it touches."""
        block = self._used.pop(address)
        # A small block is always cut to its request, so that the size in use tells the pool.
        is_small = block >> _ADDRESS_BITS <= SMALL_BYTES
        self._run(self._small if is_small else self._large, [(0, 0)], [block])

    def run(self, events: Iterable[Event], blocks: list[Block]) -> None:
        """Serve many large requests and give blocks back, in order.

        Args:
            events: what happens.
            blocks: where blocks are noted.

        Raises:
            OutOfSegments: a request would pass the limit.
        """
        self._run(self._large, events, blocks)

    def _run(self, pool: _Pool, events: Iterable[Event], blocks: list[Block]) -> None:
        # One loop without a call for each event, as a step goes through it thousands of times.
        bits, mask = _ADDRESS_BITS, _ADDRESS
        by_size, starts, ends = pool.by_size, pool.starts, pool.ends
        least_split = (pool.unsplit_bytes + 1) << bits
        remainders = self._remainders
        requested, most_requested = self.requested_bytes, self.peak_requested_bytes
        wasted, most = self.allocated_bytes - requested, self.peak_allocated_bytes
        try:
            for wanted, place in events:
                if wanted:
                    # Best fit, of equal ones the lowest address: `get_free_block` takes the pool's
                    # lower bound, in the order of `BlockComparatorSize`.
                    index = bisect_left(by_size, wanted)
                    if index < len(by_size):
                        block = by_size.pop(index)
                        address = block & mask
                        del starts[address]
                    else:
                        block = self._new_segment(wanted >> bits)
                        address = block & mask
                    rest = block - wanted
                    # `should_split`: what stays with the block instead counts as allocated, in
                    # torch as here.
                    if rest >= least_split:
                        size = wanted >> bits
                        rest += size
                        starts[address + size] = ends[address + (block >> bits)] = rest
                        insort(by_size, rest)
                        blocks[place] = wanted | address
                    else:
                        ends.pop(address + (block >> bits), None)
                        blocks[place] = block
                        size = wanted >> bits
                        if rest != address:
                            remainders[block] = rest = rest >> bits
                            wasted += rest
                    requested += size
                    if requested > most_requested:
                        most_requested = requested
                    if requested + wasted > most:
                        most = requested + wasted
                else:
                    block = blocks[place]
                    size, address = block >> bits, block & mask
                    end = address + size
                    if block in remainders:
                        rest = remainders.pop(block)
                        wasted -= rest
                        requested += rest
                    requested -= size
                    if end in starts:
                        other = starts.pop(end)
                        del by_size[bisect_left(by_size, other)]
                        end += other >> bits
                    if address in ends:
                        other = ends.pop(address)
                        del by_size[bisect_left(by_size, other)]
                        address = other & mask
                    block = end - address << bits | address
                    starts[address] = ends[end] = block
                    insort(by_size, block)
        finally:
            self.requested_bytes, self.peak_requested_bytes = requested, most_requested
            self.allocated_bytes, self.peak_allocated_bytes = requested + wasted, most

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
            for address, block in list(pool.starts.items()):
                size = block >> _ADDRESS_BITS
                if self._segments.get(address) == size:
                    pool.forget(block)
                    self.reserved_bytes -= size

    def holes(self) -> list[int]:
        """Return the sizes of the free blocks that serve large requests."""
        return [block >> _ADDRESS_BITS for block in self._large.by_size]

    def _new_segment(self, size: int) -> Block:
        """Return a new segment for a request (``get_allocation_size``)."""
        if size <= SMALL_BYTES:
            length = SMALL_SEGMENT_BYTES
        elif size < _MIDDLE_BYTES:
            length = _MIDDLE_SEGMENT_BYTES
        else:
            length = -(-size // _LARGE_GRAIN_BYTES) * _LARGE_GRAIN_BYTES
        self.take_segment(length)
        address = self._place(length)
        self._segments[address] = length
        return length << _ADDRESS_BITS | address

    def _place(self, length: int) -> int:
        address = self._next_address
        # A gap behind each segment, so that no block ends where the next segment starts.
        self._next_address += length + GRAIN_BYTES
        return address
