"""A training that goes wrong in the way that the job's seed asks for. It imports nothing heavy."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from qlora_sweep.storage.records import INTERRUPTED
from qlora_sweep.sweep.processes import bind_to_parent

CRASHES, IS_SILENT, STOPS_WHEN_ASKED, IS_DEAF, CLAIMS_INFINITY = range(1, 6)


def main() -> None:
    pipe, parent = int(sys.argv[1]), int(sys.argv[2])
    bind_to_parent(parent)

    def say(**message: object) -> None:
        os.write(pipe, json.dumps(message).encode() + b"\n")

    job = json.loads(sys.stdin.readline())
    say(kind="ready", device_name="CPU")
    say(kind="progress", phase="measure")
    say(kind="saved", step=4)
    match job["seed"]:
        case 1:
            print("RuntimeError: it was the cable", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGABRT)
        case 2 | 4:
            time.sleep(60)
        case 3:
            sys.stdin.readline()
            say(kind="finished", outcome=INTERRUPTED.model_dump(mode="json"))
        case 5:
            say(kind="saved", step=1, eval_loss=float("inf"))
            time.sleep(60)


if __name__ == "__main__":
    main()
