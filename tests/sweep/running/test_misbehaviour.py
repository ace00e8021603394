"""Whatever a worker does, its trial ends in time, with the true cause, and leaves nobody behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, GpuLost
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.records import (
    INTERRUPTED,
    Attempt,
    Crashed,
    Diverged,
    Ineffective,
    Lost,
    Outcome,
    TimedOut,
)
from qlora_sweep.sweep.processes import End
from qlora_sweep.sweep.running.child import WorkerProcess
from qlora_sweep.sweep.running.runner import Observer, keep_going
from qlora_sweep.sweep.running.supervisor import Deadlines, SupervisedRunner
from qlora_sweep.sweep.running.wire import Progress, TrialRequest
from tests.sweep.running import misbehaving_worker as how
from tests.sweep.running.teams import a_cpu_runner
from tests.sweep.test_processes import ends_soon

STEPS = StepBudget(warmup_min=1, warmup_max=1, measured_min=2, measured_max=2, seconds_max=0.1)
QUICK = Deadlines(
    start=30,
    build=0.5,
    attach=0.5,
    warmup=0.5,
    measure=0.5,
    detach=0.5,
    silences_per_step=2,
    closed=0.5,
    end=10,
)
PATIENT = Deadlines(start=30, closed=0.5)
ATTEMPT = Attempt(id="a1", study="s1", number=0, started_at="2025-01-01T00:00:00+00:00")
ANSWERED = Diverged(step=7, detail="as asked")
IN_TIME = 9.0
"""Far more than the longest limit here and a worker's start."""

Start = Callable[..., SupervisedRunner]
pytestmark = pytest.mark.usefixtures("our_own_code")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker.log"


@pytest.fixture
def start(log: Path) -> Iterator[Start]:
    started: list[SupervisedRunner] = []
    module = "tests.sweep.running.misbehaving_worker"

    def start(**options: Any) -> SupervisedRunner:
        runner = a_cpu_runner(log, **{"deadlines": QUICK, "module": module, **options})
        started.append(runner)
        return runner

    yield start
    for runner in started:
        runner.close()


def ran(
    runner: SupervisedRunner,
    rank: int,
    *,
    attempt: Attempt | None = None,
    steps: StepBudget = STEPS,
    observe: Observer = keep_going,
) -> Any:
    began, config = time.monotonic(), TrialConfig(lora_rank=rank)
    outcome = runner.run(TrialRequest(config=config, steps=steps, attempt=attempt), observe=observe)
    assert time.monotonic() - began < IN_TIME
    return outcome


def pid_of(runner: SupervisedRunner) -> int:
    assert runner._worker is not None
    return runner._worker.process.pid


@pytest.mark.parametrize(
    ("rank", "phase", "words"),
    [
        (how.STOPPED, "attach", "no sign of life for 0.5 s, as somebody stopped the worker's"),
        (how.TRICKLE_WITHOUT_LINES, "attach", "no sign of life for 0.5 s"),
        (how.SILENT_AFTER_BEATS, "measure", "no sign of life for 0.5 s"),
        (how.FLOOD_OF_BEATS, "measure", "no step further for 1 s"),
        (how.BACK_AND_FORTH, "", "no step further for 1 s"),
        (how.ENDLESS_STEPS, "measure", "the trial as a whole took longer than"),
    ],
)
def test_what_does_not_come_to_an_end_is_timed_out_by_the_limit_that_it_passed(
    start: Start, rank: int, phase: str, words: str
) -> None:
    # Of this one each second is waited for.
    measure = 0.25 if rank == how.ENDLESS_STEPS else QUICK.measure
    outcome = ran(start(deadlines=replace(QUICK, measure=measure)), rank)
    assert isinstance(outcome, TimedOut), outcome
    assert words in outcome.detail
    assert outcome.phase == phase or not phase


