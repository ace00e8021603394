"""What is predicted of memory against what was measured, and every uncertainty that is stated,
derived again from the committed rows that it is claimed for.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.predict.memory import prediction as memory
from qlora_sweep.sweep.predict.memory.peaks import KNOWN_PARTS
from qlora_sweep.sweep.predict.memory.predictor import (
    CPU_UNCERTAINTY,
    CpuMemory,
    Fit,
    MemoryPrediction,
)
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from qlora_sweep.sweep.predict.memory.replay import runs_under
from tests.sweep.predict.rows import (
    COMPILED,
    EDGES,
    EIGHT_BIT,
    GATED,
    GRPO,
    HELD_OUT,
    NEW_MODELS,
    PACKED,
    PAIRS,
    SEVERAL_GPUS,
    SHARED,
    TABLE,
    TRL,
    Predict,
    Row,
    config_of,
    describe,
    is_compiled,
    is_recomputed,
    is_sharded,
    read_rows,
)
from tests.sweep.training.tiny import BRIEF, measured, outcome_of

pytestmark = pytest.mark.integration
ROUNDING = 0.005
"""Statements are made in half percents."""
CAP_STEP, CAP_RANGE = 0.0025, 0.05
"""How finely, and how far from a budget, caps are tried in the replay."""


@dataclass(frozen=True)
class Statement:
    """What is stated, and how far rows were off what was predicted of them."""

    stated: float
    errors: Sequence[float]
    """Measured over predicted, less 1."""
    share: float = 1.0
    """Of the rows, for which it is claimed; the others may be further off."""

    @property
    def supported(self) -> float:
        """The least that the rows allow to state.

        The error that the claimed share stayed within, widened by 3 / rows: of so many that did, up
        to that share of new ones may not, at 95 % confidence. Four rows are widened by three
        quarters and a hundred by 3 %.
        """
        sizes = sorted(map(abs, self.errors))
        return sizes[round(self.share * len(sizes)) - 1] * (1 + 3 / len(sizes))


def _rows(
    *,
    compiled: bool,
    recomputed: bool | None = None,
    upcast: bool | None = None,
    eight_bit: bool = False,
) -> list[Row]:
    return [
        row
        for row in (*TABLE, *HELD_OUT, *COMPILED, *EIGHT_BIT, *GATED, *PACKED, *PAIRS)
        if is_compiled(row) is compiled
        and (not compiled or config_of(row).is_8bit_compute is eight_bit)
        and recomputed in (None, is_recomputed(row))
        and upcast in (None, row["config"]["upcast_fp32"])
    ]


def is_whole_on_each_gpu(row: Row) -> bool:
    return not (is_sharded(row) or is_compiled(row))


def _allocated(predict: Predict, rows: list[Row]) -> list[float]:
    return [row["peak_allocated_bytes"] / predict(row).peak_allocated_bytes - 1 for row in rows]


def _of_what_is_not_known(predict: Predict, rows: list[Row]) -> list[float]:
    """Return the error of each row's peak over what of it is not known exactly."""
    errors = []
    for row in rows:
        known = predict(row)
        exact = sum(known.breakdown[part] for part in KNOWN_PARTS)
        off = row["peak_allocated_bytes"] - known.peak_allocated_bytes
        errors.append(off / (known.peak_allocated_bytes - exact))
    return errors


def _reserved(predict: Predict, rows: list[Row]) -> list[float]:
    known = [row for row in rows if "peak_reserved_bytes" in row]
    return [row["peak_reserved_bytes"] / predict(row).peak_reserved_bytes - 1 for row in known]


def _capped(predict: Predict) -> list[float]:
    """How far each edge row's budget is on the wrong side of the cap that the replay needs."""
    rows = {config_of(row).key(): row for row in EDGES}.values()
    return [_wrong_side(predict(row), row) for row in rows]


def _wrong_side(prediction: MemoryPrediction, row: Row) -> float:
    """Return the change of the cap up to which the replay contradicts what was seen; 0 for none."""
    ran, worst = row["verdict"] == "fits", 0.0
    for step in range(round(CAP_RANGE / CAP_STEP)):
        change = step * CAP_STEP if ran else -step * CAP_STEP
        cap = int(row["budget_bytes"] * (1 + change))
        if runs_under(prediction.step, limit_bytes=cap) is not ran:
            worst = change
    return worst


