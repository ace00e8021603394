"""Peaks of models with experts, measured on a GPU and never fitted, beside today's predictions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import parse_config
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from tests.bench.other_models import model_of

ROWS = [
    row
    for line in Path("tests/bench/results/experts_h200.jsonl").read_text("utf-8").splitlines()
    if "peak_allocated_bytes" in (row := json.loads(line))
]
MODELS = sorted({row["model"] for row in ROWS})


@pytest.fixture(params=MODELS)
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return [row for row in ROWS if row["model"] == request.param]


@pytest.fixture
def memory(rows: list[dict[str, Any]], tmp_path: Path) -> Iterator[TracingPredictor]:
    model = model_of(rows[0]["model"], is_whole=True)
    with closing(TracingChildren()) as tracer:
        yield TracingPredictor(model, cache_dir=tmp_path, compute_capability=(9, 0), tracer=tracer)


@pytest.mark.integration
def test_a_peak_is_predicted(rows: list[dict[str, Any]], memory: TracingPredictor) -> None:
    """Within a quarter of a percent in 4 bits where layers are compiled; as much is more of what is
    left where experts are on the host. Those of 4 bits that are not compiled were measured before
    one kernel summed the rows, which takes up to 0.4 % less."""
    assert len(rows) >= 2
    for row in rows:
        config = parse_config(row["config"])
        predicted = memory.predict(config).peak_allocated_bytes
        allowed = 0.0025 if config.is_4bit and config.compile else 0.01
        if config.offload_fraction > 0:
            allowed = 0.0125
        assert row["peak_allocated_bytes"] == pytest.approx(predicted, rel=allowed), config
