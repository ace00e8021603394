"""``sweep report``: one study's page, several GPUs beside each other, or recorded trials."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sweep.study import recorded
from tests.sweep.conftest import Said

SURFACE = Path(__file__).parents[2] / "data" / "surfaces" / "mistral-7b-v0.3_h200.jsonl"
RECORDED = "Recorded on an NVIDIA H200, 2026-11-21: nothing is measured now."
Sweep = Callable[..., Said]


def test_several_studies_are_one_page_beside_the_first(
    study: str, tmp_path: Path, sweep: Sweep
) -> None:
    path = Path(sweep("report", study, study).out.strip())
    assert path == tmp_path / "runs" / study / "comparison.html"
    page = path.read_text(encoding="utf-8")
    assert "study 1 or study 2?" in page
    assert "Fastest cannot be told" in page


def test_a_plan_is_set_beside_a_study_and_leads_where_it_is_surely_faster(
    study: str, tmp_path: Path, sweep: Sweep
) -> None:
    best = json.loads(sweep("best", study, "--json").out)
    plan = {
        "model": best["model"],
        "gpu": {"name": "l4", "budget_bytes": best["gpu"]["budget_bytes"]},
        "config": best["best"]["config"],
        "tokens_per_second": 1e6,
        "tokens_per_second_range": [0.9e6, 1.1e6],
        "peak_allocated_bytes": 2**30,
        "bills": [],
    }
    (tmp_path / "l4.json").write_text(json.dumps(plan))
    work = ("--work", "dataset-samples=1000", "-o", "-")
    code, page, _ = sweep("report", study, tmp_path / "l4.json", *work)
    assert code == 0
    assert "Fastest: l4 (plan)" in page
    assert "1,000 sequences of full length" in page


def test_what_is_no_plan_is_named(study: str, tmp_path: Path, sweep: Sweep) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"plans": 3}')
    for named, words in ((broken, f"{broken}: plans must be a list"), ("nobody", "no study")):
        refused = sweep("report", study, named)
        assert (refused.code, words in refused.err) == (2, True)


def test_a_study_of_recorded_trials_finds_the_best_of_them_and_says_what_it_is(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setattr(recorded, "PAUSE_SECONDS", 0)
    held = ("--rank", "16", "--target-modules", "qv", "--on", f"recorded:{SURFACE}")
    code, out, err = sweep("run", "a10", *held, "--study", "r", "--json")
    assert code == 0
    assert RECORDED in err
    assert "starts the worker" not in err
    document = json.loads(out)
    assert document["gpu"]["emulated_on"] == "NVIDIA H200"
    assert round(document["best"]["measurement"]["tokens_per_second"]) == 17933
    gain = document["gain"]
    # One recorded run of each says nothing of how sure that is.
    assert (gain["low"], gain["high"]) == (None, None)
    assert gain["ratio"] == pytest.approx(2.135, abs=0.001)
    assert document["trials"]["invalid"] == 0
    assert "sweep confirm" not in sweep("best", "r").out


def test_a_surface_has_a_report_of_all_its_trials(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    path = tmp_path / "runs" / "mistral-7b-v0.3_h200" / "report.html"
    assert sweep("report", SURFACE).out.strip() == str(path)
    page = path.read_text(encoding="utf-8")
    assert "Mistral-7B-v0.3 on an H200: 246 trials" in page
    assert RECORDED in page
    # What ran out needs more than the cap it was recorded under, not more than all of the GPU.
    assert "44.00 GiB" in page
