"""The memory prediction: its algebra on a profile written by hand, its truth on a GPU's peaks."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig, parse_config
from search_spaces.errors import EnvironmentFault, InputError, SweepError
from search_spaces.models import ModelSpec, load_model_spec
from sweep.predict.memory.allocator import MIB
from sweep.predict.memory.predictor import Fit, MemoryPrediction, TracingPredictor
from sweep.predict.memory.profile_store import TracingChildren
from sweep.predict.memory.profiles import Structure, Untraceable
from tests.sweep.predict.memory.imagined_profile import (
    ADAPTER_ELEMENTS,
    KIB,
    LAYERS,
    MODEL,
    WEIGHTS,
    ImaginedTracer,
)
from tests.sweep.predict.rows import TABLE, Predict, describe, is_compiled

WORKSPACES = 64 * MIB


@pytest.fixture
def predict(tmp_path: Path) -> Callable[..., MemoryPrediction]:
    caches = itertools.count()

    def predicted(tracer: ImaginedTracer | None = None, **keys: Any) -> MemoryPrediction:
        tracer = tracer or ImaginedTracer()
        predictor = TracingPredictor(MODEL, cache_dir=tmp_path / str(next(caches)), tracer=tracer)
        return predictor.predict(parse_config({"micro_batch_size": 2, "seq_len": 512, **keys}))

    return predicted


def test_the_breakdown_sums_to_the_peak(predict: Callable[..., MemoryPrediction]) -> None:
    prediction = predict(checkpoint_fraction=0.5, effective_batch_size=8)
    assert sum(prediction.breakdown.values()) == prediction.peak_allocated_bytes
    assert set(prediction.breakdown) == {
        "weights",
        "adapters",
        "gradients",
        "optimizer",
        "activations",
        "loss",
    }


@pytest.mark.parametrize(
    ("fraction", "kept_by_layers"), [(1.0, 1 * LAYERS), (0.0, 4 * LAYERS), (0.5, 2 * 1 + 2 * 4)]
)
def test_every_layer_keeps_what_its_kind_keeps(
    predict: Callable[..., MemoryPrediction], fraction: float, kept_by_layers: int
) -> None:
    prediction = predict(checkpoint_fraction=fraction)
    assert prediction.moment == "loss"
    assert prediction.breakdown["loss"] == 64 * KIB * 1024
    assert prediction.breakdown["activations"] == WORKSPACES + kept_by_layers * KIB * 1024


def test_the_peak_is_in_the_last_layer_where_the_loss_is_small(
    predict: Callable[..., MemoryPrediction],
) -> None:
    prediction = predict(ImaginedTracer(loss_bytes=0), checkpoint_fraction=0.0)
    assert prediction.moment == "backward"
    assert prediction.breakdown["activations"] == WORKSPACES + (16 + 10) * KIB * 1024


def test_accumulated_gradients_are_there_throughout(
    predict: Callable[..., MemoryPrediction],
) -> None:
    once, accumulated = predict(), predict(effective_batch_size=4)
    assert once.breakdown["gradients"] == 0
    assert accumulated.breakdown["gradients"] == accumulated.breakdown["adapters"]
    assert accumulated.breakdown["adapters"] == LAYERS * 4 * ADAPTER_ELEMENTS * 16


@pytest.mark.parametrize(
    ("optimizer", "bytes_by_tensor"),
    [
        ("adamw_8bit", 2 * 1024 * 16 + 2 * 512),
        ("adamw_torch_fused", 2 * 4 * 1024 * 16 + 512),
        ("paged_adamw_8bit", 2 * 1024 * 16 + 2 * 512),
    ],
)
def test_the_optimizer_keeps_its_states(
    predict: Callable[..., MemoryPrediction], optimizer: str, bytes_by_tensor: int
) -> None:
    assert predict(optimizer=optimizer).breakdown["optimizer"] == LAYERS * bytes_by_tensor


def test_a_large_paged_state_is_not_on_the_card(
    predict: Callable[..., MemoryPrediction],
) -> None:
    resident = predict(lora_rank=128, optimizer="adamw_8bit").breakdown["optimizer"]
    paged = predict(lora_rank=128, optimizer="paged_adamw_8bit").breakdown["optimizer"]
    assert paged == resident - LAYERS * 2 * 1024 * 128


def test_a_huge_rank_peaks_at_the_update(predict: Callable[..., MemoryPrediction]) -> None:
    prediction = predict(micro_batch_size=1, seq_len=1, lora_rank=4096)
    assert prediction.moment == "optimizer"
    assert prediction.breakdown["gradients"] == prediction.breakdown["adapters"]


def test_an_older_card_has_smaller_workspaces(tmp_path: Path) -> None:
    def peak(capability: tuple[int, int] | None) -> int:
        predictor = TracingPredictor(
            MODEL, cache_dir=tmp_path, compute_capability=capability, tracer=ImaginedTracer()
        )
        return predictor.predict(TrialConfig()).peak_allocated_bytes

    assert peak(None) == peak((9, 0))
    assert peak((9, 0)) - peak((8, 6)) == 2 * (32 * MIB - (8 * MIB + 128 * KIB))


def test_a_card_before_ampere_has_no_flash_attention(tmp_path: Path) -> None:
    tracer = ImaginedTracer()
    for capability in ((7, 5), (8, 0)):
        predictor = TracingPredictor(
            MODEL, cache_dir=tmp_path, compute_capability=capability, tracer=tracer
        )
        predictor.predict(TrialConfig())
    assert [structure.has_flash for structure in tracer.asked] == [False, True]


def test_a_structure_is_traced_once_and_then_read_from_disk(tmp_path: Path) -> None:
    first, second = ImaginedTracer(), ImaginedTracer()
    for tracer in (first, second):
        predictor = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=tracer)
        for batch in (1, 2, 3):
            predictor.predict(TrialConfig(micro_batch_size=batch, lora_rank=8 * batch))
    assert (len(first.asked), len(second.asked)) == (1, 0)


def test_a_damaged_cache_is_traced_again(tmp_path: Path) -> None:
    TracingPredictor(MODEL, cache_dir=tmp_path, tracer=ImaginedTracer()).predict(TrialConfig())
    for path in tmp_path.iterdir():
        path.write_text("{")
    tracer = ImaginedTracer()
    TracingPredictor(MODEL, cache_dir=tmp_path, tracer=tracer).predict(TrialConfig())
    assert len(tracer.asked) == 1


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    predictor = TracingPredictor(
        MODEL, cache_dir=tmp_path / "file" / "cache", tracer=ImaginedTracer()
    )
    assert predictor.predict(TrialConfig()).peak_allocated_bytes > WEIGHTS


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


@pytest.mark.parametrize("kind", [Untraceable, InputError])
def test_a_structure_that_cannot_be_traced_is_asked_for_once_and_others_are_traced(
    tmp_path: Path, kind: type[InputError]
) -> None:
    tracer = FailingTracer(kind("no such modules"))
    predictor = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=tracer)
    assert _asked_thrice(predictor) == [kind] * 3
    assert len(tracer.asked) == 2


def test_a_tracing_process_that_died_once_is_asked_again(tmp_path: Path) -> None:
    tracer = FailingTracer(EnvironmentFault("gave no answer"))
    predictor = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=tracer)
    assert _asked_thrice(predictor) == [None] * 3


def test_a_structure_that_always_kills_the_tracing_process_is_given_up(tmp_path: Path) -> None:
    tracer = FailingTracer(*[EnvironmentFault("gave no answer")] * 9)
    predictor = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=tracer)
    assert _asked_thrice(predictor) == [EnvironmentFault, Untraceable, Untraceable]
    assert len(tracer.asked) == 3


def test_it_is_the_structures_fault_where_others_were_answered(tmp_path: Path) -> None:
    tracer = FailingTracer(*[EnvironmentFault("gave no answer")] * 9)
    predictor = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=tracer)
    predictor.predict(TrialConfig())
    assert _asked_thrice(predictor) == [Untraceable] * 3


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


def test_another_model_is_another_structure(tmp_path: Path) -> None:
    other = ModelSpec("other", "directory", {**MODEL.config, "hidden_size": 128})
    tracer = ImaginedTracer()
    for model in (MODEL, other):
        TracingPredictor(model, cache_dir=tmp_path, tracer=tracer).predict(TrialConfig())
    assert len(tracer.asked) == 2


def test_from_the_attention_window_on_masks_are_counted(
    predict: Callable[..., MemoryPrediction],
) -> None:
    below = predict(ImaginedTracer(window=513))
    at = predict(ImaginedTracer(window=512))
    assert at.peak_allocated_bytes - below.peak_allocated_bytes == 2 * 512 * 512


def test_reserved_memory_holds_what_is_allocated(
    predict: Callable[..., MemoryPrediction],
) -> None:
    prediction = predict()
    assert prediction.peak_reserved_bytes >= prediction.peak_allocated_bytes
    assert prediction.peak_reserved_bytes % (2 * MIB) == MIB  # as much as the base has


def test_a_budget_far_off_is_decided_and_one_close_by_is_uncertain(
    predict: Callable[..., MemoryPrediction],
) -> None:
    prediction = predict()
    low, high = prediction.peak_allocated_bytes * 0.95, prediction.peak_reserved_bytes * 1.1
    budgets = [int(low + (high - low) * step / 20) for step in range(21)]
    verdicts = [prediction.fits(budget) for budget in budgets]
    assert list(dict.fromkeys(verdicts)) == [Fit.NO, Fit.UNCERTAIN, Fit.YES]
    assert verdicts == sorted(verdicts, key=[Fit.NO, Fit.UNCERTAIN, Fit.YES].index)


def test_a_compiled_configuration_is_less_certain(
    predict: Callable[..., MemoryPrediction],
) -> None:
    assert predict(compile=True).uncertainty > predict().uncertainty


# What a GPU measured. No constant of the predictor was fitted to these rows; what it states of its
# own accuracy is held against them in `test_stated_uncertainty.py`.

MODELS = sorted({row["model"] for row in TABLE})


def _errors(predict_row: Predict, *, model: str) -> dict[str, float]:
    """Predicted over measured, less 1, of the rows of a model that are not compiled."""
    return {
        describe(row): predict_row(row).peak_allocated_bytes / row["peak_allocated_bytes"] - 1
        for row in TABLE
        if row["model"] == model and not is_compiled(row)
    }


@pytest.mark.parametrize("model", MODELS)
def test_allocated_memory_is_right_to_half_a_percent(predict_row: Predict, model: str) -> None:
    errors = _errors(predict_row, model=model)
    assert statistics.median(map(abs, errors.values())) <= 0.002
    assert {name: error for name, error in errors.items() if abs(error) > 0.005} == {}


@pytest.mark.parametrize("model", MODELS)
def test_reserved_memory_is_right_to_six_percent(predict_row: Predict, model: str) -> None:
    errors = {
        describe(row): predict_row(row).peak_reserved_bytes / row["peak_reserved_bytes"] - 1
        for row in TABLE
        if row["model"] == model
    }
    assert {name: error for name, error in errors.items() if abs(error) > 0.06} == {}


def test_the_table_covers_what_it_must() -> None:
    assert len(TABLE) >= 60
    assert len(MODELS) >= 4
    assert {row["config"]["kernels"] for row in TABLE} == {"hf", "fused-loss", "liger"}


def test_a_structure_that_is_known_is_predicted_without_another_trace(
    tracing_child: TracingChildren, profile_cache: Path
) -> None:
    predictor = TracingPredictor(
        load_model_spec("mistral-7b-v0.3"), cache_dir=profile_cache, tracer=tracing_child
    )
    predictor.predict(TrialConfig())
    known = sorted(profile_cache.iterdir())
    for micro_batch in range(1, 21):
        for rank in (8, 64):
            predictor.predict(TrialConfig(micro_batch_size=micro_batch, lora_rank=rank))
    assert sorted(profile_cache.iterdir()) == known