@pytest.mark.parametrize(
    ("rank", "cause", "words"),
    [
        (how.GARBAGE, "protocol", "'this is not an event': no JSON"),
        (how.FLOOD_WITHOUT_LINES, "protocol", "more than 262,144 bytes without a line end"),
        (how.UNUSABLE_LATE, "protocol", "it fell off the bus"),
        (how.CLOSED_PIPE, "protocol", "it closed its pipe, and lived on"),
        (how.CLOSED_EARS, "protocol", "closed its pipe"),
        (how.EXIT, "exit", "exit status 1; it printed last: hello from a library | Error invalid"),
        (how.KILLED, "signal", "signal SIGKILL from outside"),
        (how.NO_HOST_MEMORY, "host_out_of_memory", "SIGABRT, as the host's memory ran out"),
        (how.CRASH_WITH_THE_PIPE_FLOODED, "signal", "signal SIGSEGV"),
        (how.HALF_AN_ANSWER, "signal", "signal SIGSEGV"),
    ],
)
def test_what_no_worker_says_and_an_end_of_its_own_are_told_as_they_were_and_at_once(
    start: Start, rank: int, cause: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qlora_sweep.sweep.processes.oom_kills", lambda: 3)
    # Whether it reads is known once something was written to it.
    outcome = ran(start(deadlines=PATIENT), rank, observe=lambda _: True)
    assert isinstance(outcome, Crashed), outcome
    assert outcome.cause == cause
    assert words in outcome.detail
    if cause == "protocol":
        assert "SIGKILL" not in outcome.detail


def test_a_kill_by_the_kernel_for_want_of_memory_has_its_own_cause(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([3, 4])
    monkeypatch.setattr("qlora_sweep.sweep.processes.oom_kills", lambda: next(kills))
    outcome = ran(start(), how.KILLED)
    assert isinstance(outcome, Crashed)
    assert outcome.cause == "host_out_of_memory"


def test_a_compiler_that_the_kernel_killed_is_no_setting_without_effect(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([4, 4, 4, 5])
    monkeypatch.setattr("qlora_sweep.sweep.running.supervisor.oom_kills", lambda: next(kills))
    assert isinstance(ran(start(), how.NO_COMPILER), Ineffective)
    outcome = ran(start(), how.NO_COMPILER)
    assert isinstance(outcome, Crashed)
    assert outcome.cause == "host_out_of_memory"


def test_an_answer_is_heard_though_the_worker_died_of_it_and_another_holds_its_pipe(
    start: Start,
) -> None:
    assert ran(start(), how.ANSWER_AND_DIE) == ANSWERED


@pytest.mark.parametrize("rank", [how.ANSWER_TWICE, how.DIE_IDLE])
def test_what_a_worker_does_between_two_trials_is_no_later_trials_fault(
    start: Start, rank: int
) -> None:
    runner = start()
    assert ran(runner, rank) == ANSWERED
    time.sleep(0.1)
    assert ran(runner, how.FINE) == ANSWERED


def test_an_answer_to_an_earlier_trial_is_none_to_this_one(start: Start) -> None:
    runner = start()
    assert ran(runner, how.ANSWER_AGAIN_LATER) == ANSWERED
    # Of the same configuration, too.
    outcome = ran(runner, how.ANSWER_AGAIN_LATER)
    assert isinstance(outcome, Crashed)
    assert "it said 'finished' out of turn" in outcome.detail


def test_what_an_outcome_says_in_words_can_be_stored_and_shown(start: Start) -> None:
    outcome = ran(start(), how.NUL_IN_WORDS)
    assert isinstance(outcome, Diverged)
    assert outcome.detail.isprintable()
    assert "hunter2" not in outcome.detail
    assert len(outcome.detail) <= 1000


def test_what_was_left_on_disk_before_the_end_is_the_result(start: Start) -> None:
    assert ran(start(), how.LEAVE_AND_DIE, attempt=ATTEMPT) == ANSWERED


def test_what_an_earlier_run_of_the_same_attempt_left_on_disk_is_not(start: Start) -> None:
    runner = start()
    assert ran(runner, how.ANSWER_LEAVE_AND_DIE_NEXT, attempt=ATTEMPT) == ANSWERED
    outcome = ran(runner, how.ANSWER_LEAVE_AND_DIE_NEXT, attempt=ATTEMPT)
    assert isinstance(outcome, Crashed), outcome


def test_a_grandchild_does_not_outlive_a_hang(start: Start, log: Path) -> None:
    assert isinstance(ran(start(), how.GRANDCHILD), TimedOut)
    (number,) = log.read_text(encoding="utf-8").split("grandchild ")[1:]
    assert ends_soon(int(number.split()[0]))


@pytest.mark.parametrize(
    ("seed", "verdict", "words"),
    [
        (how.STOPPED_SEED, "timed_out", "no sign of life for 1 s"),
        (how.CHATTY_SEED, "crashed", "said 'progress' out of turn"),
        (how.DEAF_SEED, "timed_out", "no sign of life for 1 s"),
    ],
)
def test_a_worker_that_goes_wrong_as_it_starts_ends_as_any(
    start: Start, seed: int, verdict: str, words: str
) -> None:
    # Larger than a pipe: what is not read must not make anybody wait.
    runner = start(seed=seed, deadlines=replace(QUICK, start=1))
    runner._settings = runner._settings.model_copy(update={"model": {"name": "x" * 300_000}})
    began = time.monotonic()
    runner.start()
    assert time.monotonic() - began < 5
    outcome = ran(runner, how.FINE)
    assert (outcome.verdict, outcome.phase) == (verdict, "start")
    assert words in outcome.detail


def test_a_worker_that_cannot_use_the_device_or_be_started_is_said_by_the_first_trial(
    start: Start, log: Path
) -> None:
    runner = start(seed=how.UNUSABLE_SEED)
    runner.start()
    with pytest.raises(EnvironmentFault, match="no such device"):
        ran(runner, how.HANG)
    runner = a_cpu_runner(log / "below" / "worker.log")
    runner.start()
    with pytest.raises(EnvironmentFault, match=r"worker\.log"):
        ran(runner, how.HANG)


def test_a_worker_that_was_started_ahead_runs_all_trials(start: Start) -> None:
    runner = start()
    runner.start()
    first = pid_of(runner)
    beats: list[float] = []

    def watch(_: Progress) -> bool:
        beats.append(time.monotonic())
        return False

    assert ran(runner, how.BEAT_AND_ANSWER, observe=watch) == ANSWERED
    # Beats keep a slow trial alive past its deadline.
    assert beats[-1] - beats[0] > 2 * QUICK.measure
    assert ran(runner, how.FINE) == ANSWERED
    assert pid_of(runner) == first
    runner.close()
    assert ends_soon(first)


class Unkillable(WorkerProcess):
    """A worker that the kernel holds, as far as anybody can see."""

    def close(self, *, patience: float = 0.0, kill_seconds: float = 0.0) -> tuple[End, str]:
        _, words = super().close(patience=patience, kill_seconds=kill_seconds)
        return End(None, was_killed=True), words


def test_a_worker_that_nothing_ends_is_the_gpus_loss_and_is_said_once_and_for_all(
    start: Start,
) -> None:
    runner = start(process=Unkillable)
    # What it measured before is kept.
    assert ran(runner, how.LEAVE_AND_HANG, attempt=ATTEMPT) == ANSWERED
    with pytest.raises(GpuLost, match="did not end within 10 s of SIGKILL"):
        ran(runner, how.FINE)
    with pytest.raises(GpuLost, match="What was measured is stored"):
        ran(runner, how.FINE)
    runner.close()
    runner.cancel()
    assert isinstance(ran(runner, how.FINE), Lost)


def test_a_crash_on_a_gpu_with_a_fault_of_its_own_is_the_gpus(start: Start) -> None:
    runner = start(fault=lambda: "2 uncorrectable memory errors (ECC)")
    assert ran(runner, how.FINE) == ANSWERED
    with pytest.raises(GpuLost, match="2 uncorrectable memory errors"):
        ran(runner, how.SEGFAULT)


@pytest.mark.parametrize(
    ("rank", "kept"),
    [
        (how.CLEAN_UP_AND_ANSWER, ANSWERED),
        (how.LEAVE_AND_BEAT, ANSWERED),
        (how.CLEAN_UP_AND_TRAIN_ON, INTERRUPTED),
    ],
)
def test_a_result_that_is_on_its_way_when_somebody_asks_to_stop_is_kept(
    start: Start, rank: int, kept: Outcome
) -> None:
    runner = start(deadlines=replace(QUICK, detach=600.0, quality=600.0))

    def cancel(_: Progress) -> bool:
        runner.cancel()
        return False

    assert ran(runner, rank, attempt=ATTEMPT, observe=cancel) == kept
    assert ran(runner, how.FINE) == INTERRUPTED


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("free", [0, 2, 5])
def test_too_few_descriptors_are_named_with_what_to_do_and_none_is_kept(
    start: Start, free: int
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    runner, before = start(), open_descriptors()
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, limits[1]))
    try:
        with pytest.raises(EnvironmentFault, match=r"too few file descriptors.*ulimit -n"):
            ran(runner, how.FINE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert open_descriptors() == before


def test_no_descriptor_is_kept_of_a_worker_that_was_ended(start: Start) -> None:
    runner, before = start(), open_descriptors()
    for rank in (how.FINE, how.SEGFAULT, how.HANG):
        ran(runner, rank)
    runner.close()
    assert open_descriptors() == before


def test_an_endless_print_fills_no_disk_and_its_end_is_told_in_few_words(
    start: Start, log: Path
) -> None:
    outcome = ran(start(deadlines=Deadlines()), how.PRINT_WITHOUT_END)
    assert isinstance(outcome, Crashed)
    assert outcome.detail.endswith(r"\x1b[31mthe last words")
    assert len(outcome.detail) < 1000
    assert log.stat().st_size < 40 * 10**6
    assert log.with_name("worker.log.1").stat().st_size <= 10 * 2**20


def test_whoever_watches_and_fails_leaves_no_trial_to_the_next(start: Start) -> None:
    def fail(_: object) -> bool:
        raise ZeroDivisionError

    runner = start()
    with pytest.raises(ZeroDivisionError):
        ran(runner, how.BEAT_AND_ANSWER, observe=fail)
    assert ran(runner, how.FINE) == ANSWERED


FOREIGN = {
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    "ACCELERATE_MIXED_PRECISION": "fp8",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
    "LOCAL_RANK": "1",
    "PGPASSWORD": "hunter2",
    "SWEEP_STORAGE": "postgresql://me:hunter2@host/db",
    "HF_TOKEN": "hf_hunter2",
}
GPU = Target(gpu="a10", device="cuda", budget_bytes=GIB)


@pytest.mark.parametrize(
    ("options", "visible"),
    [({}, ""), ({"target": GPU, "gpus": ("GPU-2", "GPU-3"), "concurrent_jobs": 1}, "GPU-2,GPU-3")],
)
def test_a_worker_sees_its_own_gpus_and_no_other_trainings_settings_and_shares_the_cores(
    start: Start,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    visible: str,
) -> None:
    for name, value in FOREIGN.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.delenv(name, raising=False)
    ran(start(**options), how.TELLTALE)
    environment = json.loads(log.read_text().split("environment ")[1].splitlines()[0])
    assert environment["CUDA_VISIBLE_DEVICES"] == visible
    assert environment["TORCHINDUCTOR_CACHE_DIR"].endswith("qlora-sweep/compiled")
    assert "hunter2" not in json.dumps(environment)
    ours = {"ACCELERATE_MIXED_PRECISION", "LOCAL_RANK", "PYTORCH_CUDA_ALLOC_CONF"}
    assert environment.keys().isdisjoint(ours if not visible else {"LOCAL_RANK"})
    if visible:
        threads = int(environment["TORCHINDUCTOR_COMPILE_THREADS"])
        assert 1 <= threads <= max(1, len(os.sched_getaffinity(0)) // 2)


# Nothing of a worker outlives its driver, at whatever moment that is killed; nor does a worker pay

ROOT = Path(__file__).parents[3]
DRIVER = """
import os, sys, time
from qlora_sweep.sweep.processes import Child
child = Child([sys.executable, "-P", *sys.argv[2:], str(os.getpid())], pass_fds=[1], stdout=1)
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
os.kill(os.getpid(), 9)
"""
GUARDED = """
import os, subprocess, sys, time
from qlora_sweep.sweep.processes import bind_to_parent, leave_a_guard
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


@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_a_driver_killed_while_its_worker_starts_leaves_none_after_an_instant(delay: float) -> None:
    words = ("-c", DRIVER, str(delay), "-m", "qlora_sweep.sweep.running", "1")
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
from pathlib import Path
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.sweep.running.wire import TrialRequest
from tests.sweep.running.misbehaving_worker import BEAT_AND_ANSWER
from tests.sweep.running.teams import a_cpu_runner
from tests.sweep.running.test_misbehaviour import QUICK, STEPS

def watch(progress):
    print(runner._worker.process.pid, flush=True)
    return False

module = "tests.sweep.running.misbehaving_worker"
with a_cpu_runner(Path("worker.log"), deadlines=QUICK, module=module) as runner:
    request = TrialRequest(config=TrialConfig(lora_rank=BEAT_AND_ANSWER), steps=STEPS)
    outcome = runner.run(request, observe=watch)
print(outcome.verdict, flush=True)
"""


def test_a_driver_that_was_stopped_hears_first_what_its_worker_said_in_the_meantime(
    tmp_path: Path,
) -> None:
    with python("-c", RUNNING, cwd=tmp_path) as stopped:
        assert stopped.stdout is not None
        stopped.stdout.readline()
        os.kill(stopped.pid, signal.SIGSTOP)
        # Longer than a silence may last, and until after the worker's last word.
        time.sleep(1.8)
        os.kill(stopped.pid, signal.SIGCONT)
        assert stopped.stdout.read().split()[-1] == "diverged"


def test_what_is_printed_onto_a_full_disk_fails_nobody() -> None:
    script = (
        "import sys\n"
        "from qlora_sweep.sweep.running.__main__ import print_without_fail\n"
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
