"""The memory prediction: its algebra on a profile written by hand, its truth on a card's peaks."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig, parse_config
from search_spaces.model_files import load_model_spec
from search_spaces.models import ModelSpec
from sweep.predict.allocator import MIB
from sweep.predict.child import TracingChild
from sweep.predict.memory import Fit, MemoryPrediction, MemoryPredictor
from tests.sweep.predict.imagined_profile import (
    ADAPTER_ELEMENTS,
    KIB,
    LAYERS,
    MODEL,
    WEIGHTS,
    ImaginedTracer,
)

WORKSPACES = 64 * MIB
MEASURED = Path(__file__).parents[2] / "data" / "measurements_h200.jsonl"


@pytest.fixture
def predict(tmp_path: Path) -> Callable[..., MemoryPrediction]:
    def predicted(tracer: ImaginedTracer | None = None, **keys: Any) -> MemoryPrediction:
        tracer = tracer or ImaginedTracer()
        predictor = MemoryPredictor(MODEL, cache_dir=tmp_path / str(id(tracer)), tracer=tracer)
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
        predictor = MemoryPredictor(
            MODEL, cache_dir=tmp_path, compute_capability=capability, tracer=ImaginedTracer()
        )
        return predictor.predict(TrialConfig()).peak_allocated_bytes

    assert peak(None) == peak((9, 0))
    assert peak((9, 0)) - peak((8, 6)) == 2 * (32 * MIB - (8 * MIB + 128 * KIB))


def test_a_card_before_ampere_has_no_flash_attention(tmp_path: Path) -> None:
    tracer = ImaginedTracer()
    for capability in ((7, 5), (8, 0)):
        predictor = MemoryPredictor(
            MODEL, cache_dir=tmp_path, compute_capability=capability, tracer=tracer
        )
        predictor.predict(TrialConfig())
    assert [structure.has_flash for structure in tracer.asked] == [False, True]


def test_a_structure_is_traced_once_and_then_read_from_disk(tmp_path: Path) -> None:
    first, second = ImaginedTracer(), ImaginedTracer()
    for tracer in (first, second):
        predictor = MemoryPredictor(MODEL, cache_dir=tmp_path, tracer=tracer)
        for batch in (1, 2, 3):
            predictor.predict(TrialConfig(micro_batch_size=batch, lora_rank=8 * batch))
    assert (len(first.asked), len(second.asked)) == (1, 0)


def test_a_damaged_cache_is_traced_again(tmp_path: Path) -> None:
    MemoryPredictor(MODEL, cache_dir=tmp_path, tracer=ImaginedTracer()).predict(TrialConfig())
    for path in tmp_path.iterdir():
        path.write_text("{")
    tracer = ImaginedTracer()
    MemoryPredictor(MODEL, cache_dir=tmp_path, tracer=tracer).predict(TrialConfig())
    assert len(tracer.asked) == 1


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    predictor = MemoryPredictor(
        MODEL, cache_dir=tmp_path / "file" / "cache", tracer=ImaginedTracer()
    )
    assert predictor.predict(TrialConfig()).peak_allocated_bytes > WEIGHTS


def test_another_model_is_another_structure(tmp_path: Path) -> None:
    other = ModelSpec("other", "directory", {**MODEL.config, "hidden_size": 128})
    tracer = ImaginedTracer()
    for model in (MODEL, other):
        MemoryPredictor(model, cache_dir=tmp_path, tracer=tracer).predict(TrialConfig())
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


# What a card measured. No constant of the predictor was fitted to these rows.

ROWS = (
    [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]
    if MEASURED.exists()
    else []
)
MODELS = sorted({row["model"] for row in ROWS})


@pytest.fixture(scope="module")
def errors(tracing_child: TracingChild, profile_cache: Path) -> dict[str, list[dict[str, Any]]]:
    """Relative errors of every measured row, by model."""
    if not ROWS:
        pytest.skip(f"no measurements at {MEASURED}")
    result: dict[str, list[dict[str, Any]]] = {}
    for name in MODELS:
        predictor = MemoryPredictor(
            load_model_spec(name), cache_dir=profile_cache, tracer=tracing_child
        )
        result[name] = [
            _error(predictor, row)
            for row in ROWS
            if row["model"] == name and "peak_allocated_bytes" in row
        ]
    return result


def _error(predictor: MemoryPredictor, row: dict[str, Any]) -> dict[str, Any]:
    config = parse_config(row["config"])
    prediction = predictor.predict(config)
    return {
        "changes": config.changes_from(TrialConfig()),
        "is_compiled": config.compile,
        "allocated": prediction.peak_allocated_bytes / row["peak_allocated_bytes"] - 1,
        "reserved": prediction.peak_reserved_bytes / row["peak_reserved_bytes"] - 1,
    }


@pytest.mark.parametrize("model", MODELS)
def test_allocated_memory_is_right_to_a_percent_and_never_under_by_more(
    errors: dict[str, list[dict[str, Any]]], model: str
) -> None:
    eager = [row for row in errors[model] if not row["is_compiled"]]
    worst = max(eager, key=lambda row: abs(row["allocated"]))
    assert statistics.median(abs(row["allocated"]) for row in eager) <= 0.002, eager
    assert min(row["allocated"] for row in eager) >= -0.005, worst
    assert max(row["allocated"] for row in eager) <= 0.005, worst


@pytest.mark.parametrize("model", MODELS)
def test_reserved_memory_is_right_to_eight_percent(
    errors: dict[str, list[dict[str, Any]]], model: str
) -> None:
    worst = max(errors[model], key=lambda row: abs(row["reserved"]))
    assert abs(worst["reserved"]) <= 0.08, worst


def test_compiled_layers_are_predicted_within_their_uncertainty(
    errors: dict[str, list[dict[str, Any]]],
) -> None:
    compiled = [row for rows in errors.values() for row in rows if row["is_compiled"]]
    assert compiled
    assert all(abs(row["allocated"]) <= 0.1 for row in compiled), compiled


def test_the_table_covers_what_it_must() -> None:
    assert len(ROWS) >= 60
    assert len(MODELS) >= 4
    assert {row["config"]["kernels"] for row in ROWS} == {"hf", "fused-loss", "liger"}


def test_a_structure_that_is_known_is_predicted_in_milliseconds(
    tracing_child: TracingChild, profile_cache: Path
) -> None:
    predictor = MemoryPredictor(
        load_model_spec("mistral-7b-v0.3"), cache_dir=profile_cache, tracer=tracing_child
    )
    configs = [TrialConfig(micro_batch_size=b, lora_rank=r) for b in range(1, 21) for r in (8, 64)]
    predictor.predict(configs[0])
    begun = time.perf_counter()
    for config in configs:
        predictor.predict(config)
    assert (time.perf_counter() - begun) / len(configs) <= 0.005
