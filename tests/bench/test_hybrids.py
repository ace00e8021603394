"""The program that measures hybrid models, as far as it runs without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.rules import Setting, broken_rules
from qlora_sweep.storage.records import Measured, Outcome
from qlora_sweep.sweep.child_environment import child_environment
from tests.bench.hybrids import cases, environment, run
from tests.storage.builders import a_measurement

_LOOK = (
    "import importlib.metadata as m, importlib, json, os\n"
    "def found(ask, *args):\n"
    "    try: return bool(ask(*args))\n"
    "    except Exception: return False\n"
    "fixed = os.environ.get('FLA_CONFIG_DIR')\n"
    "print(json.dumps([found(m.version, 'flash-linear-attention'),"
    " found(importlib.import_module, 'fla'), sorted(os.listdir(fixed)) if fixed else []]))"
)


def test_every_case_may_run_on_a_hopper_gpu() -> None:
    asked = cases(is_whole=True)
    every = asked["memory"] + asked["speed"]
    for case in every:
        setting = Setting(case.model, device="cuda", compute_capability=(9, 0))
        assert not list(broken_rules(case.config, setting)), case.config
    keys = {case.key for case in asked["memory"]}
    assert len(keys) == len(asked["memory"]) >= 20
    # What is compared is predicted under the same key.
    assert {case.key for case in asked["speed"]} <= keys


@pytest.mark.parametrize(
    ("path", "is_installed", "is_imported"),
    [("kernels", True, True), ("tuned", True, True), ("loop", False, False)]
    + [("broken", True, False)],
)
def test_a_worker_finds_the_package_as_its_path_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    path: str,
    is_installed: bool,
    is_imported: bool,
) -> None:
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").touch()
    known = tmp_path / "flash_linear_attention-0.6.0.dist-info"
    known.mkdir()
    (known / "METADATA").write_text("Name: flash-linear-attention\nVersion: 0.6.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = dict(os.environ)
    with environment(path):
        command = [sys.executable, "-P", "-c", _LOOK]
        printed = subprocess.check_output(command, env=child_environment(), text=True)
    assert os.environ == before
    assert json.loads(printed)[:2] == [is_installed, is_imported]
    assert bool(json.loads(printed)[2]) == (path == "kernels")


def test_a_worker_takes_triton_for_the_version_that_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "triton.py").write_text("__version__ = '3.6.0'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    look = "import triton, importlib.metadata as m; print(triton.__version__, m.version('triton'))"
    for path in ("kernels", "tuned", "loop"):
        with environment(path, triton_as="3.7.1"):
            command = [sys.executable, "-P", "-c", look]
            printed = subprocess.check_output(command, env=child_environment(), text=True)
        assert printed.split() == ["3.7.1", "3.7.1"]


class Answering:
    """Answers each request by what is left of a list; raises what is an exception."""

    def __init__(self, answers: list[Outcome | Exception]) -> None:
        self._answers = answers

    def run(self, *_: Any, **__: Any) -> Outcome:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_what_fails_is_a_row_and_the_next_one_runs(tmp_path: Path) -> None:
    asked = cases(is_whole=False)
    first, second, *_ = asked["memory"]
    tuned, loop = (
        case for case in asked["speed"] if case.key == first.key and case.path != "broken"
    )
    peak = a_measurement(2048.0, peak=103 * 10**8)
    slow = a_measurement(204.8)
    answers: list[Outcome | Exception] = [
        Measured(measurement=peak),
        RuntimeError("no more of it"),
        Measured(measurement=peak),
        Measured(measurement=slow),
    ]
    opened: list[str] = []

    @contextmanager
    def open_runner(model: ModelSpec) -> Iterator[Any]:
        opened.append(model.name)
        yield Answering(answers)

    known = {
        first.key: {
            "peak": {"bytes": 10**10, "uncertainty": 0.15},
            "step": {"seconds": 1.0, "low": 0.5, "high": 1.5},
        }
    }
    output = tmp_path / "rows.jsonl"
    found = run(
        [first, second, tuned, loop], known, seconds=60, open_runner=open_runner, output=output
    )
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert rows[0]["peak_error"] == 0.03
    assert (rows[0]["is_peak_within"], rows[0]["is_step_within"]) == (True, False)
    assert "no more of it" in rows[1]["failure"]
    assert rows[3]["predicted"] == {}
    assert found["peak_errors"] == [0.03, 0.03]
    assert found["failed"] == 1
    assert found["beside_the_loop"]["qwen3.5-9b 4 x 2048"]["times"] == 10.0
    assert len(opened) == 3
    late = run([first], known, seconds=-1, open_runner=open_runner, output=None)
    assert late["failed"] == 1
