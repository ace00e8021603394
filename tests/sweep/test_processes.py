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

from sweep.processes import STOP_SIGNALS, Child, End

PYTHON = (sys.executable, "-P", "-S", "-c")
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


def ends_soon(*numbers: int, seconds: float = 5.0) -> bool:
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


def test_what_does_not_end_by_itself_is_killed_and_told_so(shell: Shell) -> None:
    began = time.monotonic()
    end = shell("sleep 600").end(patience=0.05)
    assert end == End(-signal.SIGKILL, was_killed=True)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("how", ["exit 1", "kill -SEGV $$", "sleep 600"])
def test_fifty_grandchildren_end_with_a_child_however_it_ends(shell: Shell, how: str) -> None:
    child = shell(f"for i in $(seq 50); do sleep 600 & echo $!; done; {how}")
    numbers = [int(line(child)) for _ in range(50)]
    child.end(patience=0.2)
    assert all(ends_soon(number) for number in numbers)


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


def test_looking_for_an_end_does_not_free_the_number(shell: Shell) -> None:
    child = shell("exit 3")
    while not child.has_ended():
        time.sleep(0.01)
    assert Path(f"/proc/{child.pid}").exists()
    assert child.end() == child.end() == End(3)
    assert not Path(f"/proc/{child.pid}").exists()
    child.kill()


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


def a_parent_of(child: str) -> subprocess.Popen[bytes]:
    """Start a parent that starts such a child and never ends it."""
    script = (
        "import os, subprocess, sys, time\n"
        "from sweep.processes import Child\n"
        f"child = Child([sys.executable, '-P', '-c', {child!r}, str(os.getpid())])\n"
        "print(child.process.stdout.readline().decode().strip(), flush=True)\n"
        "time.sleep(600)\n"
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)


BOUND = (
    "import os, sys, time\n"
    f"sys.path.insert(0, {str(ROOT)!r})\n"
    "from sweep.processes import bind_to_parent\n"
    "bind_to_parent(int(sys.argv[1]))\n"
    "print(os.getpid(), flush=True)\n"
    "time.sleep(600)\n"
)


def test_a_bound_child_ends_with_its_parent_however_that_ends() -> None:
    with a_parent_of(BOUND) as parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        assert is_running(number)
        parent.kill()
    assert ends_soon(number)


def test_a_child_whose_parent_was_gone_before_it_was_bound_ends_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", BOUND, "1" if os.getpid() != 1 else "2"],
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_what_stops_a_study_is_the_parents_to_hear(number: signal.Signals) -> None:
    child = Child([sys.executable, "-P", "-c", BOUND, str(os.getpid())])
    try:
        assert int(line(child)) == child.pid
        os.killpg(child.pid, number)
        time.sleep(0.1)
        assert not child.has_ended()
        score = Path(f"/proc/{child.pid}/oom_score_adj").read_text(encoding="ascii")
        own = Path("/proc/self/oom_score_adj").read_text(encoding="ascii")
        assert int(score) >= int(own)
    finally:
        child.end()
        for stream in (child.process.stdin, child.process.stdout):
            assert stream is not None
            stream.close()


def test_a_limit_of_processor_time_is_heard_of_before_it_kills(shell: Shell) -> None:
    script = BOUND.replace("os.getpid(), flush", "resource.getrlimit(resource.RLIMIT_CPU), flush")
    script = script.replace("import os", "import os, resource", 1)
    command = shlex.join([sys.executable, "-P", "-c", script, str(os.getpid())])
    child = shell(f"ulimit -t 60; exec {command}")
    assert line(child) == "(59, 60)"


def test_a_child_that_somebody_stopped_can_be_told_from_one_that_is_slow(shell: Shell) -> None:
    child = shell("echo here; exec sleep 600")
    assert line(child) == "here"
    assert not child.is_stopped()
    os.kill(child.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5.0
    while not child.is_stopped() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert child.is_stopped()
    child.end()
    assert not child.is_stopped()


def test_the_hosts_memory_is_blamed_for_what_the_kernel_killed_alone(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([4, 5, 4, 4, 4, 5])
    monkeypatch.setattr("sweep.processes.oom_kills", lambda: next(kills))
    by_kernel = shell("kill -KILL $$").end(patience=5.0)
    assert by_kernel.is_host_out_of_memory
    assert "memory ran out" in str(by_kernel)
    assert not shell("kill -KILL $$").end(patience=5.0).is_host_out_of_memory
    assert not shell("sleep 600").end().is_host_out_of_memory


def test_a_containers_first_process_keeps_no_zombies_of_what_its_children_left() -> None:
    script = (
        "import ctypes, os, subprocess\n"
        "from pathlib import Path\n"
        "from sweep.processes import Child\n"
        "PR_SET_CHILD_SUBREAPER = 36\n"
        "ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)\n"
        "child = Child(['/bin/sh', '-c', 'sleep 600 & sleep 600 & echo on; exit 3'])\n"
        "child.process.stdout.readline()\n"
        "print(child.end(patience=5).status)\n"
        "print(Path(f'/proc/self/task/{os.getpid()}/children').read_text())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stdout.split() == ["3"], done.stderr
