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

from tests.sweep.test_processes import ends_soon, is_running

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


def python(*arguments: str, cwd: Path = ROOT, stderr: int | None = None) -> subprocess.Popen[str]:
    """Start a program that prints, and finds the code of this checkout."""
    return subprocess.Popen(
        [sys.executable, "-P", *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def assert_nothing_is_left_of(driver: subprocess.Popen[str]) -> None:
    """The pipe is closed when nothing that inherited it is left, a worker's guard included."""
    assert driver.stdout is not None
    began = time.monotonic()
    assert driver.stdout.read() == ""
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.5])
def test_a_driver_killed_while_its_worker_starts_leaves_none_after_an_instant(delay: float) -> None:
    words = ("-c", DRIVER, str(delay), "-m", "sweep.running", "1")
    with python(*words, stderr=subprocess.DEVNULL) as killed:
        assert killed.stdout is not None
        worker = int(killed.stdout.readline())
        killed.wait()
        assert_nothing_is_left_of(killed)
    assert ends_soon(worker)


@pytest.mark.parametrize("how", ["", "os.kill(os.getpid(), 11)", "os._exit(3)"])
def test_what_a_worker_started_ends_with_it_or_with_its_driver(how: str) -> None:
    delay = "1.5" if how else "0.9"
    with python("-c", DRIVER, delay, "-c", GUARDED.replace("HOW", how)) as killed:
        assert killed.stdout is not None
        worker, forked = int(killed.stdout.readline()), int(killed.stdout.readline())
        assert killed.stdout.readline() == "all\n"
        assert_nothing_is_left_of(killed)
        assert ends_soon(worker, forked)


RUNNING = """
import sys
from pathlib import Path
from search_spaces.config import TrialConfig
from search_spaces.space import StepBudget
from sweep.running.wire import TrialRequest
from tests.sweep.running.misbehaving_worker import BEAT_AND_ANSWER
from tests.sweep.running.teams import a_cpu_runner
from tests.sweep.running.test_misbehaviour import QUICK

def watch(progress):
    print(runner._worker.process.pid, flush=True)
    return False

options = {"deadlines": QUICK, "module": "tests.sweep.running.misbehaving_worker"}
config = TrialConfig(lora_rank=BEAT_AND_ANSWER)
if sys.argv[1] == "real":
    options, config = {}, TrialConfig(micro_batch_size=1, seq_len=16)
with a_cpu_runner(Path("worker.log"), **options) as runner:
    steps = StepBudget(measured_max=10000, seconds_max=600)
    outcome = runner.run(TrialRequest(config=config, steps=steps), observe=watch)
print(outcome.verdict, flush=True)
"""


def test_a_driver_that_was_stopped_hears_first_what_its_worker_said_in_the_meantime(
    tmp_path: Path,
) -> None:
    with python("-c", RUNNING, "misbehaving", cwd=tmp_path) as stopped:
        assert stopped.stdout is not None
        stopped.stdout.readline()
        os.kill(stopped.pid, signal.SIGSTOP)
        # Longer than a silence may last, and until after the worker's last word.
        time.sleep(1.8)
        os.kill(stopped.pid, signal.SIGCONT)
        assert stopped.stdout.read().split()[-1] == "diverged"


def test_a_real_worker_is_not_shadowed_by_the_users_modules_and_dies_with_its_parent(
    tmp_path: Path,
) -> None:
    for name in ("storage.py", "sweep.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')")
    with python("-c", RUNNING, "real", cwd=tmp_path) as driver:
        assert driver.stdout is not None
        worker = int(driver.stdout.readline())
        assert is_running(worker)
        os.kill(driver.pid, signal.SIGKILL)
    assert ends_soon(worker)


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
            [sys.executable, "-P", "-c", script], stdout=full, stderr=full, cwd=ROOT, check=False
        )
    assert done.returncode == 3
