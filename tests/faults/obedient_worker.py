"""A worker that measures at once, and to one of whose messages something happens.

Which one and what is in the file ``fault`` beside the journal. It imports nothing that takes time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qlora_sweep.sweep.processes import bind_to_parent

BEATS = (("attach", 0), ("warmup", 1), ("measure", 1), ("measure", 2))
FLOOD_BYTES = 64 * 2**20
PRINT_BYTES = 500 * 10**6
UNIT = 1e-6
"""Relative difference in speed of one run to the next, by which a stored result names its run."""
MESSAGE_FAULTS = (
    "worker killed",
    "worker killed after",
    "driver killed",
    "driver killed after",
    "garbage",
    "cut off",
    "nested",
    "flood",
    "doubled",
    "silence",
    "stopped",
    "prints",
)


class Pipe:
    """The way to the driver.

    Args:
        descriptor: of its writing end.
        directory: where journal and fault are.
    """

    def __init__(self, descriptor: int, directory: Path) -> None:
        self._descriptor, self._directory = descriptor, directory
        self._fault: dict[str, Any] = json.loads((directory / "fault").read_text())

    def note(self, *words: object) -> None:
        """Add a line to the journal."""
        with (self._directory / "journal").open("a") as journal:
            journal.write(" ".join(map(str, words)) + "\n")

    def lines(self, word: str) -> int:
        """Return how many lines of one kind the journal has."""
        lines = (self._directory / "journal").read_text().splitlines()
        return sum(line.split()[0] == word for line in lines)

    def say(self, **message: Any) -> None:
        """Send a message, unless it is the one to which something happens."""
        line = json.dumps(message).encode() + b"\n"
        self.note("message")
        if self.lines("message") != self._fault["n"]:
            self._write(line)
            return
        self.note("fired")
        self._strike(line)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _strike(self, line: bytes) -> None:
        write: Callable[[bytes], None] = self._write
        match self._fault["kind"]:
            case "worker killed" | "worker killed after" as kind:
                write(line if "after" in kind else b"")
                os.kill(os.getpid(), signal.SIGKILL)
            case "driver killed" | "driver killed after" as kind:
                write(line if "after" in kind else b"")
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(60)
            case "garbage":
                write(b"\xff\x00 this is no message\n")
            case "cut off":
                write(line[: len(line) // 2])
                os._exit(1)
            case "nested":
                write(b"[" * 200_000 + b"\n")
            case "flood":
                for _ in range(FLOOD_BYTES // 65536):
                    write(b"x" * 65536)
            case "prints":
                for _ in range(PRINT_BYTES // 10**6):
                    os.write(1, b"y" * (10**6 - 1) + b"\n")
                write(line)
            case "doubled":
                write(line + line)
            case "silence":
                time.sleep(60)
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)


def measurement(batch: int, seq_len: int, run: int) -> dict[str, Any]:
    """Return what is measured in the n-th run over all drivers.

    The baseline is the slower one, and not by so much that it is stopped.
    """
    speed = (1100.0 - 50.0 * batch) * (1 + run * UNIT)
    step = batch * seq_len / speed
    return {
        "tokens_per_second": speed,
        "samples_per_second": speed / seq_len,
        "step_seconds": step,
        "step_seconds_ci95": [step * 0.9999, step * 1.0001],
        "steps_measured": 12,
        "steps_warmup": 1,
        "peak_allocated_bytes": 2**20,
        "trainable_parameters": 1000,
        "final_loss": 2.0,
        "setup_seconds": 1.0,
        "measured_seconds": 5.0,
    }


def main() -> None:
    """Answer one command after the other."""
    bind_to_parent(int(sys.argv[2]))
    settings = json.loads(sys.stdin.buffer.readline())
    outcome_path = Path(settings["outcome_path"])
    pipe = Pipe(int(sys.argv[1]), outcome_path.parents[3])
    pipe.say(kind="ready", device_name="none")
    while line := sys.stdin.buffer.readline():
        command = json.loads(line)
        if command["kind"] != "run":
            continue
        config = command["request"]["config"]
        run = pipe.lines("ran") + 1
        pipe.note("ran", run, config["micro_batch_size"])
        for phase, step in BEATS:
            pipe.say(kind="progress", phase=phase, step=step)
        known = measurement(config["micro_batch_size"], config["seq_len"], run)
        outcome = {"verdict": "fits", "measurement": known}
        entry = {"attempt": command["request"]["attempt"], "config": config, "outcome": outcome}
        pipe.note("leaves", run)
        beside = outcome_path.with_suffix(".new")
        beside.write_text(json.dumps(entry))
        beside.replace(outcome_path)
        pipe.note("measured", run)
        pipe.say(kind="finished", run_id=command["run_id"], config=config, outcome=outcome)


if __name__ == "__main__":
    main()
