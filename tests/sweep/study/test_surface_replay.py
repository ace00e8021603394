from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB, find_gpu
from qlora_sweep.storage.surfaces import Header, Surface, SurfaceRow
from qlora_sweep.sweep.sampling.encoding import identity
from tests.bench.replay import document_of, main
from tests.bench.searching import Recorded, search, trials_of
from tests.storage.test_surfaces import HEADER, OOM, ROW, a_file
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


@pytest.mark.parametrize("sampler", ["guided", "tpe", "random"])
def test_every_row_is_asked_for_once_whatever_the_order_of_the_lines(sampler: Any) -> None:
    surface = recorded("llama-3.1-8b")
    turned = replace(surface.surface, rows=surface.surface.rows[::-1])
    first, second = (
        [identity(row.config) for row, _ in trials_of(known, sampler, seed=1)]
        for known in (surface, replace(surface, surface=turned))
    )
    assert first == second
    assert sorted(first) == sorted(identity(row.config) for row in surface.surface.rows)


@pytest.mark.slow
def test_optunas_gaussian_process_searches_rows_too() -> None:
    assert search(recorded("llama-2-13b"), "gp", seed=0).trials <= 15


def test_what_surely_does_not_fit_costs_no_sampler_a_trial() -> None:
    surface = replace(recorded("llama-3.1-8b"), budget_bytes=12 * GIB)
    fitting = len(surface.surface.fitting(12 * GIB))
    for row, _ in list(trials_of(surface, "random", seed=0))[:fitting]:
        assert row.fits(12 * GIB)


def test_the_document_has_what_scripts_rely_on() -> None:
    surface = recorded("llama-3.1-8b")
    done = search(surface, "guided", seed=0)
    document = document_of(surface, {"guided": [done, done]})
    numbers = {"budget_bytes", "configurations", "fitting"}
    assert document.keys() == {"surface", "best", "samplers", *numbers}
    assert document["best"]["tokens_per_second"] == surface.best.tokens_per_second
    guided = document["samplers"]["guided"]
    assert guided["trials"] == {"median": done.trials, "p95": done.trials}
    assert guided.keys() == {"trials", "oom", "device_seconds", "ask_seconds"}
    assert guided["device_seconds"]["median"] == pytest.approx(done.device_seconds)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--samplers", "guidid"], 2, "unknown sampler 'guidid'; did you mean 'guided'"),
        (["--seeds", "0"], 2, "--seeds must be from 1 to 1000, got 0"),
        (["--budget-gib", "-1"], 2, "--budget-gib must be greater than 0, got -1"),
        (["--budget-gib", "5"], 1, "ask with --budget-gib 8 or more"),
    ],
)
def test_what_cannot_be_replayed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    code: int,
    message: str,
) -> None:
    longer = OOM | {"config": {"micro_batch_size": 64}}
    name = a_file(tmp_path, HEADER, ROW, longer)
    assert main([name, *options, "--json"]) == code
    said = capsys.readouterr()
    assert message in said.err
    if code == 1:
        found = json.loads(said.out)
        assert (found["fitting"], found["best"], found["samplers"]) == (0, None, {})
    else:
        assert said.out == ""
