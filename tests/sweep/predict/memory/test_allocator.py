"""The simulated caching allocator: sizes of blocks and segments, splitting, merging, the limit."""

from __future__ import annotations

import random

import pytest

from sweep.predict.memory.allocator import MIB, CachingAllocator, OutOfSegments


@pytest.mark.parametrize(
    ("request_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (30 * MIB + 512, 30 * MIB + 512, 32 * MIB),
        (31 * MIB, 32 * MIB, 32 * MIB),
    ],
)
def test_a_request_takes_a_block_of_a_segment(
    request_bytes: int, allocated: int, reserved: int
) -> None:
    allocator = CachingAllocator()
    allocator.allocate(request_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_a_remainder_of_up_to_a_mebibyte_stays_with_its_block() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    allocator.allocate(11 * MIB)
    assert allocator.allocated_bytes == 12 * MIB
    assert allocator.reserved_bytes == 12 * MIB


def test_what_was_asked_for_is_counted_without_remainders() -> None:
    allocator = CachingAllocator(allocated_bytes=MIB)
    address = allocator.allocate(31 * MIB)
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (32 * MIB, 33 * MIB)
    allocator.free(address)
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (MIB, MIB)
    assert (allocator.peak_requested_bytes, allocator.peak_allocated_bytes) == (32 * MIB, 33 * MIB)


def test_the_smallest_free_block_that_holds_a_request_serves_it() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(18 * MIB) == small


def test_neighbours_that_are_free_merge_within_their_segment_only() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(8)]
    for block in blocks:
        allocator.free(block)
    assert allocator.holes() == [20 * MIB, 20 * MIB]


def test_emptying_the_cache_keeps_segments_in_use() -> None:
    allocator = CachingAllocator()
    kept, first = allocator.allocate(5 * MIB), allocator.allocate(5 * MIB)
    allocator.free(allocator.allocate(64 * MIB))
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_under_a_limit_free_segments_are_given_back_before_it_fails() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    kept = allocator.allocate(80 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    with pytest.raises(OutOfSegments):
        allocator.allocate(40 * MIB)
    allocator.free(kept)
    allocator.allocate(40 * MIB)


def test_holes_from_before_serve_large_requests() -> None:
    allocator = CachingAllocator(allocated_bytes=6 * MIB, reserved_bytes=20 * MIB, holes=[14 * MIB])
    allocator.allocate(13 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.allocated_bytes == 20 * MIB


def test_whatever_happens_every_byte_reserved_is_in_use_or_free() -> None:
    generator = random.Random(0)
    allocator, live = CachingAllocator(), []
    for _ in range(3000):
        if live and generator.random() < 0.48:
            allocator.free(live.pop(generator.randrange(len(live))))
        else:
            live.append(allocator.allocate(int(10 ** generator.uniform(6.1, 8))))
        assert allocator.allocated_bytes + sum(allocator.holes()) == allocator.reserved_bytes
    for address in live:
        allocator.free(address)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
