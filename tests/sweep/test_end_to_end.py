"""The command as a person runs it: a real study of real trainings on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from search_spaces.presets import preset_texts

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from sweep.cli import main; raise SystemExit(main())"]
pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=ROOT,
            env={**os.environ, "SWEEP_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


Start = Callable[..., subprocess.Popen[str]]


def test_a_study_on_the_cpu_finds_a_winner_writes_its_report_and_goes_on(
    start: Start, tmp_path: Path
) -> None:
    # What is as fast as the winner is measured again for as long as there are seconds.
    text = preset_texts()["cpu-demo"].replace("  seconds: 8", "  seconds: 1")
    space = tmp_path / "space.yaml"
    text = text.replace("  repeats: 4", "  repeats: 2").replace(
        "  soak_seconds: 3", "  soak_seconds: 1"
    )
    space.write_text(text, encoding="utf-8")
    out, err = start("run", str(space), "--trials", "4", "--json").communicate(timeout=150)
    document = json.loads(out)
    assert document["trials"]["total"] == 4
    assert document["best"]["measurement"]["tokens_per_second"] > 0
    assert document["baseline"]["tokens_per_second"] > 0
    assert "Starting study cpu-demo: at most 4 trials." in err
    assert "the search has ended: measuring trial" in err
    assert document["confirmation"]["runs"] >= 2
    assert document["confirmation"]["soak"]["checkpoint_bytes"] > 0
    assert document["confirmation"]["soak"]["evaluation_loss"] > 0
    assert document["confirmed"]
    assert (document["gain"] is None) == (document["no_gain"] is not None)
    assert "\x1b" not in err
    assert (tmp_path / "runs" / "cpu-demo" / "report.html").stat().st_size > 100_000

    again = start("run", str(space), "--trials", "4")
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0
    assert "Resuming study cpu-demo: 4 of 4 trials are done." in err
    assert "search has ended" not in err, "what was measured again is not measured once more"
    assert "The fastest configuration that fits is trial" in out
    assert "sweep best cpu-demo" in out


TRIAL_SECONDS = 15.0
SPACE = f"""
name: two
description: Two configurations that each train for a while
gpu: cpu
model: demo
budget_gib: 0.5
trials: 2
confirm: false
steps: {{measured_max: 9999, seconds_max: {TRIAL_SECONDS}, relative_interval: 0.0001}}
dimensions:
  micro_batch_size: [4, 8]
fixed: {{kernels: hf, compile: false, seq_len: 128}}
baseline: {{micro_batch_size: 4, seq_len: 128}}
"""


def test_an_interrupt_ends_the_trial_at_once_and_the_same_command_finishes_the_study(
    start: Start, tmp_path: Path
) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(SPACE, encoding="utf-8")
    process = start("run", str(space))
    worker = _worker_of(process)
    assert process.stderr is not None
    said = next(line for line in process.stderr if "trial 1, measuring" in line)
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - asked < TRIAL_SECONDS * 2 / 3, said
    assert process.returncode == 130
    assert "the same command resumes" in err
    assert "sweep best two" in out
    assert (tmp_path / "runs" / "two" / "report.html").exists()
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE

    before = json.loads(start("status", "two", "--json").communicate(timeout=60)[0])
    assert before["ended"] is None
    assert (before["trials"]["fits"], before["trials"]["lost"]) == (1, 1)
    listed = json.loads(start("status", "--json").communicate(timeout=60)[0])["studies"]
    assert [(study["driven_by"], study["running"]) for study in listed] == [(None, [])]

    again = start("run", str(space), "--json")
    out, err = again.communicate(timeout=150)
    assert again.returncode == 0
    assert "Resuming study two: 1 of 2 trials is done." in err
    after = json.loads(out)
    # Beside others the second configuration may be as slow as to be stopped for it.
    concluded = after["trials"]["fits"] + after["trials"]["pruned_slow"]
    assert (after["trials"]["total"], concluded, after["trials"]["lost"]) == (3, 2, 1)


def _worker_of(process: subprocess.Popen[str]) -> psutil.Process:
    """Wait until the study's worker runs, and return it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(process.pid).children(recursive=True):
            # One that has just ended has no command line any more.
            with contextlib.suppress(psutil.Error):
                if "sweep.running" in child.cmdline():
                    return child
        time.sleep(0.1)
    raise AssertionError("no worker was started")
