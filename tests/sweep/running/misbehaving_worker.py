"""A worker that goes wrong in the way that the configuration's rank asks for.

It imports nothing that takes time, and writes what it says by hand: that need be no message.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from qlora_sweep.sweep.processes import bind_to_parent

UNUSABLE_SEED, STOPPED_SEED, CHATTY_SEED, DEAF_SEED = range(13, 17)
"""Of workers that never become ready."""
ANSWER = {"verdict": "diverged", "step": 7, "detail": "as asked"}
"""What a trial comes to that is answered."""


class Worker:
    """What a misbehaviour has to work with."""

    def __init__(self, pipe: int, settings: dict[str, Any]) -> None:
        self.pipe = pipe
        self.settings = settings
        self.command: dict[str, Any] = {}

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.pipe, data) :]

    def say(self, **message: Any) -> None:
        self.write(json.dumps(message).encode() + b"\n")

    def beat(self, step: int = 0, phase: str = "measure", **more: Any) -> None:
        self.say(kind="progress", phase=phase, step=step, **more)

    def answer(self, **changes: Any) -> None:
        told = {"run_id": self.command["run_id"], "config": self.command["config"]}
        self.say(**{"kind": "finished", **told, "outcome": ANSWER, **changes})

    def read_command(self) -> None:
        line = sys.stdin.buffer.readline()
        if not line:
            os._exit(0)
        command = json.loads(line)
        self.command = {"run_id": command["run_id"], **command["request"]}

    def leave_outcome(self, **changes: Any) -> None:
        entry = {key: self.command[key] for key in ("attempt", "config")}
        with open(self.settings["outcome_path"], "w") as file:
            json.dump({**entry, "outcome": ANSWER, **changes}, file)


Behaviour = Callable[[Worker], None]
BEHAVIOURS: list[Behaviour] = []


def behaviour(function: Behaviour) -> int:
    """Register a misbehaviour and return the rank that asks for it."""
    BEHAVIOURS.append(function)
    return len(BEHAVIOURS)


def fork(run: Callable[[], None]) -> int:
    number = os.fork()
    if number == 0:
        try:
            run()
        finally:
            os._exit(0)
    return number


def die(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


HANG = behaviour(lambda worker: None)
"""Say nothing, and go on."""


@behaviour
def EXIT(worker: Worker) -> None:
    print("Error invalid device function at line 74", flush=True)
    os._exit(1)


SEGFAULT = behaviour(lambda worker: die(signal.SIGSEGV))
GARBAGE = behaviour(lambda worker: worker.write(b"this is not an event\n"))


@behaviour
def SILENT_AFTER_BEATS(worker: Worker) -> None:
    worker.beat(phase="warmup")
    worker.beat(1)


@behaviour
def GRANDCHILD(worker: Worker) -> None:
    child = subprocess.Popen(["sleep", "600"])
    print(f"grandchild {child.pid}", flush=True)


@behaviour
def TELLTALE(worker: Worker) -> None:
    print(f"environment {json.dumps(dict(os.environ))}", flush=True)
    os._exit(0)


FINE = behaviour(lambda worker: worker.answer())


@behaviour
def BEAT_AND_ANSWER(worker: Worker) -> None:
    for step in range(12):
        worker.beat(step)
        time.sleep(0.1)
    worker.answer()


@behaviour
def NO_COMPILER(worker: Worker) -> None:
    worker.beat()
    worker.answer(outcome={"verdict": "ineffective", "setting": "compile", "detail": "pool broke"})


STOPPED = behaviour(lambda worker: die(signal.SIGSTOP))


@behaviour
def FLOOD_WITHOUT_LINES(worker: Worker) -> None:
    while True:
        worker.write(b"x" * 65536)


@behaviour
def TRICKLE_WITHOUT_LINES(worker: Worker) -> None:
    while True:
        worker.write(b"x")
        time.sleep(0.005)


@behaviour
def FLOOD_OF_BEATS(worker: Worker) -> None:
    while True:
        worker.beat(3)


@behaviour
def BACK_AND_FORTH(worker: Worker) -> None:
    while True:
        worker.beat(2, "warmup")
        worker.beat(1, "measure")
        time.sleep(0.01)


@behaviour
def ENDLESS_STEPS(worker: Worker) -> None:
    for step in range(10**9):
        worker.beat(step)
        time.sleep(0.01)


@behaviour
def CRASH_WITH_THE_PIPE_FLOODED(worker: Worker) -> None:
    def flood() -> None:
        while True:
            worker.beat(1)

    fork(flood)
    time.sleep(0.2)
    die(signal.SIGSEGV)


@behaviour
def ANSWER_AND_DIE(worker: Worker) -> None:
    fork(lambda: time.sleep(600))
    for step in range(200):
        worker.beat(step)
    worker.answer()
    die()


@behaviour
def HALF_AN_ANSWER(worker: Worker) -> None:
    worker.write(b'{"kind":"finished","outcome"')
    die(signal.SIGSEGV)


CLOSED_PIPE = behaviour(lambda worker: os.close(worker.pipe))


@behaviour
def CLOSED_EARS(worker: Worker) -> None:
    os.close(0)
    for step in range(10**9):
        worker.beat(step)
        time.sleep(0.05)


@behaviour
def ANSWER_TWICE(worker: Worker) -> None:
    worker.answer()
    worker.answer()


@behaviour
def ANSWER_AGAIN_LATER(worker: Worker) -> None:
    worker.answer()
    old = worker.command
    worker.read_command()
    worker.answer(run_id=old["run_id"], config=old["config"])


@behaviour
def DIE_IDLE(worker: Worker) -> None:
    worker.answer()
    die()


UNUSABLE_LATE = behaviour(lambda worker: worker.say(kind="unusable", reason="it fell off the bus"))


@behaviour
def NUL_IN_WORDS(worker: Worker) -> None:
    words = "a\0b \x1b[2J \ud800 postgresql://me:hunter2@host/db " + "x" * 5000
    worker.answer(outcome={**ANSWER, "detail": words})


KILLED = behaviour(lambda worker: die())


@behaviour
def NO_HOST_MEMORY(worker: Worker) -> None:
    print("terminate called after throwing an instance of 'std::bad_alloc'", flush=True)
    die(signal.SIGABRT)


@behaviour
def LEAVE_AND_DIE(worker: Worker) -> None:
    worker.leave_outcome()
    die(signal.SIGSEGV)


LEAVE_AND_HANG = behaviour(lambda worker: worker.leave_outcome())


@behaviour
def LEAVE_AND_BEAT(worker: Worker) -> None:
    worker.leave_outcome()
    worker.beat()


@behaviour
def CLEAN_UP_AND_ANSWER(worker: Worker) -> None:
    worker.beat(phase="detach")
    time.sleep(0.3)
    worker.answer()


@behaviour
def CLEAN_UP_AND_TRAIN_ON(worker: Worker) -> None:
    worker.beat(phase="detach")
    for step in range(10**9):
        worker.beat(step, "quality")
        time.sleep(0.01)


@behaviour
def ANSWER_LEAVE_AND_DIE_NEXT(worker: Worker) -> None:
    worker.leave_outcome()
    worker.answer()
    worker.read_command()
    die(signal.SIGSEGV)


@behaviour
def PRINT_WITHOUT_END(worker: Worker) -> None:
    for step in range(200):
        os.write(1, b"all work and no play\n" * 10_000)
        worker.beat(step)
    # A line that is printed as a log is begun anew may be lost.
    while os.fstat(1).st_size > 10 * 2**20:
        time.sleep(0.01)
    print("\x1b[31mthe last words", flush=True)
    os._exit(3)


def main() -> None:
    bind_to_parent(int(sys.argv[2]))
    settings = json.loads(sys.stdin.buffer.readline())
    worker = Worker(int(sys.argv[1]), settings)
    match settings["seed"]:
        case 13:
            worker.say(kind="unusable", reason="no such device")
            return
        case 14:
            die(signal.SIGSTOP)
        case 15:
            while True:
                worker.beat()
        case 16:
            os.close(0)
            time.sleep(600)
    print("hello from a library", flush=True)
    worker.say(kind="ready", device_name="none")
    while True:
        worker.read_command()
        rank = worker.command["config"]["lora_rank"]
        BEHAVIOURS[rank - 1](worker)
        if rank not in (FINE, BEAT_AND_ANSWER):
            time.sleep(600)


if __name__ == "__main__":
    main()
