"""Memory of many configurations at once: each needs what it needs alone, and what a plain walk
through its step, number by number, says.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.models import load_model_spec
from sweep.predict.memory import replay
from sweep.predict.memory.allocator import MIB, CachingAllocator, OutOfSegments
from sweep.predict.memory.peaks import find_peaks
from sweep.predict.memory.predictor import Fit, TracingPredictor
from sweep.predict.memory.profile_store import TracingChildren
from sweep.predict.memory.profiles import (
    BIRTH,
    FETCH_ALL,
    LEAVE,
    VARYING,
    Entry,
    Profile,
)
from sweep.predict.memory.replay import Step, replay_all, replay_uncapped
from tests.sweep.predict.memory.imagined_profile import KIB, MODEL, UNSPLIT, ImaginedTracer
from tests.sweep.predict.memory.test_memory import FailingTracer
from tests.sweep.predict.mixed_space import mixed_configs

MOMENTS = {"embed": "forward", "head": "loss", "head_backward": "loss"}


def walked(step: Step) -> tuple[str, dict[str, int]]:
    """When the most comes and goes, and how much of it is alive then."""
    repeats = Counter(zip(step.profile.positions, step.flags, strict=True))
    alive: Counter[str] = Counter()
    best, moment, most = dict(alive), "forward", -1

    def count(entry: Entry, profile: Profile, times: int) -> None:
        what, _, size, part, _ = entry
        polynomial = profile.sizes[size]
        size_bytes = sum(
            value * math.prod(step.values[symbol] for symbol in monomial)
            for monomial, value in polynomial.items()
        )
        sign = 1 if what in (BIRTH, LEAVE) else -1
        alive[VARYING[part]] += sign * times * size_bytes

    for visit in step.visits():
        gradients = alive["gradients"]
        for own, profile in step.profiles.items():
            for entry in profile.segments[visit.name].tape:
                is_repeated = entry[0] == FETCH_ALL and entry[-1] >= 0
                if is_repeated or own == visit.is_checkpointed:
                    count(entry, profile, repeats[entry[-1], own] if is_repeated else 1)
                if entry[0] in (BIRTH, LEAVE) and alive.total() > most:
                    kind = visit.name.partition(" ")[0]
                    best, most, moment = dict(alive), alive.total(), MOMENTS.get(kind, kind)
        if step.held_gradients:
            alive["gradients"] = gradients
    return moment, best


def assert_as_walked(steps: list[Step]) -> None:
    peaks = find_peaks(steps)
    for row, step in enumerate(steps):
        moment, alive = walked(step)
        passing = dict(zip(VARYING, (2, 4, 5), strict=True))
        for part, index in passing.items():
            assert peaks.passing[index, row] - peaks.there[index, row] == alive.get(part, 0)
        if peaks.moment(row) != "optimizer":
            assert peaks.moment(row) == moment


def imagined(home: Path, tracer: ImaginedTracer | None = None) -> TracingPredictor:
    return TracingPredictor(MODEL, cache_dir=home, tracer=tracer or ImaginedTracer())


def steps_of(predictor: TracingPredictor, configs: list[TrialConfig]) -> list[Step]:
    return list(predictor.predict_all(configs).steps.values())


@pytest.mark.parametrize("tracer", [ImaginedTracer(), ImaginedTracer(loss_bytes=0, window=600)])
def test_the_most_alive_is_that_of_a_walk_number_by_number(
    tmp_path: Path, tracer: ImaginedTracer
) -> None:
    predictor = imagined(tmp_path, tracer)
    assert_as_walked(steps_of(predictor, mixed_configs(120)))


def test_the_most_alive_in_a_real_model_is_that_of_a_walk_number_by_number(
    tracing_child: TracingChildren, profile_cache: Path
) -> None:
    model = load_model_spec("tinyllama-1.1b")
    predictor = TracingPredictor(model, cache_dir=profile_cache, tracer=tracing_child)
    held = {"target_modules": "attention", "compute_dtype": "bf16", "quantization": "nf4"}
    alike = {"double_quant": True, "adapter_dtype": "fp32", "attention": "sdpa", "compile": False}
    configs = mixed_configs(60, lora_dropout=0.0, kernels="fused-loss", **held, **alike)
    assert_as_walked(steps_of(predictor, configs))


def test_each_of_many_configurations_needs_what_it_needs_alone(tmp_path: Path) -> None:
    predictor = imagined(tmp_path, ImaginedTracer(window=600))
    configs, found = mixed_configs(100, seed=1), set[Fit]()
    memory, alone = predictor.predict_all(configs), [predictor.predict(c) for c in configs]
    peaks = memory.peak_allocated_bytes
    for row, expected in enumerate(alone):
        prediction = memory.prediction(row)
        assert peaks[row] == prediction.peak_allocated_bytes == expected.peak_allocated_bytes
        assert prediction.breakdown == expected.breakdown
        assert prediction.moment == expected.moment
        assert sum(prediction.breakdown.values()) == peaks[row]
    for budget in np.quantile(peaks, (0.0, 0.5, 1.0)).astype(int):
        fits = [one.fits(int(budget)) for one in alone]
        pairs = zip(memory.quick_fits(int(budget)), fits, strict=True)
        assert all(code is None or code is fit for code, fit in pairs)
        found.update(fits)
    assert found == set(Fit)


def test_what_cannot_be_traced_has_no_peak_and_others_have(tmp_path: Path) -> None:
    predictor = imagined(tmp_path, FailingTracer(InputError("no such modules")))
    assert predictor.predict_all([]).peak_allocated_bytes.shape == (0,)
    configs = [TrialConfig(target_modules=modules) for modules in ("qv", "attention")]
    memory = predictor.predict_all(configs)
    assert memory.peak_allocated_bytes.tolist() == [
        -1,
        predictor.predict(configs[1]).peak_allocated_bytes,
    ]
    assert memory.quick_fits(10**15) == [Fit.UNCERTAIN, Fit.YES]
    assert [str(error) for error in memory.refused.values()] == ["no such modules"]


def test_the_largest_sizes_that_can_be_typed_are_exact(tmp_path: Path) -> None:
    predictor = imagined(tmp_path, ImaginedTracer(window=600))
    huge = TrialConfig(micro_batch_size=65_536, seq_len=10_000_000)
    memory = predictor.predict_all([TrialConfig(), huge])
    prediction = memory.prediction(1)
    assert prediction.breakdown["loss"] == 64 * KIB * 65_536 * 10_000_000
    assert prediction.breakdown["activations"] > 65_536 * 10_000_000**2
    assert_as_walked(steps_of(predictor, [huge]))
    assert memory.quick_fits(10**15)[1] is Fit.NO


def test_expandable_segments_hold_what_was_asked_for_and_no_more(tmp_path: Path) -> None:
    predictor = imagined(tmp_path)
    fixed = [c.model_copy(update={"lora_rank": 8}) for c in mixed_configs(40, seed=3)]
    expandable = [c.model_copy(update={"expandable_segments": True}) for c in fixed]
    before, after = predictor.predict_all(fixed), predictor.predict_all(expandable)
    assert (after.least_allocated_bytes == after.peak_allocated_bytes).all()
    less = before.least_allocated_bytes - after.peak_allocated_bytes
    assert less.tolist() == [UNSPLIT] * len(fixed)
    for row in range(len(expandable)):
        prediction = after.prediction(row)
        spare = prediction.peak_reserved_bytes - prediction.peak_allocated_bytes
        assert 0 < spare <= 22 * MIB


def test_what_fits_in_expandable_segments_takes_no_replay(tmp_path: Path) -> None:
    predictor = imagined(tmp_path)
    memory = predictor.predict_all(mixed_configs(80, seed=4, expandable_segments=True))
    for budget in np.quantile(memory.peak_allocated_bytes, (0.1, 0.5, 0.9)).astype(int):
        codes = memory.quick_fits(int(budget))
        alone = [memory.prediction(row).fits(int(budget)) for row in range(80)]
        assert codes == alone


@pytest.fixture
def steps(tmp_path: Path) -> list[Step]:
    return steps_of(imagined(tmp_path), mixed_configs(60))


@pytest.mark.parametrize("worth_processes", [1, 10_000])
def test_each_of_many_steps_comes_to_what_it_comes_to_alone(
    steps: list[Step], worth_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "WORTH_PROCESSES", worth_processes)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    told: list[tuple[int, int]] = []
    # Equal ones are replayed once.
    found = replay_all([*steps, *steps], on_progress=lambda done, of: told.append((done, of)))
    assert found == [replay_uncapped(step) for step in steps] * 2
    assert told[0] == (0, len(steps))
    assert told[-1] == (len(steps), len(steps))


# The simulated caching allocator: sizes of blocks and segments, splitting, merging, the limit


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
