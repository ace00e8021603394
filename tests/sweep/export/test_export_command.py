"""``sweep export``: a recipe on stdout or in a file, and one message where there is none."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces.config import TrialConfig, canonical
from search_spaces.linears import CapacityClass
from storage.reading import read_study
from sweep.cli import main
from sweep.export.formats import format_names
from sweep.predict.forecast import Forecaster
from sweep.running.replay import ReplayRunner
from sweep.study.driver import Driver
from sweep.study.tuner import tune
from sweep.training import eight_bit
from tests.sweep.simulated_device import BUDGET, MODEL, a_study, train

TOO_LARGE = {"trials": 1, "baseline": {"micro_batch_size": 32, "checkpoint_fraction": 0.0}}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    return tmp_path


def finished_study(home: Path, **space: Any) -> str:
    """Run a short study on a simulated GPU and return its name."""
    forecaster = Forecaster(model=MODEL, budget_bytes=BUDGET, violation=lambda _: None)
    with a_study(home / "runs", **({"trials": 3} | space)) as study:
        tune(Driver(study, runner=ReplayRunner(otherwise=train), forecaster=forecaster))
    return "study"


def test_the_winner_goes_to_stdout_or_to_a_file(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, path = finished_study(home), home / "axolotl.yaml"
    assert main(["export", study, "--format", "script"]) == 0
    printed = capsys.readouterr().out
    ast.parse(printed)
    assert main(["export", study, "-o", "-"]) == 0
    assert capsys.readouterr().out == printed
    assert main(["export", study, "--format", "axolotl", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert yaml.safe_load(path.read_text())["base_model"].endswith(MODEL.name)


def test_a_script_that_computes_in_8_bits_has_its_kernels_beside_it(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = finished_study(home, fixed={"compute_dtype": "fp8", "quantization": "fp8"})
    path, kernels = home / "train.py", home / "eight_bit.py"
    export = ["export", study, "-o", str(path)]
    kernels.write_text("mine = 1\n")
    assert main(export) == 2
    assert "eight_bit.py is not sweep's to replace" in capsys.readouterr().err
    assert not path.exists()
    kernels.unlink()
    assert main(export) == 0
    assert capsys.readouterr().out == f"{path}\n{home / 'rows.py'}\n{kernels}\n{path}.json\n"
    assert kernels.read_text().endswith(Path(eight_bit.__file__).read_text())
    assert main(export) == 0, "both are sweep's to replace"
    assert main([*export[:2], "-o", str(kernels)]) == 2
    capsys.readouterr()
    assert main(export[:2]) == 0
    assert "rows.py or eight_bit.py beside it" in " ".join(capsys.readouterr().err.split())


def test_another_trial_than_the_winner_is_exported_and_says_that_it_is_not_the_best(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = finished_study(home)
    assert main(["best", study, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]["number"]
    records = read_study(study, url=f"sqlite:///{home}/runs/sweep.db", home=home / "runs").records
    other = next(r for r in records if r.number != best and r.measurement is not None)
    assert main(["export", study, "--format", "json", "--trial", str(other.number)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["number"] == other.number
    written = TrialConfig(**document["config"])
    assert CapacityClass.of(written, MODEL) == CapacityClass.of(other.config, MODEL)
    same = {"target_modules": other.config.target_modules}
    assert written.model_copy(update=same) == canonical(other.config)
    assert main(["export", study, "--trial", str(other.number)]) == 0
    assert "One of the configurations that fit, not the best" in capsys.readouterr().out
    assert main(["export", study, "--trial", str(best)]) == 0
    chosen = capsys.readouterr().out
    assert main(["export", study]) == 0
    assert capsys.readouterr().out == chosen


def test_a_report_prices_the_training_that_is_asked_about(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = finished_study(home)
    assert main(["report", study, "--work", "tokens=1000000", "--work", "epochs=3", "-o", "-"]) == 0
    assert "3 epochs of 1,000,000 tokens" in capsys.readouterr().out
    assert main(["report", study, "--work", "epochs=3"]) == 2
    assert "epochs needs tokens or dataset-samples" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "space", "code", "complaint"),
    [
        (["--format", "axolot"], {}, 2, "did you mean 'axolotl'?"),
        # As `best` does.
        ([], TOO_LARGE, 1, "has nothing to export"),
        (["--trial", "77"], {}, 2, "has no trial 77"),
        (["--trial", "0"], TOO_LARGE, 2, "trial 0 of study 'study' was not measured to fit"),
        (["--trial", "0", "--format", "surface"], {}, 2, "a surface is of all trials"),
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


def test_what_the_trainer_cannot_do_is_said_on_stderr(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = finished_study(home)
    assert main(["export", study, "--format", "trl"]) == 0
    said = capsys.readouterr()
    assert "trl: kernels" in said.err
    assert "memory and speed differ a little from what was measured" in " ".join(said.err.split())
    assert "trl: kernels" not in said.out
    yaml.safe_load(said.out)
    assert main(["export", study, "--format", "json"]) == 0
    assert capsys.readouterr().err == ""
