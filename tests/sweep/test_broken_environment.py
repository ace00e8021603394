"""The command where something of this machine is missing or limited, or somebody ends it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from qlora_sweep.storage.reading import read_study

ROOT = Path(__file__).parents[2]
BLOCKING = """
import os, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == os.environ["MISSING"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""
RUN = ["run", "cpu-demo", "--study", "study", "--no-confirm", "--sampler", "random"]
COMMAND = [sys.executable, "-P", "-m", "qlora_sweep"]


def environment(home: Path, **variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(home), str(ROOT)])
    known = {key: value for key, value in os.environ.items() if key != "SWEEP_STORAGE"}
    return {**known, "SWEEP_HOME": str(home), "PYTHONPATH": path, **variables}


def ended(
    home: Path, *words: str, limit: Callable[[], None] | None = None, **variables: str
) -> tuple[int, str]:
    done = subprocess.run(
        [*COMMAND, *words],
        env=environment(home, **variables),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("module", "cure"),
    [
        ("optuna", "pip install 'optuna"),
        # Of a library of ours.
        ("alembic", "pip install alembic"),
        # Of the worker's alone.
        ("bitsandbytes", "pip install 'bitsandbytes"),
    ],
)
def test_a_package_that_is_missing_is_named_with_what_installs_it(
    module: str, cure: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKING)
    blocked = {"MISSING": module, "SWEEP_WORKER_ENV": "MISSING"}
    code, said = ended(tmp_path, *RUN, "--trials", "1", **blocked)
    assert code == 3, said
    assert cure in said
    assert "Traceback" not in said


def test_an_installation_with_a_part_missing_is_told(tmp_path: Path) -> None:
    package = tmp_path / "qlora_sweep"
    package.mkdir()
    for name in ("__init__.py", "__main__.py", "search_spaces", "sweep"):
        (package / name).symlink_to(ROOT / "qlora_sweep" / name)
    code, said = ended(tmp_path, "presets")
    assert code == 3
    assert "pip install --force-reinstall --no-deps qlora-sweep" in said
    assert "Traceback" not in said


def limited(kind: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (value, value))


@pytest.mark.parametrize(
    ("kind", "value", "cure"),
    [
        (resource.RLIMIT_AS, 400_000 * 1024, "ulimit -v"),
        (resource.RLIMIT_FSIZE, 1024, "ulimit -f"),
        (resource.RLIMIT_NOFILE, 8, "ulimit -n"),
    ],
)
def test_a_limit_that_is_too_low_is_said(kind: int, value: int, cure: str, tmp_path: Path) -> None:
    code, said = ended(tmp_path, *RUN, "--trials", "1", limit=limited(kind, value))
    assert code == 3, said
    assert cure in said
    assert "Traceback" not in said


@pytest.mark.integration
def test_ctrl_c_pressed_on_until_the_end_ends_a_study_as_one_does(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, *RUN, "--trials", "40"],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if "(1 of 40)" in line:
                break
        while run.poll() is None:
            run.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                run.wait(0.02)
    assert run.returncode == 130
    study = read_study("study", url=f"sqlite:///{tmp_path}/runs/sweep.db", home=tmp_path / "runs")
    assert any(record.measurement is not None for record in study.records)
