"""What is stated of memory on a CPU holds for every row that was measured there."""

from __future__ import annotations

import json
from pathlib import Path

from search_spaces.config import parse_config
from search_spaces.models import load_model_spec
from sweep.predict.memory.prediction import Fit
from sweep.predict.memory.predictor import CPU_UNCERTAINTY, CpuMemory
from sweep.predict.memory.profile_store import TracingChildren

ROWS = Path(__file__).parents[3] / "data" / "cpu" / "peaks.jsonl"
"""The demo model under torch 2.13, bitsandbytes 0.50.2 and peft 0.21.2, 2026-11-23, by
`python -m tests.bench.cpu_peaks`."""


def test_predicted_peaks_are_within_what_is_stated(
    tracing_child: TracingChildren, profile_cache: Path
) -> None:
    memory = CpuMemory(load_model_spec("demo"), cache_dir=profile_cache, tracer=tracing_child)
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    errors = []
    for row in rows:
        predicted = memory.predict(parse_config(row["config"])).peak_allocated_bytes
        errors.append(predicted / row["peak_allocated_bytes"] - 1)
    assert len(errors) == 46
    assert -0.02 < min(errors) <= max(errors) < CPU_UNCERTAINTY
    assert sorted(map(abs, errors))[len(errors) // 2] < 0.01


def test_a_peak_alone_decides_what_fits(
    tracing_child: TracingChildren, profile_cache: Path
) -> None:
    memory = CpuMemory(load_model_spec("demo"), cache_dir=profile_cache, tracer=tracing_child)
    known = memory.predict(parse_config({"micro_batch_size": 4, "seq_len": 64}))
    peak = known.peak_allocated_bytes
    assert known.peak_reserved_bytes == peak
    assert known.fits(int(1.3 * peak)) is Fit.YES
    assert known.fits(peak) is Fit.UNCERTAIN
    assert known.fits(int(0.75 * peak)) is Fit.NO
