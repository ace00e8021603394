from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qlora_sweep.sweep.processes import STOP_SIGNALS, Child, End, process_pool

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shell() -> Iterator[Callable[[str], Child]]:
    """Start shells, which are ended with the test."""
    started: list[Child] = []

    def start(script: str) -> Child:
        started.append(Child(["/bin/sh", "-c", script], stderr=subprocess.DEVNULL))
        return started[-1]

    yield start
    for child in started:
        child.end()
        for stream in (child.process.stdin, child.process.stdout):
            assert stream is not None
            stream.close()


def line(child: Child) -> str:
    assert child.process.stdout is not None
    return child.process.stdout.readline().decode().strip()


def is_running(number: int) -> bool:
    try:
        status = Path(f"/proc/{number}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def ends_soon(*numbers: int, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_running, numbers)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


Shell = Callable[[str], Child]


def test_an_end_by_a_signal_is_told_with_its_name_or_its_number(shell: Shell) -> None:
    assert str(shell("kill -SEGV $$").end(patience=5.0)) == "signal SIGSEGV"
    # Between the two real-time signals that Python has names for.
    assert str(shell("kill -40 $$").end(patience=5.0)) == "signal 40"
    assert shell("sleep 600").end(patience=0.05) == End(-signal.SIGKILL, was_killed=True)


@pytest.mark.parametrize("how", ["exit 1", "sleep 600"])
def test_what_left_the_process_group_is_found_too(shell: Shell, how: str) -> None:
    child = shell(f"setsid sh -c 'echo $$; exec sleep 600' & read line; {how}")
    number = int(line(child))
    assert os.getsid(number) == number
    assert child.process.stdin is not None
    child.process.stdin.write(b"go on\n")
    child.process.stdin.flush()
    child.end(patience=0.2)
    assert ends_soon(number)


def test_a_process_that_nothing_ends_is_given_up_in_time(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = shell("sleep 600")
    with monkeypatch.context() as patched:
        # The kernel's doing, which no test can bring about.
        patched.setattr(os, "killpg", lambda *_: None)
        patched.setattr(os, "kill", lambda *_: None)
        end = child.end(kill_seconds=0.2)
    assert end.status is None
    assert is_running(child.pid)
    assert "SIGKILL" in str(end)
    os.killpg(child.pid, signal.SIGKILL)
    child.process.wait()


BOUND = f"""
import os, resource, sys, time
sys.path.insert(0, {str(ROOT)!r})
from qlora_sweep.sweep.processes import bind_to_parent
bind_to_parent(int(sys.argv[1]))
print(os.getpid(), *resource.getrlimit(resource.RLIMIT_CPU), flush=True)
time.sleep(600)
"""
PARENT = f"""
import os, subprocess, sys, time
from qlora_sweep.sweep.processes import Child
child = Child([sys.executable, '-P', '-c', {BOUND!r}, str(os.getpid())])
print(child.process.stdout.readline().split()[0].decode(), flush=True)
time.sleep(600)
"""
POOL = """
import os, time
from qlora_sweep.sweep.processes import process_pool
from tests.sweep.test_processes import sleep_long

if __name__ == "__main__":
    with process_pool(2) as pool:
        number = pool.submit(os.getpid)
        futures = [pool.submit(sleep_long, n) for n in range(4)]
        print(number.result(), flush=True)
        futures[0].result()
"""


def sleep_long(_: int) -> None:
    time.sleep(600)


@pytest.mark.parametrize("program", [PARENT, POOL], ids=["bound", "pool"])
def test_a_bound_child_and_a_pools_hear_no_signal_and_end_with_their_parent_however_that_ends(
    program: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")],
        stdout=subprocess.PIPE,
        # What a killed parent leaves of semaphores is told there.
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        for asked in STOP_SIGNALS:
            os.kill(number, asked)
        time.sleep(0.2)
        assert is_running(number)
        parent.kill()
    assert ends_soon(number)


def test_a_child_whose_parent_was_gone_before_it_was_bound_ends_by_itself() -> None:
    other = "1" if os.getpid() != 1 else "2"
    command = [sys.executable, "-P", "-c", BOUND, other]
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_childs_limit_of_processor_time_is_heard_of_before_it_kills_and_it_is_killed_for_memory(
    shell: Shell,
) -> None:
    command = shlex.join([sys.executable, "-P", "-c", BOUND, str(os.getpid())])
    child = shell(f"ulimit -t 60; exec {command}")
    assert line(child) == f"{child.pid} 59 60"
    score, own = (
        int(Path(f"/proc/{of}/oom_score_adj").read_text(encoding="ascii"))
        for of in (child.pid, "self")
    )
    assert score >= own


REAPER = """
import ctypes, os
from pathlib import Path
from qlora_sweep.sweep.processes import Child
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
child = Child(['/bin/sh', '-c', 'sleep 600 & sleep 600 & echo on; exit 3'])
child.process.stdout.readline()
print(child.end(patience=5).status)
print(Path(f'/proc/self/task/{os.getpid()}/children').read_text())
"""


def test_a_containers_first_process_keeps_no_zombies_of_what_its_children_left() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REAPER], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stdout.split() == ["3"], done.stderr


def test_what_a_pool_does_is_given_up_at_once_where_it_is_cut_short() -> None:
    began, pids = time.monotonic(), list[int]()

    def work() -> None:
        with process_pool(2) as pool:
            number = pool.submit(os.getpid)
            for _ in range(20):
                pool.submit(sleep_long, 0)
            pids.append(number.result(timeout=60))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert ends_soon(*pids)
    assert time.monotonic() - began < 60
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
