"""What is predicted of every configuration that was measured, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from sweep.paths import cache_directory
from sweep.predict.memory.predictor import TracingPredictor
from sweep.predict.memory.profile_store import TracingChildren
from tests.golden.frozen import Frozen
from tests.sweep.predict.rows import DATA, Row, config_of, describe, model_of, read_rows

FILES = [path.stem for path in sorted(DATA.glob("*_h200.jsonl"))]


@pytest.mark.parametrize("name", FILES)
def test_predicted_peaks(name: str, tracer: TracingChildren, frozen: Frozen) -> None:
    predictors: dict[str, TracingPredictor] = {}

    def predicted(row: Row) -> dict[str, Any]:
        if row["model"] not in predictors:
            kept = cache_directory() / "memory"
            predictors[row["model"]] = TracingPredictor(
                model_of(row), cache_dir=kept, tracer=tracer
            )
        memory = predictors[row["model"]].predict(config_of(row))
        return {
            "peak": memory.peak_allocated_bytes,
            "reserved": memory.peak_reserved_bytes,
            "moment": memory.moment,
            "uncertainty": [memory.uncertainty, memory.reserved_uncertainty],
            "parts": memory.breakdown,
        }

    rows = read_rows(f"{name}.jsonl")
    frozen(f"peaks_{name}", {describe(row): predicted(row) for row in rows})
