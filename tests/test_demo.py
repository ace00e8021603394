"""`make demo` convinces: it ends soon, shows an out-of-memory, and states the winner's gain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.storage.reading import read_study
from qlora_sweep.sweep.data.prepared_dataset import prepare_dataset
from qlora_sweep.sweep.finetuning.training import TrainingRequest, prepare_training

ROOT = Path(__file__).parents[1]
SPIN = "import os\nwhile os.getppid() == {parent}: pass"
SECONDS_MAX = 120
"""Beside two processes that take all the CPU they get."""


@contextmanager
def busy() -> Iterator[None]:
    """A process that computes for as long as this one lives."""
    process = subprocess.Popen([sys.executable, "-c", SPIN.format(parent=os.getpid())])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def command() -> list[str]:
    """What `make demo` runs."""
    (line,) = [
        line for line in (ROOT / "Makefile").read_text().splitlines() if "terminal.demo" in line
    ]
    return [sys.executable, *line.split("python ")[1].split()]


def ran(home: Path, words: list[str]) -> str:
    """Run a command in a home of its own, and return what it printed."""
    environment = os.environ | {"SWEEP_HOME": str(home), "COLUMNS": "80"}
    # Nothing is known from an earlier study, as after an installation.
    environment |= {"XDG_CACHE_HOME": str(home / "cache")}
    run = {"cwd": ROOT, "env": environment, "text": True, "capture_output": True}
    done = subprocess.run(words, timeout=600, stdin=subprocess.DEVNULL, **run)
    assert done.returncode == 0, done.stderr
    return done.stdout


def demonstrated(home: Path) -> tuple[dict[str, Any], str]:
    """Run the demonstration in a home of its own; return the document of `best`, and the screen."""
    screen = ran(home, command())
    best = [sys.executable, "-P", "-m", "qlora_sweep", "best", "demo", "--json"]
    document = json.loads(ran(home, best))
    assert (home / "runs" / "demo" / "report.html").exists()
    assert (home / "runs" / "demo-a10" / "report.html").exists()
    return document, screen


def check(document: dict[str, Any], screen: str) -> None:
    trials = document["trials"]
    assert trials["total"] <= 12
    assert trials["oom"] >= 1
    assert trials["predicted_oom"] >= 1
    assert document["confirmed"]
    assert document["gain"]["low"] > 1
    assert document["gain"]["ratio"] > 1.5
    assert len(screen.strip().splitlines()) <= 12
    for said in ("ran out of memory", "predicted not to fit", "recorded on an NVIDIA H200", "2.1x"):
        assert said in screen


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demonstration_has_a_gain_and_its_winner_can_train_on_the_example_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(*demonstrated(tmp_path))
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    runs = tmp_path / "runs"
    example = {"texts": str(ROOT / "docs" / "examples" / "dataset.jsonl")}
    prepared = prepare_training(
        TrainingRequest(name="demo", output=tmp_path / "output", dataset=example),
        read_study=lambda name: read_study(name, url=f"sqlite:///{runs}/sweep.db", home=runs),
        read_dataset=prepare_dataset,
        read_gpus=tuple,
        warn=print,
    )
    # Nobody has to agree to it.
    assert not prepared.truncation.is_much


@pytest.mark.faults
@pytest.mark.timeout(1300)
def test_beside_two_busy_processes_it_ends_soon_with_the_same_winner_each_time(
    tmp_path: Path,
) -> None:
    winners = []
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(busy())
        for number in range(2):
            began = time.monotonic()
            document, screen = demonstrated(tmp_path / str(number))
            assert time.monotonic() - began < SECONDS_MAX
            check(document, screen)
            winners.append(document["best"]["config"])
    assert winners[0] == winners[1]
