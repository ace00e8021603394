from __future__ import annotations

from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB, find_gpu
from qlora_sweep.storage.surfaces import Header, Surface, SurfaceRow
from qlora_sweep.sweep.sampling.encoding import identity
from tests.bench.searching import Recorded, search
from tests.storage.test_surfaces import HEADER
from tests.sweep.predict.rows import HELD_OUT, TABLE, config_of, model_of

BUDGET = int(21.5 * GIB)


def recorded(name: str = "mistral-7b-v0.3") -> Recorded:
    """The committed measurements of a model on an H200 as a surface, memory predicted to 1 %."""
    measured = {identity(config_of(r)): r for r in (*TABLE, *HELD_OUT) if r["model"] == name}
    rows = tuple(_row(config_of(row), row) for row in measured.values())
    model = model_of(next(iter(measured.values())))
    header = Header.model_validate(HEADER)
    surface = Surface("rows.jsonl", model, "h200", find_gpu("h200"), rows, header)
    peaks = {
        identity(row.config): int(row.peak_allocated_bytes * (0.99, 1.01)[number % 2])
        for number, row in enumerate(rows)
        if row.peak_allocated_bytes is not None
    }
    return Recorded(surface, BUDGET, peaks)


def _row(config: TrialConfig, row: dict[str, Any]) -> SurfaceRow:
    seconds = row["step_seconds"]
    return SurfaceRow(
        config=config,
        verdict="fits",
        tokens_per_second=config.tokens_per_step / seconds,
        step_seconds=seconds,
        peak_allocated_bytes=row["peak_allocated_bytes"],
        peak_reserved_bytes=row["peak_reserved_bytes"],
        device_seconds=1.0 + 10 * seconds,
    )


@pytest.mark.parametrize("name", ["llama-3.1-8b", "tinyllama-1.1b", "qwen2.5-7b", "llama-2-13b"])
def test_on_other_models_it_is_there_in_two_trials(name: str) -> None:
    assert search(recorded(name), "guided", seed=0).trials <= 2
