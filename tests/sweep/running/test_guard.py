"""Nothing of a worker outlives its driver, at whatever moment that is killed; nor does a worker pay
for a driver that was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sweep.running.test_misbehaviour import are_gone

ROOT = Path(__file__).parents[3]
DRIVER = """
import os, sys, time
from sweep.processes import Child
child = Child([sys.executable, "-P", *sys.argv[2:], str(os.getpid())], pass_fds=[1], stdout=1)
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
os.kill(os.getpid(), 9)
"""
GUARDED = """
import os, subprocess, sys, time
from sweep.processes import bind_to_parent, leave_a_guard
bind_to_parent(int(sys.argv[1]))
leave_a_guard()
for command in ("sleep 600", "setsid sleep 600", "exec sleep 600"):
    child = subprocess.Popen(["/bin/sh", "-c", command])
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(600)
time.sleep(0.3)
print("all", flush=True)
HOW
time.sleep(600)
"""


def driver(delay: float, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", DRIVER, str(delay), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )


@pytest.mark.parametrize("delay", [0.0, 0.03, 0.1, 0.5])
def test_a_driver_killed_while_its_worker_starts_leaves_none_after_an_instant(delay: float) -> None:
    with driver(delay, "-m", "sweep.running", "1") as killed:
        assert killed.stdout is not None
        worker = int(killed.stdout.readline())
        killed.wait()
        began = time.monotonic()
        # The pipe is closed when nothing of it is left, its guard included.
        assert killed.stdout.read() == ""
        assert time.monotonic() - began < 15
    assert are_gone([worker])


@pytest.mark.parametrize("how", ["", "os.kill(os.getpid(), 11)", "os._exit(3)"])
def test_what_a_worker_started_ends_with_it_or_with_its_driver(how: str) -> None:
    with driver(1.5 if how else 0.9, "-c", GUARDED.replace("HOW", how)) as killed:
        assert killed.stdout is not None
        worker, forked = int(killed.stdout.readline()), int(killed.stdout.readline())
        assert killed.stdout.readline() == "all\n"
        began = time.monotonic()
        assert killed.stdout.read() == ""
        assert time.monotonic() - began < 15
        assert are_gone([worker, forked])


STOPPED_DRIVER = """
import sys
from pathlib import Path
from search_spaces.config import TrialConfig
from search_spaces.models import load_model_spec
from search_spaces.space import StepBudget
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import TrialRequest
from tests.sweep.running.misbehaving_worker import BEAT_AND_ANSWER
from tests.sweep.running.test_misbehaviour import CPU, QUICK

def watch(progress):
    print(progress.step, flush=True)
    return False

with SupervisedRunner(
    load_model_spec("demo"),
    target=CPU,
    log_path=Path(sys.argv[1]),
    deadlines=QUICK,
    module="tests.sweep.running.misbehaving_worker",
) as runner:
    config = TrialConfig(lora_rank=BEAT_AND_ANSWER)
    outcome = runner.run(TrialRequest(config=config, steps=StepBudget()), observe=watch)
print(outcome.verdict, flush=True)
"""


def test_a_driver_that_was_stopped_hears_first_what_its_worker_said_in_the_meantime(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", STOPPED_DRIVER, str(tmp_path / "worker.log")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as stopped:
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "0\n"
        os.kill(stopped.pid, signal.SIGSTOP)
        # Longer than a silence may last, and until after the worker's last word.
        time.sleep(1.8)
        os.kill(stopped.pid, signal.SIGCONT)
        assert stopped.stdout.read().split()[-1] == "diverged"


def test_what_is_printed_onto_a_full_disk_fails_nobody() -> None:
    script = (
        "import sys\n"
        "from sweep.running.__main__ import print_without_fail\n"
        "print_without_fail()\n"
        "for stream in (sys.stdout, sys.stderr):\n"
        "    print('no room for this \\udcff', file=stream, flush=True)\n"
        "sys.exit(3)\n"
    )
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-c", script],
            stdout=full,
            stderr=full,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=False,
        )
    assert done.returncode == 3
