"""The memory prediction on what it was not looked at with: random configurations, and the edge."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig, parse_config
from search_spaces.model_files import load_model_spec
from sweep.predict.child import TracingChild
from sweep.predict.memory import Fit, MemoryPrediction, MemoryPredictor

DATA = Path(__file__).parents[2] / "data"
GIB = 2**30
BUDGETS = tuple(size * GIB for size in (6, 8, 10, 12, 16, 20, 24, 32))
"""Of cards of many sizes, for rows that were measured without a cap."""

Row = dict[str, Any]
Predict = Callable[[Row], MemoryPrediction]


def _rows(name: str) -> list[Row]:
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


HELD_OUT = [row for row in _rows("held_out_h200.jsonl") if "peak_allocated_bytes" in row]
MEASURED = [row for row in _rows("measurements_h200.jsonl") if "peak_allocated_bytes" in row]
EDGES = _rows("edges_h200.jsonl")


@pytest.fixture(scope="module")
def predict(tracing_child: TracingChild, profile_cache: Path) -> Predict:
    predictors: dict[str, MemoryPredictor] = {}

    def predicted(row: Row) -> MemoryPrediction:
        name = row["model"]
        if name not in predictors:
            directory = DATA / "models" / name
            spec = load_model_spec(str(directory) if directory.exists() else name)
            predictors[name] = MemoryPredictor(spec, cache_dir=profile_cache, tracer=tracing_child)
        return predictors[name].predict(parse_config(row["config"]))

    return predicted


@pytest.fixture(scope="module")
def errors(predict: Predict) -> list[Row]:
    """Relative errors of every held-out row."""
    return [_error(row, predict(row)) for row in HELD_OUT]


def _error(row: Row, prediction: MemoryPrediction) -> Row:
    config = parse_config(row["config"])
    return {
        "model": row["model"],
        "changes": config.changes_from(TrialConfig()),
        "is_compiled": config.compile,
        "allocated": prediction.peak_allocated_bytes / row["peak_allocated_bytes"] - 1,
        "reserved": prediction.peak_reserved_bytes / row["peak_reserved_bytes"] - 1,
        "uncertainty": prediction.uncertainty,
    }


def test_random_configurations_are_right_to_three_percent_and_at_most_one_under(
    errors: list[Row],
) -> None:
    plain = [row for row in errors if not row["is_compiled"]]
    assert len(plain) >= 50
    assert statistics.median(abs(row["allocated"]) for row in plain) <= 0.01
    assert [row for row in plain if not -0.01 <= row["allocated"] <= 0.03] == []


def test_random_compiled_configurations_are_within_their_uncertainty(errors: list[Row]) -> None:
    compiled = [row for row in errors if row["is_compiled"]]
    assert compiled
    assert [row for row in compiled if abs(row["allocated"]) > row["uncertainty"]] == []


def test_reserved_memory_of_random_configurations_is_close(errors: list[Row]) -> None:
    assert statistics.median(abs(row["reserved"]) for row in errors) <= 0.02
    assert [row for row in errors if not -0.08 <= row["reserved"] <= 0.12] == []


def test_a_verdict_that_is_not_uncertain_is_right(predict: Predict) -> None:
    known = [(row["verdict"] == "fits", predict(row).fits(row["budget_bytes"])) for row in EDGES]
    assert sum(verdict is Fit.UNCERTAIN for _, verdict in known) <= 0.4 * len(known)
    known += [pair for row in MEASURED for pair in _settled(row, predict(row))]
    decided = [(fits, verdict) for fits, verdict in known if verdict is not Fit.UNCERTAIN]
    right = sum(verdict is (Fit.YES if fits else Fit.NO) for fits, verdict in decided)
    assert right >= 0.98 * len(decided)


def _settled(row: Row, prediction: MemoryPrediction) -> list[tuple[bool, Fit]]:
    """Return truth and verdict for the budgets that a measurement without a cap settles."""
    return [
        (row["peak_reserved_bytes"] <= budget, prediction.fits(budget))
        for budget in BUDGETS
        if row["peak_reserved_bytes"] <= budget or row["peak_allocated_bytes"] > budget
    ]
