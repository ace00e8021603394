"""The worker's log stays small whatever is printed, and only its end is ever read."""

from __future__ import annotations

import os
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.records import Phase
from qlora_sweep.sweep.running.child import AttentiveClock, WorkerLog
from qlora_sweep.sweep.running.supervisor import Deadlines, Patience
from qlora_sweep.sweep.running.wire import Progress


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "study" / "worker.log"


@pytest.fixture
def log(path: Path) -> Iterator[WorkerLog]:
    log = WorkerLog(path, bytes_max=1000)
    yield log
    log.close()


def printed(log: WorkerLog, data: bytes | str) -> None:
    """Print as a worker does: through a descriptor of the log's, which it inherited."""
    os.write(log.fileno(), data if isinstance(data, bytes) else data.encode())


def older(path: Path) -> Path:
    return path.with_name("worker.log.1")


def test_a_log_that_grows_too_large_begins_anew_and_keeps_its_end_beside_it(
    log: WorkerLog, path: Path
) -> None:
    for number in range(300):
        printed(log, f"line {number}\n")
        log.keep_small()
        assert path.stat().st_size <= 1000
    before = older(path).read_bytes()
    assert len(before) <= 1000
    whole = before + path.read_bytes()
    assert whole.endswith(b"line 298\nline 299\n")
    assert b"\0" not in whole
    for one in (path, older(path)):
        assert stat.S_IMODE(one.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_what_outgrew_it_at_once_is_cut_to_its_end(log: WorkerLog, path: Path) -> None:
    printed(log, b"x" * 100_000 + b"the end\n")
    assert log.tail().endswith("the end")
    log.keep_small()
    kept = older(path).read_bytes()
    assert (len(kept), kept[-8:]) == (1000, b"the end\n")
    assert log.tail().endswith("the end")
    printed(log, "after\n")
    assert path.read_bytes() == b"after\n"
    assert log.tail().endswith("the end | after")
    printed(log, b"x" * 100_000)
    log.close()
    assert path.stat().st_size + older(path).stat().st_size <= 2000


def test_the_end_of_a_huge_log_takes_no_memory(path: Path) -> None:
    log = WorkerLog(path)
    with path.open("ab") as file:
        file.truncate(500 * 10**6)
    printed(log, "\nfirst\nsecond\n\nthird\nfourth\n")
    tracemalloc.start()
    try:
        assert log.tail() == "second | third | fourth"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    log.close()


ASSERTED = """\
step 1
terminate called after throwing an instance of 'c10::AcceleratorError'
  what():  CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace \
below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:44 \
(most recent call first):
"""
FRAME = "frame #{}: <unknown function> + {} (0x7f01 in /usr/lib/libtorch_cuda.so)\n"
ABORTED = """\
Traceback (most recent call last):
  File "/usr/lib/python3/bitsandbytes/optim.py", line 7, in step
    self.update()
    ^^^^^^^^^^^^^
some.library.OddError: the state is gone
Exception in a thread
  that was running
  for long
Fatal Python error: Aborted

Current thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3/threading.py", line 5 in run
Extension modules: numpy.core, torch._C (total: 2)
"""
PROFILER = (
    "USDT:2026-11-22 02:43:29 1:1 SyncActivityProfilerHandler.cpp:52] profiler_start\n"
    "[W1122 10:50:38.8 CPUAllocator.cpp:245] Memory block of unknown size was allocated before the "
    "profiling started, profiler results will not include the deallocation event\n"
)
WHAT = (
    "step 1 | terminate called after throwing an instance of 'c10::AcceleratorError' | "
    "what():  CUDA error: device-side assert triggered"
)
REASON = "some.library.OddError: the state is gone"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (ASSERTED + PROFILER + "".join(FRAME.format(n, "t" * 10) for n in range(30)), WHAT),
        (ABORTED, f"{REASON} | that was running | for long | Fatal Python error: Aborted"),
        # An error that much was printed after was survived.
        (ABORTED + "going on\n" * 20, "going on | going on | going on"),
        # A stack alone says more than nothing.
        ("".join(f"frame #{n}: f\n" for n in range(3)), "frame #0: f | frame #1: f | frame #2: f"),
        ("frame #1: f\n" + PROFILER, "frame #1: f"),
    ],
)
def test_an_error_is_told_rather_than_where_in_the_code_it_was(
    path: Path, text: str, told: str
) -> None:
    log = WorkerLog(path)
    printed(log, text)
    assert log.tail() == told
    log.close()


