"""The worker's log stays small whatever is printed, and only its end is ever read."""

from __future__ import annotations

import os
import stat
import tracemalloc
from pathlib import Path

import pytest

from search_spaces.errors import EnvironmentFault
from sweep.running.child import WorkerLog


def printed(log: WorkerLog, data: bytes) -> None:
    """Print as a worker does: through a descriptor of the log's, which it inherited."""
    os.write(log.fileno(), data)


def test_a_log_that_grows_too_large_begins_anew_and_keeps_its_end_beside_it(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "worker.log", bytes_max=1000)
    for number in range(300):
        printed(log, f"line {number}\n".encode())
        log.keep_small()
        assert (tmp_path / "worker.log").stat().st_size <= 1000
    older = (tmp_path / "worker.log.1").read_bytes()
    assert len(older) <= 1000
    whole = older + (tmp_path / "worker.log").read_bytes()
    assert whole.endswith(b"line 298\nline 299\n")
    assert b"\0" not in whole
    log.close()


def test_what_outgrew_it_at_once_is_cut_to_its_end(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "worker.log", bytes_max=1000)
    printed(log, b"x" * 100_000 + b"the end\n")
    log.keep_small()
    kept = (tmp_path / "worker.log.1").read_bytes()
    assert (len(kept), kept[-8:]) == (1000, b"the end\n")
    assert log.tail().endswith("the end")
    printed(log, b"after\n")
    assert (tmp_path / "worker.log").read_bytes() == b"after\n"
    assert log.tail().endswith("the end | after")
    log.close()


def test_what_was_printed_since_the_last_look_is_cut_as_the_worker_ends(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "worker.log", bytes_max=1000)
    printed(log, b"x" * 100_000 + b"the end\n")
    assert log.tail().endswith("the end")
    log.close()
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000


def test_the_end_of_a_huge_log_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    log = WorkerLog(path)
    with path.open("ab") as file:
        file.truncate(500 * 10**6)
    printed(log, b"\nfirst\nsecond\n\nthird\nfourth\n")
    tracemalloc.start()
    try:
        assert log.tail() == "second | third | fourth"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    log.close()


def test_what_an_earlier_worker_printed_is_no_word_of_this_one(tmp_path: Path) -> None:
    first = WorkerLog(tmp_path / "worker.log")
    printed(first, b"somebody else's last words\n")
    first.close()
    log = WorkerLog(tmp_path / "worker.log")
    assert log.tail() == ""
    printed(log, b"mine\n")
    assert log.tail() == "mine"
    assert b"somebody" in (tmp_path / "worker.log").read_bytes()
    log.close()


_ASSERTED = """\
terminate called after throwing an instance of 'c10::AcceleratorError'
  what():  CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace \
below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:44 \
(most recent call first):
"""
_FRAME = "frame #{}: <unknown function> + {} (0x7f01 in /usr/lib/libtorch_cuda.so)\n"


@pytest.mark.parametrize("width", [10, 1500])
def test_an_error_is_told_rather_than_the_stack_that_follows_it(tmp_path: Path, width: int) -> None:
    log = WorkerLog(tmp_path / "worker.log")
    printed(log, b"step 1\nstep 2\nstep 3\n" + _ASSERTED.encode())
    printed(log, b"USDT:2026-11-22 02:43:29 1:1 ActivityProfiler.cpp:59] profiler_stop\n")
    printed(log, "".join(_FRAME.format(n, "t" * width) for n in range(30)).encode())
    assert log.tail() == (
        "step 3 | terminate called after throwing an instance of 'c10::AcceleratorError' | "
        "what():  CUDA error: device-side assert triggered"
    )
    log.close()


_ABORTED = """\
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


def test_an_error_comes_before_the_last_lines_that_leave_it_out(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "worker.log")
    printed(log, _ABORTED.encode())
    reason = "some.library.OddError: the state is gone"
    assert log.tail() == f"{reason} | that was running | for long | Fatal Python error: Aborted"
    # However long the lines after it are.
    printed(log, b"x" * 1000 + b"\n")
    assert log.tail().startswith(f"{reason} | x")
    assert len(log.tail()) <= 610
    # An error that much was printed after was survived.
    printed(log, b"going on\n" * 20)
    assert log.tail() == "going on | going on | going on"
    log.close()


def test_a_stack_alone_is_told_as_it_is(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "worker.log")
    printed(log, b"".join(b"frame #%d: f\n" % number for number in range(5)))
    assert log.tail() == "frame #2: f | frame #3: f | frame #4: f"
    log.close()


def test_what_torchs_profiler_always_prints_is_never_told(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "worker.log")
    profiler = "USDT:2026-11-22 02:43:29 1:1 SyncActivityProfilerHandler.cpp:{}] profiler_{}\n"
    unknown = (
        "[W1122 10:50:38.8 CPUAllocator.cpp:245] Memory block of unknown size was allocated before "
        "the profiling started, profiler results will not include the deallocation event\n"
    )
    printed(log, (profiler.format(52, "start") + unknown + profiler.format(59, "stop")).encode())
    assert log.tail() == ""
    printed(log, b"frame #1: f\n" + profiler.format(52, "start").encode())
    assert log.tail() == "frame #1: f"
    log.close()


def test_no_password_and_nothing_unseen_is_in_the_end(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "worker.log")
    printed(log, b"\x1b[2J at postgresql://me:hunter2hunter2@host/db \xff\n")
    assert "hunter2" not in log.tail()
    assert log.tail().isprintable()
    assert "host/db" in log.tail()
    # Cut where the password stands, the name before it would be all that tells what it is.
    printed(log, b"postgresql://me:" + b"p" * 700 + b"@host/db")
    assert "ppp" not in log.tail()
    log.close()


def test_the_log_is_private_from_the_start(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "study" / "worker.log", bytes_max=10)
    printed(log, b"more than ten bytes\n")
    log.keep_small()
    log.close()
    for path in (tmp_path / "study").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "study").stat().st_mode) == 0o700


@pytest.mark.parametrize("plant", ["link", "pipe", "directory"])
def test_what_was_planted_at_its_path_is_refused(tmp_path: Path, plant: str) -> None:
    path, victim = tmp_path / "worker.log", tmp_path / "victim"
    victim.write_bytes(b"mine")
    match plant:
        case "link":
            path.symlink_to(victim)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with pytest.raises(EnvironmentFault, match=r"worker\.log"):
        WorkerLog(path)
    assert victim.read_bytes() == b"mine"


def test_a_link_planted_where_the_older_part_goes_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "worker.log.1").symlink_to(victim)
    log = WorkerLog(tmp_path / "worker.log", bytes_max=10)
    printed(log, b"more than ten bytes\n")
    log.keep_small()
    log.close()
    assert victim.read_bytes() == b"mine"
    assert (tmp_path / "worker.log").stat().st_size == 0


def test_a_log_whose_older_part_cannot_be_written_stays_small_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "worker.log.1").mkdir()
    log = WorkerLog(tmp_path / "worker.log", bytes_max=10)
    printed(log, b"more than ten bytes\n")
    log.keep_small()
    assert (tmp_path / "worker.log").stat().st_size == 0
    log.close()
