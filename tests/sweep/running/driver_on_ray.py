"""A driver that is killed: runs a long trial on a node, and says which processes that began."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial

import psutil

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.definition import Target
from qlora_sweep.sweep.running.ray_nodes import Cluster, joined
from qlora_sweep.sweep.running.supervisor import SupervisedRunner
from qlora_sweep.sweep.running.wire import Progress, TrialRequest

# No fewer steps: a trial stops once more of them would not make its speed more certain.
LONG = StepBudget(measured_min=10_000, measured_max=100_000, seconds_max=120)
SMALL = TrialConfig(micro_batch_size=2, seq_len=64, lora_rank=4, compute_dtype="fp32")


CPU = Target(gpu="cpu", device="cpu", budget_bytes=2**30)


def new_runner(target: Target = CPU) -> Callable[..., SupervisedRunner]:
    return partial(SupervisedRunner, load_model_spec("demo"), target=target)


def processes_of(part: str) -> dict[str, int]:
    """Return the actor that has the log of a worker open, and that worker.

    Args:
        part: of the log's path: the study of the worker, or its place.
    """
    found = {}
    for process in psutil.process_iter():
        try:
            logs = [file.path for file in process.open_files() if "/ray/" in file.path]
            if any(re.search(rf"/{part}(-[0-9a-f]{{8}})?/", path) for path in logs):
                is_worker = "qlora_sweep.sweep.running" in process.cmdline()
                found["worker" if is_worker else "actor"] = process.pid
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def main() -> None:
    address, study = sys.argv[1:]

    def watch(progress: Progress) -> bool:
        if progress.phase == "measure" and not told:
            told.update(processes_of(study))
            print(f"pids {told['actor']} {told['worker']}", flush=True)
        return False

    told: dict[str, int] = {}
    with joined(address) as ray:
        place = Cluster(ray).places(
            new_runner(), study=study, device="cpu", gpu="cpu", keep=list, warn=print
        )[0]
        place.runner.run(TrialRequest(config=SMALL, steps=LONG), observe=watch)


if __name__ == "__main__":
    main()
