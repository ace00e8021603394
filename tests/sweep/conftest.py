"""What must be so before the first test imports torch, and what commands are tried on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sweep.typed import Said, Sweep

# As the supervisor does for a worker on the CPU; torch reads it when it is imported.
os.environ["TORCHDYNAMO_DISABLE"] = "1"


@pytest.fixture(scope="module")
def our_own_code() -> Iterator[None]:
    """Have the processes that a module's tests start run the code of this checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody's studies, prices and caches, on a machine that shows no GPU."""
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.fixture
def sweep(capsys: pytest.CaptureFixture[str], shared_tracing: None) -> Sweep:
    """Runs a command in this process, as it is typed."""
    from qlora_sweep.sweep.cli import main

    def run(*words: str | Path) -> Said:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return Said(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def profile_cache() -> Path:
    """Where all tests keep what is traced, from run to run."""
    from qlora_sweep.sweep.paths import cache_directory

    return cache_directory() / "memory"


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a finished study called ``study``, to be copied."""
    from qlora_sweep.sweep.predict.forecast import Forecaster
    from qlora_sweep.sweep.running.replay import ReplayRunner
    from qlora_sweep.sweep.study.driver import Driver
    from qlora_sweep.sweep.study.tuner import tune
    from tests.sweep.simulated_device import BUDGET, MODEL, a_study, train

    runs = tmp_path_factory.mktemp("finished") / "runs"
    forecaster = Forecaster(model=MODEL, budget_bytes=BUDGET, violation=lambda _: None)
    with a_study(runs, trials=4) as study:
        tune(Driver(study, runner=ReplayRunner(otherwise=train), forecaster=forecaster))
    return runs


@pytest.fixture
def study(finished_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A finished study called ``study``, at home in this test's own directory."""
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    shutil.copytree(finished_runs, tmp_path / "runs")
    return "study"
