"""What becomes of a tracing child that does anything but answer: programs of a few lines."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault
from sweep.predict.memory import profile_store
from sweep.predict.memory.profile_store import TracingChildren
from sweep.predict.memory.profiles import Structure
from tests.sweep.predict.memory.imagined_profile import MODEL
from tests.sweep.shared_tracing import trace
from tests.sweep.test_processes import ends_soon

ROOT = Path(__file__).parents[4]
STRUCTURE = Structure.of(TrialConfig(), is_checkpointed=True)
ANSWER = "print(json.dumps({'profile': {'pid': os.getpid()}}), flush=True)"
Start = Callable[[str], TracingChildren]


@pytest.fixture
def child_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start children that do so with each question; a second is long enough for any of them."""
    monkeypatch.setattr(profile_store, "_DEADLINE_SECONDS", 1.0)
    started: list[TracingChildren] = []

    def start(program: str) -> TracingChildren:
        whole = (
            f"import json, os, signal, subprocess, sys, time\nfor line in sys.stdin:\n {program}"
        )
        started.append(TracingChildren(1, outlive=True, command=(sys.executable, "-c", whole)))
        return started[-1]

    yield start
    for child in started:
        child.close()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "it ended with signal SIGSEGV"),
        ("os._exit(7)", "it ended with exit status 7"),
        ("sys.exit('out of luck')", "exit status 1: out of luck"),
        ("print('no JSON', flush=True)", "is no answer: 'no JSON'"),
        ("os.write(1, b'\\xff\\xfe\\n')", "is no answer"),
        ("time.sleep(60)", "it took too long"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "it took too long"),
        ("os.close(1); time.sleep(60)", "it closed its pipe"),
        ("[os.write(1, b'x' * 65536) for _ in iter(int, 1)]", "is no answer"),
    ],
)
def test_what_it_does_instead_of_answering_is_told_as_it_was(
    child_of: Start, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    monkeypatch.setattr(profile_store, "_ANSWER_BYTES_MAX", 2**20)
    child, began = child_of(program), time.monotonic()
    with pytest.raises(EnvironmentFault) as told:
        trace(child, MODEL, STRUCTURE)
    assert said in str(told.value)
    assert time.monotonic() - began < 30


def test_a_crash_is_told_as_it_was_though_another_holds_the_pipe(child_of: Start) -> None:
    child = child_of("subprocess.Popen(['sleep', '600']); os._exit(3)")
    with pytest.raises(EnvironmentFault, match="exit status 3"):
        trace(child, MODEL, STRUCTURE)


def test_what_it_prints_beside_its_answer_keeps_nobody_waiting(child_of: Start) -> None:
    child = child_of(f"[os.write(2, b'x' * 65535 + b'\\n') for _ in range(200)]; {ANSWER}")
    assert trace(child, MODEL, STRUCTURE)["pid"]


def test_a_question_that_nobody_reads_is_not_waited_for_any_longer(child_of: Start) -> None:
    long = Structure.of(TrialConfig(target_modules=("m" * 2**20,)), is_checkpointed=True)
    with pytest.raises(EnvironmentFault, match="took too long"):
        trace(child_of("time.sleep(60)"), MODEL, long)


@pytest.mark.parametrize("end", ["", "; os._exit(1)", "; time.sleep(60)"])
def test_what_it_started_ends_with_it(child_of: Start, tmp_path: Path, end: str) -> None:
    note = tmp_path / "pids"
    begin = "p = subprocess.Popen(['sleep', '600'], start_new_session=s); f.write(f'{p.pid} ')"
    child = child_of(
        f"f = open({str(note)!r}, 'w')\n for s in (False, True):\n  {begin}\n f.close()\n"
        f" {ANSWER}{end}"
    )
    trace(child, MODEL, STRUCTURE)
    child.close()
    numbers = [int(word) for word in note.read_text(encoding="ascii").split()]
    assert len(numbers) == 2
    assert all(ends_soon(number) for number in numbers)


def test_neither_a_password_of_the_shells_nor_a_gpu_reaches_it(
    child_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    child = child_of("print(json.dumps({'profile': dict(os.environ)}), flush=True)")
    answer = trace(child, MODEL, STRUCTURE)
    assert "PATH" in answer
    assert "hunter2" not in answer.values()
    assert answer["CUDA_VISIBLE_DEVICES"] == ""


def test_without_room_for_a_process_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    child = TracingChildren(1, outlive=True, command=("/no/such/program",))
    for _ in range(2):
        with pytest.raises(EnvironmentFault, match=r"cannot be started: .*[Nn]o such file"):
            trace(child, MODEL, STRUCTURE)


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "raise SystemExit(0)"])
def test_the_real_child_ends_with_its_owner_while_it_still_imports(how: str) -> None:
    program = (
        "import os, signal\n"
        "from sweep.predict.memory.profile_store import TracingChildren\n"
        "from tests.sweep.predict.memory.test_tracing_children import MODEL, STRUCTURE, trace\n"
        "children = TracingChildren(1)\n"
        "def end(*_):\n"
        "    print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        f"    {how}\n"
        "signal.signal(signal.SIGALRM, end)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.5)\n"
        "trace(children, MODEL, STRUCTURE)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert ends_soon(int(done.stdout)), os.listdir("/proc")
