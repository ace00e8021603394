"""What is predicted of other trainers' steps, derived again from what was measured of them."""

from __future__ import annotations

import math
import statistics

import pytest

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.sweep.predict.forecast import Forecaster
from qlora_sweep.sweep.predict.memory.peaks import KNOWN_PARTS
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.speed.predictor import NINE_IN_TEN
from qlora_sweep.sweep.predict.trainers import UNSLOTH, Factors, for_memory
from tests.sweep.imagined_study import MISTRAL
from tests.sweep.predict.forecasters import forecaster_on
from tests.sweep.predict.rows import Row, read_rows

ROWS: list[Row] = read_rows("unsloth_h200.jsonl")


@pytest.fixture(scope="module")
def forecaster(profile_cache, tracing_child) -> Forecaster:  # type: ignore[no-untyped-def]
    predictor = TracingPredictor(
        MISTRAL, cache_dir=profile_cache, compute_capability=(9, 0), tracer=tracing_child
    )
    return forecaster_on("h200", MISTRAL, predictor=predictor)


def _config(row: Row) -> TrialConfig:
    return parse_config(row["config"])


def _rows(base: str, is_recomputed: bool) -> list[Row]:
    return [
        row
        for row in ROWS
        if row["config"]["quantization"] == base
        and (row["config"]["checkpoint_fraction"] == 1) is is_recomputed
    ]


@pytest.mark.parametrize("mode", UNSLOTH)
def test_unsloths_factors_are_those_of_its_rows(
    forecaster: Forecaster, mode: tuple[str, bool]
) -> None:
    stated: Factors = UNSLOTH[mode]
    bytes_over, logs = [], []
    rows = _rows(*mode)
    for row in rows:
        stand_in = forecaster.expect(for_memory(_config(row))).memory
        assert stand_in is not None
        known_bytes = sum(stand_in.breakdown[part] for part in KNOWN_PARTS)
        varying_bytes = stand_in.peak_allocated_bytes - known_bytes
        bytes_over.append((row["peak_allocated_gib"] * GIB - known_bytes) / varying_bytes)
        logs.append(math.log(row["beside_tokens_per_second"] / row["tokens_per_second"]))
    assert stated.activations == pytest.approx(statistics.mean(bytes_over), abs=0.005)
    middle = statistics.mean(logs)
    assert stated.seconds == pytest.approx(math.exp(middle), abs=0.005)
    worst = max(abs(log - middle) for log in logs) * (1 + 3 / len(rows))
    assert stated.log_spread == pytest.approx(worst / NINE_IN_TEN, abs=0.002)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["peak_allocated_gib"]))
def test_a_measured_step_of_unsloth_is_predicted_with_its_interval(
    forecaster: Forecaster, row: Row
) -> None:
    found = forecaster.expect(_config(row))
    assert found.memory is not None
    peak = found.memory.peak_allocated_bytes
    assert row["peak_allocated_gib"] * GIB == pytest.approx(peak, rel=found.memory.uncertainty)
    low, high = found.speed_estimate.ends
    assert low <= row["tokens_per_second"] <= high


def test_a_mask_costs_memory_where_a_trainer_passes_one(forecaster: Forecaster) -> None:
    def peak(trainer: str, **changes: object) -> int:
        config = TrialConfig(trainer="sweep", adapter_dtype="bf16", upcast_fp32=False)
        known = forecaster.expect(config.changed(trainer=trainer, **changes)).memory
        assert known is not None
        return known.peak_allocated_bytes

    lean = {"checkpoint_fraction": 0.0, "kernels": "liger", "micro_batch_size": 8}
    assert peak("trl", **lean) > 1.05 * peak("sweep", **lean)
    # A row alone is as wide as it is long, and examples are packed into it in axolotl alone.
    alone = {**lean, "micro_batch_size": 1}
    assert peak("trl", **alone) == pytest.approx(peak("sweep", **alone), rel=0.05)
    assert peak("axolotl", **alone) > peak("sweep", **alone)
    assert peak("llama-factory", **lean) == peak("sweep", **lean)
