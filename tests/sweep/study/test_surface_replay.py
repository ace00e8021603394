from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB, find_gpu
from qlora_sweep.storage.surfaces import Header, Surface, SurfaceRow
from qlora_sweep.sweep.sampling.encoding import identity
from tests.bench.searching import Recorded, search, trials_of
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


@pytest.mark.parametrize("budget_gib", [21.5, 39.0])
def test_the_guided_sampler_needs_a_fraction_of_the_trials(budget_gib: float) -> None:
    surface = replace(recorded(), budget_bytes=int(budget_gib * GIB))
    guided = [search(surface, "guided", seed=seed) for seed in range(3)]
    chance = [search(surface, "random", seed=seed).trials for seed in range(5)]
    assert max(one.trials for one in guided) <= 5
    assert max(one.oom for one in guided) <= 1
    assert statistics.median(chance) > 4 * statistics.median(one.trials for one in guided)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "tinyllama-1.1b", "qwen2.5-7b", "llama-2-13b"])
def test_on_other_models_it_is_there_in_two_trials(name: str) -> None:
    assert search(recorded(name), "guided", seed=0).trials <= 2


@pytest.mark.slow
def test_optunas_gaussian_process_searches_rows_too() -> None:
    assert search(recorded("llama-2-13b"), "gp", seed=0).trials <= 15


def test_what_surely_does_not_fit_costs_no_sampler_a_trial() -> None:
    surface = replace(recorded("llama-3.1-8b"), budget_bytes=12 * GIB)
    fitting = len(surface.surface.fitting(12 * GIB))
    for row, _ in list(trials_of(surface, "random", seed=0))[:fitting]:
        assert row.fits(12 * GIB)
