"""What a shell completes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from search_spaces.gpus import gpu_catalogue
from search_spaces.models import shipped_models
from search_spaces.presets import preset_texts
from sweep.terminal import options
from tests.storage.builders import open_it
from tests.sweep.simulated_device import a_study

ROOT = Path(__file__).parents[3]


def completed(words: str, home: Path, *, heavy: str = "torch,optuna,numpy,rich") -> list[str]:
    """Return what bash is told, of a process that has not imported any of ``heavy``."""
    program = (
        "import sys\n"
        "from sweep.cli import main\n"
        "try:\n    main()\nfinally:\n"
        f"    sys.stderr.write(','.join(set({heavy.split(',')}) & set(sys.modules)))"
    )
    asked = {
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_SWEEP_COMPLETE": "complete_bash",
        "SWEEP_HOME": str(home),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **asked},
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_names_complete_without_a_heavy_import(tmp_path: Path) -> None:
    with a_study(tmp_path / "runs"):
        pass
    assert completed("sweep best st", tmp_path) == ["study"]
    assert completed("sweep init --gpu h2", tmp_path) == ["h200"]


def test_the_knobs_of_a_configuration_complete_too(tmp_path: Path) -> None:
    found = completed("sweep run a10 --target-m", tmp_path)
    assert found == ["--target-modules"]


def test_what_completes_is_what_there_is() -> None:
    assert options.presets() == sorted(preset_texts())
    assert options.gpus() == list(gpu_catalogue())
    assert options.models() == sorted(model.name for model in shipped_models())
    complete = options.completed(options.presets, options.gpus)
    assert complete("a100") == ["a100-40gb", "a100-80gb", "a100-80gb-pcie"]


def test_studies_of_the_named_database_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_it(f"sqlite:///{tmp_path}/other.db", tmp_path, name="night").close()
    monkeypatch.setenv("SWEEP_STORAGE", f"sqlite:///{tmp_path}/other.db")
    assert options.studies() == ["night"]
    # A server is not asked at every press of a key.
    monkeypatch.setenv("SWEEP_STORAGE", "postgresql://me:s3cret@127.0.0.1:1/studies")
    assert options.studies() == []


def test_without_studies_there_is_nothing_to_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    assert options.studies() == []
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "sweep.db").write_text("no database")
    assert options.studies() == []
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["sweep.db"]
