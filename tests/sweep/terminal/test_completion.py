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

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from sweep.cli import main
try:
    main()
finally:
    sys.stderr.write(','.join({'torch', 'optuna', 'numpy', 'rich'} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("words", "completed"),
    [("sweep best st", "study"), ("sweep run a10 --target-m", "--target-modules")],
)
def test_names_and_settings_complete_without_a_heavy_import(
    words: str, completed: str, study: str
) -> None:
    asked = {
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_SWEEP_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **asked},
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == ([completed], "")


def test_what_completes_is_what_there_is() -> None:
    assert options.presets() == sorted(preset_texts())
    assert options.gpus() == list(gpu_catalogue())
    assert options.models() == sorted(model.name for model in shipped_models())
    complete = options.completed(options.presets, options.gpus)
    assert complete("a100") == ["a100-40gb", "a100-80gb", "a100-80gb-pcie"]


def test_studies_of_the_named_database_complete_where_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_it(f"sqlite:///{tmp_path}/other.db", tmp_path, name="night").close()
    monkeypatch.setenv("SWEEP_STORAGE", f"sqlite:///{tmp_path}/other.db")
    assert options.studies() == ["night"]
    # A server is not asked at every press of a key.
    monkeypatch.setenv("SWEEP_STORAGE", "postgresql://me:s3cret@127.0.0.1:1/studies")
    assert options.studies() == []
    monkeypatch.delenv("SWEEP_STORAGE")
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "home"))
    assert options.studies() == []
    (tmp_path / "home" / "runs").mkdir(parents=True)
    (tmp_path / "home" / "runs" / "sweep.db").write_text("no database")
    assert options.studies() == []
    assert [path.name for path in (tmp_path / "home" / "runs").iterdir()] == ["sweep.db"]
