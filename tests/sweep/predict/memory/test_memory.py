"""The memory prediction: its algebra on a profile written by hand, its truth on a GPU's peaks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.config import TrialConfig, parse_config
from search_spaces.errors import EnvironmentFault, InputError, SweepError
from search_spaces.loading import load_space
from search_spaces.models import ModelSpec
from search_spaces.space import SearchSpace
from sweep.predict.memory.allocator import MIB
from sweep.predict.memory.predictor import Fit, MemoryPrediction, TracingPredictor, one_of_each_kind
from sweep.predict.memory.profiles import Structure, Symbols, Untraceable
from tests.sweep.predict.memory.imagined_profile import (
    ADAPTER_ELEMENTS,
    KIB,
    LAYERS,
    MODEL,
    WEIGHTS,
    ImaginedTracer,
)

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
def test_every_layer_keeps_what_its_kind_keeps(
    predict: Predict, fraction: float, kept_by_layers: int
) -> None:
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
    ("optimizer", "bytes_by_tensor"),
    [
        ("adamw_8bit", 2 * 1024 * 16 + 2 * 512),
        ("adamw_torch_fused", 2 * 4 * 1024 * 16 + 512),
        ("paged_adamw_8bit", 2 * 1024 * 16 + 2 * 512),
    ],
)
def test_the_optimizer_keeps_its_states(
    predict: Predict, optimizer: str, bytes_by_tensor: int
) -> None:
    assert predict(optimizer=optimizer).breakdown["optimizer"] == LAYERS * bytes_by_tensor


def test_a_large_paged_state_is_not_on_the_card(predict: Predict) -> None:
    resident = predict(lora_rank=128, optimizer="adamw_8bit").breakdown["optimizer"]
    paged = predict(lora_rank=128, optimizer="paged_adamw_8bit").breakdown["optimizer"]
    assert paged == resident - LAYERS * 2 * 1024 * 128


def test_an_older_gpu_has_smaller_workspaces_and_before_ampere_no_flash_attention(
    tmp_path: Path,
) -> None:
    tracer = ImaginedTracer()

    def peak(capability: tuple[int, int] | None) -> int:
        about = {"cache_dir": tmp_path, "compute_capability": capability, "tracer": tracer}
        return TracingPredictor(MODEL, **about).predict(TrialConfig()).peak_allocated_bytes

    assert peak(None) == peak((9, 0))
    assert peak((9, 0)) - peak((8, 6)) == 2 * (32 * MIB - (8 * MIB + 128 * KIB))
    peak((7, 5))
    assert [structure.has_flash for structure in tracer.asked] == [True, False]


def test_a_structure_is_traced_once_and_then_read_from_disk(tmp_path: Path) -> None:
    other = ModelSpec("other", "directory", {**MODEL.config, "hidden_size": 128})
    counts = []
    for model in (MODEL, MODEL, other):
        tracer = ImaginedTracer()
        predictor = TracingPredictor(model, cache_dir=tmp_path, tracer=tracer)
        for batch in (1, 2, 3):
            predictor.predict(TrialConfig(micro_batch_size=batch, lora_rank=8 * batch))
        counts.append(len(tracer.asked))
    assert counts == [1, 0, 1]


def test_a_cache_that_cannot_be_read_or_written_costs_nothing_but_time(tmp_path: Path) -> None:
    TracingPredictor(MODEL, cache_dir=tmp_path, tracer=ImaginedTracer()).predict(TrialConfig())
    for path in tmp_path.iterdir():
        path.write_text("{")
    (tmp_path / "file").touch()
    for cache in (tmp_path, tmp_path / "file" / "cache"):
        tracer = ImaginedTracer()
        TracingPredictor(MODEL, cache_dir=cache, tracer=tracer).predict(TrialConfig())
        assert len(tracer.asked) == 1


class FailingTracer(ImaginedTracer):
    """Fails at what has adapters on q and v, as often as it has faults for it."""

    def __init__(self, *faults: Exception) -> None:
        super().__init__()
        self._faults = list(faults)

    def trace(self, model: ModelSpec, structure: Structure) -> dict[str, Any]:
        profile = super().trace(model, structure)
        if structure.config.target_modules == "qv" and self._faults:
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
    predictor = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=tracer)
    if is_answered:
        predictor.predict(TrialConfig())
    assert _asked_thrice(predictor) == ended
    assert len(tracer.asked) == asked


class DeadTracer(ImaginedTracer):
    """Dies of every structure while it is dead."""

    is_dead = True

    def trace(self, model: ModelSpec, structure: Structure) -> dict[str, Any]:
        profile = super().trace(model, structure)
        if self.is_dead:
            raise EnvironmentFault("gave no answer")
        return profile


def _structures(count: int) -> Iterator[TrialConfig]:
    """So many configurations of a structure each."""
    knobs = itertools.product((True, False), ("hf", "fused-loss", "liger"), ("qv", "attention"))
    for upcast, kernels, targets in itertools.islice(knobs, count):
        yield TrialConfig(upcast_fp32=upcast, kernels=kernels, target_modules=targets)


def test_a_tracing_process_that_dies_of_every_structure_is_not_started_again(
    tmp_path: Path,
) -> None:
    tracer = DeadTracer()
    predictor = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=tracer)
    reasons = set()
    for config in _structures(10):
        with pytest.raises((EnvironmentFault, Untraceable)) as caught:
            predictor.predict(config)
        reasons.add(str(caught.value))
    assert len(tracer.asked) == 2 * 3
    assert reasons == {"model 'imagined' cannot be traced: gave no answer"}
    assert caught.type is Untraceable


def test_what_is_kept_on_disk_is_predicted_when_the_tracing_process_is_given_up(
    tmp_path: Path,
) -> None:
    kept = TrialConfig(target_modules="all-linear")
    TracingPredictor(MODEL, cache_dir=tmp_path, tracer=ImaginedTracer()).predict(kept)
    predictor = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=DeadTracer())
    for config in _structures(3):
        with pytest.raises((EnvironmentFault, Untraceable)):
            predictor.predict(config)
    assert predictor.predict(kept).peak_allocated_bytes > WEIGHTS


def test_one_answer_in_between_and_a_tracing_process_may_die_again(tmp_path: Path) -> None:
    tracer = DeadTracer()
    predictor = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=tracer)
    for number, config in enumerate(_structures(8)):
        tracer.is_dead = number % 3 != 2
        with contextlib.suppress(EnvironmentFault, Untraceable):
            predictor.predict(config)
    assert len(tracer.asked) == 3 * 2 * 2 + 2


def test_from_the_attention_window_on_masks_are_counted(predict: Predict) -> None:
    below = predict(ImaginedTracer(window=513))
    at = predict(ImaginedTracer(window=512))
    assert at.peak_allocated_bytes - below.peak_allocated_bytes == 2 * 512 * 512


def test_a_budget_far_off_is_decided_and_one_close_by_is_uncertain(predict: Predict) -> None:
    prediction = predict()
    low, high = prediction.peak_allocated_bytes * 0.95, prediction.peak_reserved_bytes * 1.1
    budgets = [int(low + (high - low) * step / 20) for step in range(21)]
    verdicts = [prediction.fits(budget) for budget in budgets]
    assert list(dict.fromkeys(verdicts)) == [Fit.NO, Fit.UNCERTAIN, Fit.YES]
    assert verdicts == sorted(verdicts, key=[Fit.NO, Fit.UNCERTAIN, Fit.YES].index)


def test_a_compiled_configuration_is_less_certain(predict: Predict) -> None:
    assert predict(compile=True).uncertainty > predict().uncertainty


# One configuration of each set of tensors that a space has


def a_space(**dimensions: Any) -> SearchSpace:
    values = {"lora_rank": {"choices": (4, 8)}, **dimensions}
    return SearchSpace(name="mine", gpu="a10", dimensions=values)


@pytest.mark.parametrize(
    ("dimensions", "kinds"),
    [
        ({}, 1),
        ({"seq_len": {"choices": (64, 512)}, "micro_batch_size": {"choices": (1, 2, 3)}}, 1),
        ({"kernels": {"choices": ("hf", "liger")}, "upcast_fp32": {"choices": (True, False)}}, 4),
        ({"quantization": {"choices": ("nf4", "fp4", "none")}}, 2),
        ({"lora_dropout": {"low": 0.0, "high": 0.1}}, 2),
        ({"lora_dropout": {"low": 0.05, "high": 0.1}}, 1),
        ({"checkpoint_fraction": {"low": 0.0, "high": 1.0, "step": 0.05}}, 3),
        ({"checkpoint_fraction": {"low": 0.0, "high": 1.0}}, 3),
        ({"checkpoint_fraction": {"choices": (0.25, 0.5)}}, 1),
    ],
)
def test_values_that_only_scale_tensors_make_no_kind(
    dimensions: dict[str, Any], kinds: int
) -> None:
    space = a_space(**dimensions)
    baseline, *configs = one_of_each_kind(space)
    assert baseline == space.baseline_config()
    assert len(configs) == len(set(configs)) == kinds
    assert all(space.params_of(config) is not None for config in configs)
    # Each is as long as the space goes.
    assert {config.seq_len for config in configs} == {max(space.values_of("seq_len"))}


def test_they_need_the_structures_that_the_whole_preset_needs(tmp_path: Any) -> None:
    space = load_space("a10")
    tracers = [ImaginedTracer(window=1500, is_same_in_fp16=False) for _ in range(2)]
    every = [space.baseline_config(), *map(space.config, space.combinations())]
    for number, configs in enumerate((list(one_of_each_kind(space)), every)):
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


@pytest.mark.parametrize("step", [1, -1])
def test_a_sequence_with_one_token_more_or_less_is_a_sum(step: int) -> None:
    symbols = Symbols(MISTRAL)
    size = symbols.b * (symbols.s + step) * 8
    assert symbols.polynomial(size) == {"bs": 8, "b": 8 * step}


def test_what_depends_on_no_symbol_is_rounded_as_the_allocator_rounds_it() -> None:
    symbols = Symbols(MISTRAL)
    assert symbols.polynomial(4) == {"": 512}
    assert symbols.polynomial(0) == {}


def test_the_length_stays_within_the_positions_and_on_its_side_of_the_window() -> None:
    assert Symbols(MISTRAL, longest=2048).s <= 2048
    assert Symbols(MISTRAL, longer_than=4096).s > 4096


def test_no_symbol_hides_in_a_dimension() -> None:
    symbols = Symbols([20011 * 4, 19997])
    primes = {symbols.b, symbols.s, symbols.r, symbols.c, symbols.p}
    assert {20011, 19997}.isdisjoint(primes)
    assert len(primes) == 5


def test_a_length_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no traceable length"):
        Symbols(MISTRAL, longest=64)
