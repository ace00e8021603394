"""Recorded trials stand in for a GPU: `sweep run --on recorded:SURFACE`, `sweep report SURFACE`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sweep.cli import main
from sweep.study import recorded

SURFACE = Path(__file__).parents[2] / "data" / "surfaces" / "mistral-7b-v0.3_h200.jsonl"
HELD = ["--rank", "16", "--target-modules", "qv"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setattr(recorded, "PAUSE_SECONDS", 0)
    return tmp_path


def test_a_study_of_recorded_trials_finds_the_best_of_them_and_says_what_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["run", "a10", *HELD, "--on", f"recorded:{SURFACE}", "--study", "r", "--json"]
    assert main(command) == 0
    out, error = capsys.readouterr()
    assert "Recorded on an NVIDIA H200, 2026-11-21: nothing is measured now." in error
    assert "starts the worker" not in error
    document = json.loads(out)
    assert document["gpu"]["emulated_on"] == "NVIDIA H200"
    best = document["best"]
    assert round(best["measurement"]["tokens_per_second"]) == 17933
    assert document["gain"]["ratio"] == pytest.approx(2.135, abs=0.001)
    # One recorded run of each says nothing of how sure that is.
    assert (document["gain"]["low"], document["gain"]["high"]) == (None, None)
    assert document["trials"]["invalid"] == 0
    assert main(["best", "r"]) == 0
    assert "sweep confirm" not in capsys.readouterr().out


def test_a_surface_has_a_report_of_all_its_trials(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(SURFACE)]) == 0
    path = home / "runs" / "mistral-7b-v0.3_h200" / "report.html"
    assert capsys.readouterr().out.strip() == str(path)
    page = path.read_text(encoding="utf-8")
    assert "Mistral-7B-v0.3 on an H200: 246 trials" in page
    assert "Recorded on an NVIDIA H200, 2026-11-21: nothing is measured now." in page
    # What ran out needs more than the cap it was recorded under, not more than all of the GPU.
    assert "44.00 GiB" in page
