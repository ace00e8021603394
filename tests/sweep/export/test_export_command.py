"""``sweep export``: a winner on stdout or in files, and one message where there is none."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.samplers import RandomSampler

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.storage.reading import read_study
from qlora_sweep.storage.study import open_study
from qlora_sweep.sweep.cli import main
from qlora_sweep.sweep.predict.forecast import Forecaster
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.study.driver import Driver
from qlora_sweep.sweep.study.tuner import tune
from tests.sweep.simulated_device import BUDGET, MODEL, a_definition, train
from tests.tables import cases

SPACES: dict[str, dict[str, Any]] = {
    "study": {"trials": 3},
    "8-bit": {"trials": 1, "fixed": {"compute_dtype": "fp8", "quantization": "fp8"}},
    "too-large": {"trials": 1, "baseline": {"micro_batch_size": 32, "checkpoint_fraction": 0.0}},
}
Said = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with short studies on a simulated GPU."""
    home = tmp_path_factory.mktemp("home")
    for name, space in SPACES.items():
        forecaster = Forecaster(model=MODEL, budget_bytes=BUDGET, violation=lambda _: None)
        url, runs = f"sqlite:///{home}/runs/sweep.db", home / "runs"
        made = {"definition": a_definition(**space), "sampler": RandomSampler(seed=0)}
        with open_study(name, url=url, environment={}, home=runs, **made) as study:
            tune(Driver(study, runner=ReplayRunner(otherwise=train), forecaster=forecaster))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWEEP_HOME", str(home))
        yield home


@pytest.fixture
def said(home: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    """Run the command; return its exit code, and what it says on stdout and stderr."""

    def run(*options: str) -> tuple[int, str, str]:
        code = main(["export", *options])
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return run


def test_the_winner_goes_to_stdout_or_to_a_file(said: Said, tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    code, printed, err = said("study", "--format", "script")
    assert code == 0
    assert "it needs rows.py beside it" in err
    ast.parse(printed)
    assert said("study", "-o", "-")[1] == printed
    assert said("study", "--format", "axolotl", "-o", str(path), "--force")[:2] == (0, f"{path}\n")
    code, _, err = said("study", "--format", "json")
    assert (code, err) == (0, "json: its winner is not confirmed: sweep confirm study.")


def test_what_a_script_imports_and_its_record_are_written_beside_it(
    said: Said, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    kernels = tmp_path / "eight_bit.py"
    names = ("rows.py", "fitting.py", "int8_products.py", "train.py.json")
    others = [tmp_path / name for name in names]
    export = ("8-bit", "-o", str(path))
    kernels.write_text("mine = 1\n")
    code, _, err = said(*export)
    assert (code, path.exists()) == (2, False)
    assert "eight_bit.py is not sweep's to replace" in err
    kernels.unlink()
    code, out, _ = said(*export)
    assert (code, sorted(out.split())) == (0, sorted(map(str, (path, kernels, *others))))
    assert said(*export)[0] == 0, "all are sweep's to replace"
    assert said("8-bit", "-o", str(kernels))[0] == 2


def test_another_trial_than_the_winner_says_that_it_is_not_the_best(said: Said, home: Path) -> None:
    best = json.loads(said("study", "--format", "json")[1])["number"]
    records = read_study("study", url=f"sqlite:///{home}/runs/sweep.db", home=home / "runs").records
    other = next(r for r in records if r.number != best and r.measurement is not None)
    document = json.loads(said("study", "--format", "json", "--trial", str(other.number))[1])
    assert document["number"] == other.number
    same = {"target_modules": other.config.target_modules}
    assert TrialConfig(**document["config"]).model_copy(update=same) == canonical(other.config)
    assert "fit, not the best" in said("study", "--trial", str(other.number))[1]
    assert said("study", "--trial", str(best)) == said("study")


@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    cases(
        """
        [study, --format, axolot] | 2 | did you mean 'axolotl'?
        # As `best` does.
        [too-large] | 1 | has nothing to export
        [study, --trial, '77'] | 2 | has no trial 77
        [too-large, --trial, '0'] | 2 | trial 0 of study 'too-large' was not measured to fit
        [study, --trial, '0', --format, surface] | 2 | a surface is of all trials
        """
    ),
)
def test_nothing_to_export_is_said_and_writes_nothing(
    options: list[str], code: int, complaint: str, said: Said, tmp_path: Path
) -> None:
    path = tmp_path / "recipe"
    ended, out, err = said(*options, "-o", str(path))
    assert (ended, out, path.exists()) == (code, "", False)
    assert complaint in err
