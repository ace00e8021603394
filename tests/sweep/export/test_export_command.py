"""``sweep export``: a recipe on stdout or in a file, and one message where there is none."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

from sweep.cli import main
from sweep.export.formats import format_names
from sweep.running.replay import ReplayRunner
from sweep.study.preflight import Preflight
from sweep.study.tuner import tune
from tests.sweep.simulated_device import BUDGET, MODEL, a_study, train

TOO_LARGE = {"trials": 1, "baseline": {"micro_batch_size": 32, "checkpoint_fraction": 0.0}}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    return tmp_path


def finished_study(home: Path, **space: Any) -> str:
    """Run a short study on a simulated card and return its name."""
    preflight = Preflight(model=MODEL, budget_bytes=BUDGET, violation=lambda _: None)
    with a_study(home / "runs", **({"trials": 3} | space)) as study:
        tune(study, runner=ReplayRunner(otherwise=train), preflight=preflight)
    return "study"


def test_the_winner_goes_to_stdout_or_to_a_file(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, path = finished_study(home), home / "recipes" / "axolotl.yaml"
    assert main(["export", study, "--format", "script"]) == 0
    printed = capsys.readouterr().out
    ast.parse(printed)
    assert main(["export", study, "-o", "-"]) == 0
    assert capsys.readouterr().out == printed
    assert main(["export", study, "--format", "axolotl", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert yaml.safe_load(path.read_text())["base_model"].endswith(MODEL.name)


@pytest.mark.parametrize(
    ("options", "space", "code", "complaint"),
    [
        (["--format", "axolot"], {}, 2, "did you mean 'axolotl'"),
        # As `best` does.
        ([], TOO_LARGE, 1, "has nothing to export"),
    ],
)
def test_nothing_to_export_is_said_and_writes_nothing(
    options: list[str],
    space: dict[str, Any],
    code: int,
    complaint: str,
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = home / "recipe"
    assert main(["export", finished_study(home, **space), *options, "-o", str(path)]) == code
    said = capsys.readouterr()
    assert complaint in said.err
    assert said.out == ""
    assert not path.exists()


def test_the_help_names_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--help"]) == 0
    said = capsys.readouterr().out
    assert [name for name in format_names() if name not in said] == []
