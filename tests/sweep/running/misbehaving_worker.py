"""A worker that goes wrong in the way that the configuration's rank asks for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from sweep.running.wire import (
    Alive,
    Ready,
    RunCommand,
    Unusable,
    WorkerMessage,
    WorkerSettings,
    command_adapter,
)

HANG, EXIT, SEGFAULT, GARBAGE, SILENT_AFTER_BEATS, SLOW_BEATS, GRANDCHILD, TELLTALE = range(1, 9)
UNUSABLE_SEED = 13
"""Of a worker that never becomes ready."""


def main() -> None:
    events = os.fdopen(int(sys.argv[1]), "wb", buffering=0)

    def send(event: WorkerMessage) -> None:
        events.write(event.model_dump_json().encode() + b"\n")

    settings = WorkerSettings.model_validate_json(sys.stdin.buffer.readline())
    if settings.seed == UNUSABLE_SEED:
        send(Unusable(reason="no such device"))
        return
    print("hello from a library", flush=True)
    send(Ready(device_name="none"))
    command = command_adapter.validate_json(sys.stdin.buffer.readline())
    assert isinstance(command, RunCommand)
    misbehave(command.config.lora_rank, send, events.write)


def misbehave(
    how: int, send: Callable[[WorkerMessage], None], write: Callable[[bytes], int]
) -> None:
    match how:
        case 2:
            print("Error invalid device function at line 74", flush=True)
            os._exit(1)
        case 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        case 4:
            write(b"this is not an event\n")
        case 5:
            send(Alive(phase="warmup"))
            send(Alive(phase="measure", step=1))
        case 6:
            for step in range(100):
                send(Alive(phase="measure", step=step))
                time.sleep(0.05)
        case 7:
            child = subprocess.Popen(["sleep", "600"])
            print(f"grandchild {child.pid}", flush=True)
        case 8:
            print(f"environment {json.dumps(dict(os.environ))}", flush=True)
            os._exit(0)
    time.sleep(600)


if __name__ == "__main__":
    main()
