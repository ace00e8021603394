"""``sweep report``: one study's page, or several GPUs beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sweep.cli import main
from sweep.predict.forecast import Forecaster
from sweep.running.replay import ReplayRunner
from sweep.study.driver import Driver
from sweep.study.tuner import tune
from tests.sweep.simulated_device import BUDGET, MODEL, a_study, train


@pytest.fixture(autouse=True)
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a short study on a simulated GPU and return its name."""
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    forecaster = Forecaster(model=MODEL, budget_bytes=BUDGET, violation=lambda _: None)
    with a_study(tmp_path / "runs", trials=3) as opened:
        tune(Driver(opened, runner=ReplayRunner(otherwise=train), forecaster=forecaster))
    return "study"


def _plan_of(study: str, capsys: pytest.CaptureFixture[str], path: Path, *, speed: float) -> Path:
    """Write the plan of a GPU on which the study's winner has a speed."""
    assert main(["best", study, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)
    plan = {
        "model": best["model"],
        "gpu": {"name": "l4", "budget_bytes": BUDGET},
        "config": best["best"]["config"],
        "tokens_per_second": speed,
        "tokens_per_second_range": [0.9 * speed, 1.1 * speed],
        "peak_allocated_bytes": 2**30,
        "bills": [],
    }
    path.write_text(json.dumps(plan))
    return path


def test_several_studies_are_one_page_beside_the_first(
    study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", study, study]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == tmp_path / "runs" / study / "comparison.html"
    page = path.read_text(encoding="utf-8")
    assert "study 1 or study 2?" in page
    assert "Fastest cannot be told" in page


def test_a_plan_is_set_beside_a_study_and_leads_where_it_is_surely_faster(
    study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = _plan_of(study, capsys, tmp_path / "l4.json", speed=1e6)
    arguments = ["report", study, str(plan), "--work", "dataset-samples=1000", "-o", "-"]
    assert main(arguments) == 0
    page = capsys.readouterr().out
    assert "Fastest: l4 (plan)" in page
    assert "1,000 sequences of full length" in page


def test_what_is_no_plan_is_named(
    study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"plans": 3}')
    assert main(["report", study, str(broken)]) == 2
    assert f"{broken}: plans must be a list" in capsys.readouterr().err
    assert main(["report", study, "nobody"]) == 2
    assert "no study 'nobody'" in capsys.readouterr().err
