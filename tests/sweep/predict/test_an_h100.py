"""Two studies on an H100, a GPU that no rate, efficiency or memory profile was fitted to."""

from __future__ import annotations

import numpy as np

from search_spaces.gpus import find_gpu
from tests.sweep.predict.predicted_steps import predict_steps
from tests.sweep.predict.rows import Predict, config_of, model_of, read_rows

ROWS = read_rows("studies_h100.jsonl")
CONFIGS = [config_of(row) for row in ROWS]
MODEL = model_of(ROWS[0])


def test_its_memory_is_predicted_as_an_h200s(predict_row: Predict) -> None:
    for row in ROWS:
        memory = predict_row(row)
        assert abs(memory.peak_allocated_bytes / row["peak_allocated_bytes"] - 1) < 0.0025
        assert abs(memory.peak_reserved_bytes / row["peak_reserved_bytes"] - 1) < 0.01


def test_a_step_takes_what_is_predicted_within_what_is_stated() -> None:
    """All but one: 2 x 512 without compiled layers waits for the host, which was twice as slow."""
    steps = predict_steps(CONFIGS, model=MODEL, gpu=find_gpu("h100-80gb"))
    off = []
    for row, step in zip(ROWS, steps, strict=True):
        assert not isinstance(step, Exception)
        off.append((row["step_seconds"] / step.step_seconds - 1.0, step.uncertainty))
    assert sum(abs(error) > stated for error, stated in off) <= 1
    assert abs(float(np.median([error for error, _ in off]))) < 0.12
