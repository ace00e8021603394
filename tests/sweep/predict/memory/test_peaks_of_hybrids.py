"""Peaks of models with linear attention or convolutions, measured on a GPU and never fitted, beside
today's predictions."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.config import parse_config
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from tests.bench.hybrids import MODELS, model_of

ROWS = [
    row
    for line in Path("tests/bench/results/hybrids_h200.jsonl").read_text("utf-8").splitlines()
    if "peak_allocated_bytes" in (row := json.loads(line)) and row["path"] != "loop"
]


@pytest.mark.integration
@pytest.mark.parametrize("name", MODELS)
def test_a_peak_is_predicted(name: str, tmp_path: Path) -> None:
    rows = [row for row in ROWS if row["model"] == name]
    assert len(rows) >= 3
    with closing(TracingChildren()) as tracer:
        memory = TracingPredictor(
            model_of(name, is_whole=False),
            cache_dir=tmp_path,
            compute_capability=(9, 0),
            tracer=tracer,
        )
        for row in rows:
            config = parse_config(row["config"])
            predicted = memory.predict(config)
            allocated, reserved = predicted.peak_allocated_bytes, predicted.peak_reserved_bytes
            assert row["peak_allocated_bytes"] == pytest.approx(allocated, rel=0.001), config
            assert row["peak_reserved_bytes"] == pytest.approx(reserved, rel=0.02), config
