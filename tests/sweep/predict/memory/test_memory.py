"""The memory prediction: its algebra on a profile written by hand, its truth on a GPU's peaks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, SweepError
from qlora_sweep.search_spaces.loading import load_space
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.sweep.predict.memory import replay
from qlora_sweep.sweep.predict.memory.allocator import MIB, CachingAllocator, OutOfSegments
from qlora_sweep.sweep.predict.memory.predictor import (
    Fit,
    MemoryPrediction,
    TracingPredictor,
    one_of_each_kind,
)
from qlora_sweep.sweep.predict.memory.profiles import (
    Structure,
    Symbols,
    Untraceable,
)
from qlora_sweep.sweep.predict.memory.replay import (
    Step,
    Uncapped,
    replay_all,
    replay_uncapped,
    runs_under,
)
from tests.sweep.predict.memory.imagined_profile import (
    ADAPTER_ELEMENTS,
    KIB,
    LAYERS,
    MODEL,
    UNSPLIT,
    WEIGHTS,
    ImaginedTracer,
)
from tests.sweep.predict.mixed_space import mixed_configs
from tests.tables import cases

WORKSPACES = 64 * MIB
PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "loss")

Predict = Callable[..., MemoryPrediction]


@pytest.fixture
def predict(tmp_path: Path) -> Predict:
    caches = itertools.count()

    def predicted(tracer: ImaginedTracer | None = None, **keys: Any) -> MemoryPrediction:
        tracer = tracer or ImaginedTracer()
        predictor = TracingPredictor(MODEL, cache_dir=tmp_path / str(next(caches)), tracer=tracer)
        return predictor.predict(parse_config({"micro_batch_size": 2, "seq_len": 512, **keys}))

    return predicted


@pytest.mark.parametrize(
    ("fraction", "kept_by_layers"), [(1.0, 1 * LAYERS), (0.0, 4 * LAYERS), (0.5, 2 * 1 + 2 * 4)]
)
def test_every_layer_keeps_its_own(predict: Predict, fraction: float, kept_by_layers: int) -> None:
    prediction = predict(checkpoint_fraction=fraction, effective_batch_size=8)
    assert prediction.moment == "loss"
    assert prediction.breakdown["loss"] == 64 * KIB * 1024
    assert prediction.breakdown["activations"] == WORKSPACES + kept_by_layers * KIB * 1024
    assert set(prediction.breakdown) == {*PARTS}
    assert sum(prediction.breakdown.values()) == prediction.peak_allocated_bytes
    assert prediction.peak_reserved_bytes >= prediction.peak_allocated_bytes
    assert prediction.peak_reserved_bytes % (2 * MIB) == MIB  # as much as the base has


def test_the_peak_is_in_the_last_layer_where_the_loss_is_small(predict: Predict) -> None:
    prediction = predict(ImaginedTracer(loss_bytes=0), checkpoint_fraction=0.0)
    assert prediction.moment == "backward"
    assert prediction.breakdown["activations"] == WORKSPACES + (16 + 10) * KIB * 1024


def test_accumulated_gradients_are_there_throughout(predict: Predict) -> None:
    once, accumulated = predict(), predict(effective_batch_size=4)
    assert once.breakdown["gradients"] == 0
    assert accumulated.breakdown["gradients"] == accumulated.breakdown["adapters"]
    assert accumulated.breakdown["adapters"] == LAYERS * 4 * ADAPTER_ELEMENTS * 16
    # A huge rank peaks at the update.
    huge = predict(micro_batch_size=1, seq_len=1, lora_rank=4096)
    assert huge.moment == "optimizer"
    assert huge.breakdown["gradients"] == huge.breakdown["adapters"]


@pytest.mark.parametrize(
    ("optimizer", "rank", "bytes_by_tensor"),
    cases(
        """
        # Two moments in fp32 below 4,096 elements; in a byte each above, with a scale for 256.
        adamw_8bit | 3 | 24576
        adamw_8bit | 16 | 33792
        # A state of 100,000 elements or more is not on the GPU, but its scales are.
        paged_adamw_8bit | 97 | 202752
        paged_adamw_8bit | 98 | 4096
        adamw_torch_fused | 16 | 131584
        """
    ),
)
def test_an_optimizer_keeps_states(
    predict: Predict, optimizer: str, rank: int, bytes_by_tensor: int
) -> None:
    prediction = predict(optimizer=optimizer, lora_rank=rank)
    assert prediction.breakdown["optimizer"] == LAYERS * bytes_by_tensor


def test_an_older_gpu_has_smaller_workspaces_and_no_flash_attention(tmp_path: Path) -> None:
    tracer = ImaginedTracer()

    def peak(capability: tuple[int, int] | None) -> int:
        about = {"cache_dir": tmp_path, "compute_capability": capability, "tracer": tracer}
        return TracingPredictor(MODEL, **about).predict(TrialConfig()).peak_allocated_bytes

    assert peak(None) == peak((9, 0))
    assert peak((9, 0)) - peak((8, 6)) == 2 * (32 * MIB - (8 * MIB + 128 * KIB))
    peak((7, 5))
    assert [structure.has_flash for structure in tracer.asked] == [True, False]


def test_a_cache_that_cannot_be_read_or_written_costs_nothing_but_time(tmp_path: Path) -> None:
    imagined(tmp_path).predict(TrialConfig())
    for path in tmp_path.iterdir():
        path.write_text("{")
    (tmp_path / "file").touch()
    for cache in (tmp_path, tmp_path / "file" / "cache"):
        tracer = ImaginedTracer()
        imagined(cache, tracer).predict(TrialConfig())
        assert len(tracer.asked) == 1


def test_a_profile_is_of_no_other_model(tmp_path: Path) -> None:
    other = ModelSpec("other", "directory", {**MODEL.config, "hidden_size": 128})
    imagined(tmp_path).predict(TrialConfig())
    tracer = ImaginedTracer()
    TracingPredictor(other, cache_dir=tmp_path, tracer=tracer).predict(TrialConfig())
    assert len(tracer.asked) == 1


class FailingTracer(ImaginedTracer):
    """Fails at what has adapters on q and v, or on any, as often as it has faults for it."""

    def __init__(self, *faults: Exception, targets: Sequence[str] = ("qv",)) -> None:
        super().__init__()
        self._faults = list(faults)
        self._targets = targets

    def trace(self, model: ModelSpec, structure: Structure) -> dict[str, Any]:
        profile = super().trace(model, structure)
        if structure.config.target_modules in self._targets and self._faults:
            raise self._faults.pop(0)
        return profile


QV = TrialConfig(target_modules="qv")


def _asked_thrice(predictor: TracingPredictor) -> list[type[Exception] | None]:
    """How predicting a structure that fails ends each time; another is predicted in between."""
    ended: list[type[Exception] | None] = []
    for rank in (8, 16, 32):
        try:
            predictor.predict(QV.model_copy(update={"lora_rank": rank}))
            ended.append(None)
        except SweepError as error:
            ended.append(type(error))
        assert predictor.predict(TrialConfig(lora_rank=rank)).peak_allocated_bytes > WEIGHTS
    return ended


DIED = EnvironmentFault("gave no answer")


@pytest.mark.parametrize(
    ("faults", "is_answered", "ended", "asked"),
    [
        # What cannot be traced is asked for once, and others are traced.
        ([Untraceable("no such modules")], False, [Untraceable] * 3, 2),
        ([InputError("no such modules")], False, [InputError] * 3, 2),
        # What died once is asked again; what always does is given up, sooner where others answer.
        ([DIED], False, [None] * 3, 3),
        ([DIED] * 9, False, [EnvironmentFault, Untraceable, Untraceable], 3),
        ([DIED] * 9, True, [Untraceable] * 3, 3),
    ],
)
def test_a_structure_that_fails_leaves_the_others_alone(
    tmp_path: Path, faults: list[Exception], is_answered: bool, ended: list[Any], asked: int
) -> None:
    tracer = FailingTracer(*faults)
    predictor = imagined(tmp_path, tracer)
    if is_answered:
        predictor.predict(TrialConfig())
    assert _asked_thrice(predictor) == ended
    assert len(tracer.asked) == asked


def test_tracing_that_dies_of_everything_is_given_up_and_what_is_kept_is_predicted(
    tmp_path: Path,
) -> None:
    kept = TrialConfig(target_modules="all-linear")
    imagined(tmp_path).predict(kept)
    tracer = FailingTracer(*[DIED] * 9, targets=("attention",))
    predictor = imagined(tmp_path, tracer)
    for upcast, kernels in itertools.product((True, False), ("hf", "fused-loss", "liger")):
        with pytest.raises((EnvironmentFault, Untraceable)):
            predictor.predict(TrialConfig(upcast_fp32=upcast, kernels=kernels))
    assert len(tracer.asked) == 2 * 3
    assert predictor.predict(kept).peak_allocated_bytes > WEIGHTS


def test_a_budget_far_off_is_decided_and_one_close_by_is_uncertain(predict: Predict) -> None:
    prediction = predict()
    low, high = prediction.peak_allocated_bytes * 0.95, prediction.peak_reserved_bytes * 1.1
    verdicts = [prediction.fits(int(budget)) for budget in np.linspace(low, high, 21)]
    assert [fit for fit, _ in itertools.groupby(verdicts)] == [Fit.NO, Fit.UNCERTAIN, Fit.YES]


# One configuration of each set of tensors that a space has


def test_they_need_the_structures_that_the_whole_space_needs(tmp_path: Any) -> None:
    few = {
        "seq_len": [512, 2048],
        "compute_dtype": ["bf16", "fp16", "int8"],
        "checkpoint_fraction": [0.0, 0.5, 1.0],
        "kernels": ["hf", "fused-loss", "liger"],
        "compile": [False, True],
        "quantization": ["nf4", "none", "int8"],
        "quantized_fraction": [0.5, 1.0],
    }
    own = {key: {"choices": values} for key, values in few.items()}
    space = load_space("a10").changed({"dimensions": own})
    tracers = [ImaginedTracer(window=1500, is_same_in_fp16=False) for _ in range(2)]
    every = [space.baseline_config(), *map(space.config, space.combinations())]
    kinds = list(one_of_each_kind(space))
    # Of each kind one, as long as the space goes.
    assert {config.seq_len for config in kinds[1:]} == {2048}
    assert len(kinds) == len(every) // 2 + 1
    for number, configs in enumerate((kinds, every)):
        cache = tmp_path / str(number)
        TracingPredictor(MODEL, cache_dir=cache, tracer=tracers[number]).predict_all(configs)
    assert set(tracers[0].asked) == set(tracers[1].asked)


# Bytes as polynomials, and the primes that give them back from one observed number

MISTRAL = (32768, 4096, 14336, 32, 8, 128)


@given(
    width=st.sampled_from(MISTRAL),
    powers=st.tuples(*[st.integers(0, 2)] * 3),
    itemsize=st.sampled_from([1, 2, 4, 8]),
)
def test_a_product_of_dimensions_and_symbols_gives_its_polynomial_back(
    width: int, powers: tuple[int, int, int], itemsize: int
) -> None:
    symbols = Symbols(MISTRAL, longest=32768)
    b, r, s = powers
    size = width * itemsize * 512 * symbols.b**b * symbols.r**r * symbols.s**s
    assert symbols.polynomial(size) == {"b" * b + "r" * r + "s" * s: width * itemsize * 512}


# Memory of many configurations at once: each needs what it needs alone, and what a plain walk


def test_a_compiled_kernel_is_benchmarked_before_the_optimizer_has_states(tmp_path: Path) -> None:
    predictor = imagined(tmp_path, ImaginedTracer(loss_bytes=0))
    eager = TrialConfig(upcast_fp32=False, checkpoint_fraction=0.0, micro_batch_size=8)
    compiled = eager.changed(compile=True)
    plain = predictor.predict(eager)
    known = predictor.predict(compiled)
    assert plain.step is not None
    assert known.step is not None
    assert plain.step.first_step_bytes == 0
    assert plain.moment == known.moment == "backward"
    more = known.peak_allocated_bytes - plain.peak_allocated_bytes
    assert more == known.step.first_step_bytes == 60 * 2**20 - sum(known.step.states)


def imagined(home: Path, tracer: ImaginedTracer | None = None) -> TracingPredictor:
    return TracingPredictor(MODEL, cache_dir=home, tracer=tracer or ImaginedTracer())


def steps_of(predictor: TracingPredictor, configs: list[TrialConfig]) -> list[Step]:
    return list(predictor.predict_all(configs).steps.values())


def test_each_of_many_configurations_needs_what_it_needs_alone(tmp_path: Path) -> None:
    predictor = imagined(tmp_path, ImaginedTracer(window=600))
    configs = mixed_configs(100, seed=1)
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


def test_what_cannot_be_traced_has_no_peak_and_others_have(tmp_path: Path) -> None:
    predictor = imagined(tmp_path, FailingTracer(InputError("no such modules")))
    configs = [TrialConfig(target_modules=modules) for modules in ("qv", "attention")]
    memory = predictor.predict_all(configs)
    assert memory.peak_allocated_bytes.tolist() == [
        -1,
        predictor.predict(configs[1]).peak_allocated_bytes,
    ]
    assert memory.quick_fits(10**15) == [Fit.UNCERTAIN, Fit.YES]
    assert [str(error) for error in memory.unpredicted.values()] == ["no such modules"]


def test_the_largest_sizes_that_can_be_typed_are_exact(tmp_path: Path) -> None:
    predictor = imagined(tmp_path, ImaginedTracer(window=600))
    huge = TrialConfig(micro_batch_size=65_536, seq_len=10_000_000)
    memory = predictor.predict_all([TrialConfig(), huge])
    prediction = memory.prediction(1)
    assert prediction.breakdown["loss"] == 64 * KIB * 65_536 * 10_000_000
    assert prediction.breakdown["activations"] > 65_536 * 10_000_000**2
    assert memory.quick_fits(10**15)[1] is Fit.NO


def test_near_the_budget_it_is_uncertain_whether_expandable_segments_fit(tmp_path: Path) -> None:
    memory = imagined(tmp_path).predict_all([TrialConfig(expandable_segments=True)])
    budget = int(memory.peak_allocated_bytes[0])
    fits = [memory.quick_fits(share * budget // 10)[0] for share in (5, 10, 20)]
    for fit, expected in zip(fits, (Fit.NO, Fit.UNCERTAIN, Fit.YES), strict=True):
        assert fit is expected


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


@pytest.fixture
def steps(tmp_path: Path) -> list[Step]:
    return steps_of(imagined(tmp_path), mixed_configs(60))


def replayed(steps: list[Step], **asked: Any) -> list[Uncapped]:
    found = {row: one for rows, one in replay_all(steps, **asked) for row in rows}
    return [found[row] for row in range(len(steps))]


@pytest.mark.parametrize("worth_processes", [1, 10_000])
def test_each_of_many_steps_comes_to_what_it_comes_to_alone(
    steps: list[Step], worth_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "WORTH_PROCESSES", worth_processes)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    # Equal ones are replayed once, and the large requests of others that ask for as large ones.
    assert replayed([*steps, *steps]) == [replay_uncapped(step) for step in steps] * 2


def test_what_a_step_comes_to_without_a_limit_decides_most_limits(tmp_path: Path) -> None:
    # Pairs whose large requests are alike, and few of whose small ones are.
    configs = mixed_configs(25, micro_batch_size=4, seq_len=512)
    configs += mixed_configs(25, micro_batch_size=8, seq_len=256)
    steps = steps_of(imagined(tmp_path), configs)
    found = replayed(steps, near=range(len(steps)))
    assert found == [replay_uncapped(step, is_near=True) for step in steps]
    for step, uncapped in zip(steps, found, strict=True):
        assert uncapped.twice_bytes is not None
        assert runs_under(step, limit_bytes=uncapped.twice_bytes)
        assert not runs_under(step, limit_bytes=uncapped.least_bytes - 1)


# The simulated caching allocator: sizes of blocks and segments, splitting, merging, the limit


def test_under_a_limit_free_segments_are_given_back_before_it_fails() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    kept = allocator.allocate(80 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    with pytest.raises(OutOfSegments):
        allocator.allocate(40 * MIB)
    allocator.free(kept)
    allocator.allocate(40 * MIB)


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