KINDS: dict[str, tuple[memory.Uncertainty, list[Row]]] = {
    "eager": (
        memory.EAGER,
        [*_rows(compiled=False), *filter(is_whole_on_each_gpu, SEVERAL_GPUS)],
    ),
    "compiled": (memory.COMPILED, _rows(compiled=True, recomputed=False, upcast=False)),
    "compiled, upcast": (
        memory.COMPILED_UPCAST,
        _rows(compiled=True, recomputed=False, upcast=True),
    ),
    "compiled, 8 bits": (
        memory.COMPILED_8_BIT,
        _rows(compiled=True, recomputed=False, upcast=False, eight_bit=True),
    ),
    "sharded": (memory.SHARDED, [*filter(is_sharded, SEVERAL_GPUS), *SHARED]),
    "in TRL": (memory.IN_TRL, [*GRPO, *TRL]),
    "compiled, recomputed": (memory.COMPILED_RECOMPUTED, _rows(compiled=True, recomputed=True)),
}


STATEMENTS: dict[str, Callable[[Predict], Statement]] = {
    "least cap": lambda predict: Statement(memory.CAPPED, _capped(predict)),
}
for kind, (stated, rows) in KINDS.items():
    STATEMENTS[f"peak allocated, {kind}"] = lambda predict, stated=stated, rows=rows: Statement(
        stated.allocated, _of_what_is_not_known(predict, rows)
    )
    STATEMENTS[f"peak reserved, {kind}"] = lambda predict, stated=stated, rows=rows: Statement(
        stated.reserved, _reserved(predict, rows)
    )


@pytest.mark.parametrize("name", STATEMENTS)
def test_what_is_stated_covers_its_rows_and_hardly_more(predict_row: Predict, name: str) -> None:
    known = STATEMENTS[name](predict_row)
    assert known.supported <= known.stated <= 2 * known.supported + ROUNDING


def test_where_all_linear_layers_are_adapted_compiled_ones_are_predicted_to_a_tenth_of_a_percent(
    predict_row: Predict,
) -> None:
    rows = [row for row in (*COMPILED, *GATED) if row["config"]["target_modules"] == "all-linear"]
    assert len(rows) == 9
    assert max(map(abs, _allocated(predict_row, rows))) < 0.001


def test_what_fits_without_a_replay_fits_by_what_was_reserved(predict_row: Predict) -> None:
    worst = max(
        max(row["peak_reserved_bytes"], predict_row(row).peak_reserved_bytes)
        / min(row["peak_allocated_bytes"], predict_row(row).peak_allocated_bytes)
        for row in (*TABLE, *HELD_OUT)
    )
    assert worst <= memory.FRAGMENTATION <= 1.1 * worst


# What no constant was fitted to


@pytest.mark.parametrize("model", sorted({row["model"] for row in TABLE}))
def test_memory_is_right_to_half_a_percent(predict_row: Predict, model: str) -> None:
    rows = [row for row in TABLE if row["model"] == model]
    allocated = _allocated(predict_row, [row for row in rows if not is_compiled(row)])
    assert statistics.median(map(abs, allocated)) <= 0.002
    assert max(map(abs, allocated)) <= 0.005
    assert max(map(abs, _reserved(predict_row, rows))) <= 0.06


def test_every_other_configuration_is_within_what_is_stated(predict_row: Predict) -> None:
    for row in (*HELD_OUT, *NEW_MODELS):
        known = predict_row(row)
        (allocated,), (reserved,) = _allocated(predict_row, [row]), _reserved(predict_row, [row])
        assert abs(allocated) <= known.uncertainty, describe(row)
        assert abs(reserved) <= known.reserved_uncertainty, describe(row)


def test_at_the_edge_of_a_budget_no_sure_verdict_is_wrong(predict_row: Predict) -> None:
    """Only configurations that were tried close to a budget, under it."""
    right, likely = 0, 0
    for row in EDGES:
        known, budget, fits = predict_row(row), row["budget_bytes"], row["verdict"] == "fits"
        verdict = known.fits(budget)
        assert verdict is not (Fit.NO if fits else Fit.YES), describe(row)
        right += verdict is not Fit.UNCERTAIN
        likely += known.is_likely(budget) is fits
    assert right >= 0.6 * len(EDGES)
    assert likely >= 0.85 * len(EDGES)
    assert len(EDGES) >= 29


