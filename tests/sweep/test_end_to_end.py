"""The command as a person runs it: a real study of real trainings on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from qlora_sweep.sweep.cli import main

COMMAND = [sys.executable, "-c", "from qlora_sweep.sweep.cli import main; raise SystemExit(main())"]
SPACE = """
name: two
description: Two configurations that each train for a while
gpu: cpu
model: demo
budget_gib: 0.5
trials: 2
confirm: {seconds: 1, repeats: 2, soak_seconds: 1}
steps: {measured_min: 30, measured_max: 9999, seconds_max: 2, relative_interval: 0.0001}
dimensions:
  micro_batch_size: [4, 8]
fixed: {kernels: hf, compile: false, seq_len: 32}
baseline: {micro_batch_size: 4, seq_len: 32}
"""


def start(*words: str, home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *words],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "SWEEP_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def worker_of(process: subprocess.Popen[str]) -> psutil.Process:
    """Wait until the study's worker runs, and return it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(process.pid).children(recursive=True):
            # One that has just ended has no command line any more.
            with contextlib.suppress(psutil.Error):
                if "qlora_sweep.sweep.running" in child.cmdline():
                    return child
        time.sleep(0.1)
    raise AssertionError("no worker was started")


@pytest.mark.integration
def test_a_time_budget_is_of_the_whole_command(tmp_path: Path) -> None:
    budget, began = 30.0, time.monotonic()
    process = start("run", "cpu-demo", "--time-budget", f"{budget:g}s", "--json", home=tmp_path)
    out, err = process.communicate(timeout=150)
    # On a machine that is busy with a dozen things it is refused.
    assert process.returncode == 0 or "too short for one trial" in err
    assert (time.monotonic() - began) / budget < 1.3
    if process.returncode == 0:
        assert json.loads(out)["trials"]["total"] > 1


@pytest.mark.integration
def test_an_interrupted_study_goes_on_by_the_same_command_to_a_confirmed_winner_and_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "space.yaml").write_text(SPACE, encoding="utf-8")
    run = ("run", str(tmp_path / "space.yaml"))
    process = start(*run, home=tmp_path)
    worker = worker_of(process)
    assert process.stderr is not None
    next(line for line in process.stderr if "trial 1, " in line)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command resumes" in err
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE

    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    assert main(["status", "two", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["ended"] is None
    assert (before["trials"]["fits"], before["trials"]["lost"]) == (1, 1)
    assert (before["driven_by"], before["running"]) == (None, [])

    again = start(*run, "--json", home=tmp_path)
    out, err = again.communicate(timeout=150)
    assert again.returncode == 0, err
    assert "Resuming study two: 1 of 2 trials is done." in err
    document = json.loads(out)
    # Beside others the second configuration may be as slow as to be stopped for it.
    concluded = document["trials"]["fits"] + document["trials"]["pruned_slow"]
    assert (document["trials"]["total"], concluded, document["trials"]["lost"]) == (3, 2, 1)
    assert document["best"]["measurement"]["tokens_per_second"] > 0
    assert document["confirmation"]["runs"] >= 2
    assert document["confirmation"]["soak"]["checkpoint_bytes"] > 0
    assert document["confirmed"]
    assert (document["gain"] is None) == (document["no_gain"] is not None)
    assert (tmp_path / "runs" / "two" / "report.html").stat().st_size > 100_000

    assert main(run) == 0
    err = capsys.readouterr().err
    assert "Resuming study two: 2 of 2 trials are done." in err
    assert "search has ended" not in err, "what was measured again is not measured once more"