def test_no_password_and_nothing_unseen_is_in_the_end(log: WorkerLog) -> None:
    printed(log, b"\x1b[2J at postgresql://me:hunter2hunter2@host/db \xff\n")
    assert "hunter2" not in log.tail()
    assert log.tail().isprintable()
    assert "host/db" in log.tail()
    # Cut where the password stands, the name before it would be all that tells what it is.
    printed(log, "postgresql://me:" + "p" * 700 + "@host/db")
    assert "ppp" not in log.tail()


@pytest.mark.parametrize("plant", [lambda path: path.symlink_to("victim"), os.mkfifo])
def test_what_was_planted_at_its_path_is_refused(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    (tmp_path / "victim").write_bytes(b"mine")
    plant(tmp_path / "worker.log")
    with pytest.raises(EnvironmentFault, match=r"worker\.log"):
        WorkerLog(tmp_path / "worker.log")
    assert (tmp_path / "victim").read_bytes() == b"mine"


@pytest.mark.parametrize("plant", [lambda path: path.symlink_to("victim"), os.mkdir])
def test_what_was_planted_where_the_older_part_goes_is_harmless(
    log: WorkerLog, path: Path, plant: Callable[[Path], None]
) -> None:
    victim = path.with_name("victim")
    victim.write_bytes(b"mine")
    plant(older(path))
    printed(log, "much\n" * 500)
    log.keep_small()
    assert victim.read_bytes() == b"mine"
    assert path.stat().st_size == 0


# A worker gets the time that is its due, and none that its driver was away for.

STEPS = StepBudget()
DEADLINES = Deadlines()


class Driver:
    """Looks every fifth of a second, as the real one does, and may be away in between."""

    def __init__(self, steps: StepBudget = STEPS, **patience: int) -> None:
        self.seconds = 1000.0
        self.clock = AttentiveClock(clock=lambda: self.seconds)
        self.patience = Patience(DEADLINES, self.clock, steps, **patience)

    def wait(self, seconds: float) -> bool:
        """Look for so long, and return whether time was up on the way."""
        until = self.seconds + seconds
        while self.seconds < until:
            self.seconds += 0.2
            self.clock.look()
            if self.patience.exceeded() is not None:
                return True
        return False

    def hear(self, phase: Phase, step: int = 0) -> None:
        self.patience.hear(Progress(phase=phase, step=step))


def test_a_step_of_more_micro_batches_has_the_time_of_all_of_them() -> None:
    driver = Driver(micro_steps=4)
    begun = driver.seconds
    driver.hear("measure", 5)
    while not driver.wait(10):
        driver.hear("measure", 5)
    limit = 2 * DEADLINES.of_progress("measure")
    assert driver.seconds - begun == pytest.approx(limit, abs=1)


def test_a_soak_of_hours_has_them_as_long_as_a_step_now_and_then_is_done() -> None:
    seconds = 10 * 3600.0
    soak = StepBudget(measured_max=10**6, seconds_max=seconds)
    assert seconds < DEADLINES.of_trial(soak) < seconds + 7200
    driver = Driver(soak)
    for step in range(int(seconds / 100)):
        assert not driver.wait(100)
        driver.hear("measure", step)


@pytest.mark.parametrize(("phase", "tokens"), [("measure", 0), ("quality", 50_000)])
def test_a_trial_as_a_whole_has_an_end_however_lively_it_is(phase: Phase, tokens: int) -> None:
    driver = Driver(quality_tokens=tokens)
    steps = count()
    begun = driver.seconds
    while not driver.wait(10):
        driver.hear(phase, next(steps))
    whole = DEADLINES.of_trial(STEPS)
    if tokens:
        whole += DEADLINES.of_quality(tokens)
    assert driver.seconds - begun == pytest.approx(whole, abs=1)