@pytest.mark.parametrize("gib", [6, 10, 16, 24])
def test_far_from_an_edge_nearly_all_are_sure(predict_row: Predict, gib: int) -> None:
    """Budgets that a measurement without a cap settles: easy ones, so all are to be right."""
    budget, verdicts = gib * 2**30, []
    for row in (*TABLE, *HELD_OUT):
        fits = row["peak_reserved_bytes"] <= budget
        if fits or row["peak_allocated_bytes"] > budget:
            verdicts.append(predict_row(row).fits(budget))
            assert verdicts[-1] is not (Fit.NO if fits else Fit.YES), describe(row)
    assert verdicts.count(Fit.UNCERTAIN) <= 0.03 * len(verdicts)


# The CPU

CPU_ROWS = Path(__file__).parents[3] / "data" / "cpu" / "peaks.jsonl"
"""The demo model under torch 2.13, bitsandbytes 0.50.2 and peft 0.21.2, 2026-11-23, by
`tests.bench.cpu_peaks` of commit 97b60c55."""


def test_peaks_on_a_cpu_are_within_what_is_stated_and_decide_alone_what_fits(
    tracing_child: TracingChildren, profile_cache: Path
) -> None:
    cpu = CpuMemory(load_model_spec("demo"), cache_dir=profile_cache, tracer=tracing_child)
    errors = []
    for row in map(json.loads, CPU_ROWS.read_text().splitlines()):
        peak = cpu.predict(parse_config(row["config"])).peak_allocated_bytes
        errors.append(peak / row["peak_allocated_bytes"] - 1)
    assert len(errors) == 46
    assert -0.02 < min(errors) <= max(errors) < CPU_UNCERTAINTY
    assert sorted(map(abs, errors))[len(errors) // 2] < 0.01
    known = cpu.predict(parse_config({"micro_batch_size": 4, "seq_len": 64}))
    peak = known.peak_allocated_bytes
    assert known.peak_reserved_bytes == peak
    verdicts = [known.fits(int(times * peak)) for times in (1.3, 1.0, 0.75)]
    assert verdicts == [Fit.YES, Fit.UNCERTAIN, Fit.NO]


def test_trls_head_on_a_cpu_takes_what_is_stated(
    tracing_child: TracingChildren, profile_cache: Path
) -> None:
    spec = load_model_spec("demo")
    cpu = CpuMemory(spec, cache_dir=profile_cache, tracer=tracing_child)
    config = TrialConfig(trainer="trl", upcast_fp32=False, micro_batch_size=4, seq_len=256)
    known = cpu.predict(config)
    found = measured(outcome_of(config, spec=spec, steps=BRIEF)).peak_allocated_bytes
    assert known.peak_allocated_bytes < found < known.peak_allocated_bytes * (1 + known.uncertainty)


# Two studies on an H100, a GPU that no rate, efficiency or memory profile was fitted to

ROWS = read_rows("studies_h100.jsonl")


def test_its_memory_is_predicted_as_an_h200s(predict_row: Predict) -> None:
    for row in ROWS:
        memory = predict_row(row)
        assert abs(memory.peak_allocated_bytes / row["peak_allocated_bytes"] - 1) < 0.0025
        assert abs(memory.peak_reserved_bytes / row["peak_reserved_bytes"] - 1) < 0.01


ON_HOST = Path("tests/bench/results/small_and_long_h200.jsonl")


def test_peaks_with_checkpoints_on_the_host_are_as_stated(predictor: Any) -> None:
    """Llama-3.1-8B in 4 bits on an H200: with all layers recomputed, and with three in eight."""
    seen = 0
    for line in ON_HOST.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("side") != "ours" or "peak_allocated_bytes" not in row:
            continue
        settings = {key: value for key, value in row["asked"].items() if key != "steps"}
        config = parse_config(settings)
        predicted = predictor(load_model_spec("llama-3.1-8b"), (9, 0)).predict(config)
        error = row["peak_allocated_bytes"] / predicted.peak_allocated_bytes - 1
        assert abs(error) <= predicted.uncertainty, row["asked"]
        seen += config.checkpoint_offload
    assert seen == 3
