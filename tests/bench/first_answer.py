"""How long it takes to the first answer: from the command to each thing of a study's first trial.

    python -m tests.bench.first_answer [--space a10] [-o OUT.jsonl]

Two rounds: the first with nothing traced, and perhaps with libraries that are read from the disk.
Seconds from the start of `prepare`; this process's own imports are left out.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.sweep.request import RunRequest
from qlora_sweep.sweep.running.device_info import read_gpu
from qlora_sweep.sweep.study import events
from qlora_sweep.sweep.study.events import Event, Interruption, Listener
from qlora_sweep.sweep.study.prepared import prepare
from qlora_sweep.sweep.study.session import drive
from tests.bench.harness import asked, write


def first_trial(space: str, home: str) -> dict[str, float]:
    """Return when each thing happened first, from here to the end of a study's first trial."""
    began = time.perf_counter()
    seen: dict[str, float] = {}

    def see(name: str) -> None:
        seen.setdefault(name, round(time.perf_counter() - began, 2))

    def listen(event: Event) -> None:
        match event:
            case events.SpaceTraced(done, of) if done == of:
                see("traced")
            case events.TrialProgress(progress=progress):
                see(progress.phase)
            case events.TrialFinished():
                see("finished")

    @contextmanager
    def watch(_study: OpenStudy, _interruption: Interruption) -> Iterator[Listener]:
        see("opened")
        yield listen

    study = prepare(RunRequest(space=space, overrides={"trials": 1}), read_gpu=read_gpu)
    drive(study, storage=f"sqlite:///{home}/sweep.db", watch=watch, warn=print)
    return seen


def main() -> None:
    """Print when each thing happened, of both rounds."""
    typed = asked(__doc__, space="a10")
    with tempfile.TemporaryDirectory() as home:
        os.environ["XDG_CACHE_HOME"] = home
        for traced in ("nothing", "all"):
            os.environ["SWEEP_HOME"] = runs = f"{home}/{traced}"
            os.mkdir(runs)
            about = {"space": typed.space, "cores": os.cpu_count(), "traced before": traced}
            write(about | first_trial(typed.space, runs), typed.output)


if __name__ == "__main__":
    main()
