"""Measure what comes before a study's first trial: the worker's start, tracing, and both at once.

Everything starts from nothing but the files' place in the page cache: run it twice for that. Writes
one JSON document, seconds throughout.

    python -m tests.bench.startup OUT.json [--space a10]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from search_spaces.loading import load_space
from search_spaces.models import load_model_spec
from storage.study import OpenStudy
from sweep.predict.memory.predictor import TracingPredictor, one_of_each_kind
from sweep.running.device_info import read_card
from sweep.study.events import (
    Event,
    Interruption,
    Listener,
    SpaceTraced,
    TrialFinished,
    TrialProgress,
)
from sweep.study.session import drive, prepare
from tests.bench.stamp import stamp

_WORKER = """
import json, sys, time
began = time.perf_counter()
seconds, last = {}, began

def lap(name):
    global last
    now = time.perf_counter()
    seconds[name], last = round(now - last, 2), now

from sweep.training.libraries import OPTIONAL, compiling_later, lean_imports
with lean_imports(*OPTIONAL):
    import torch
    lap("import torch")
    with compiling_later():
        import bitsandbytes
    lap("import bitsandbytes")
    import transformers.modeling_utils, peft
    lap("import transformers and peft")
    from sweep.running.wire import WorkerSettings
    from sweep.running.worker import Worker
    lap("import the rest")
worker = Worker(WorkerSettings.model_validate_json(sys.argv[1]), send=lambda message: None)
worker._resident.device.warm_up()
lap("take the device")
worker.prepare()
lap("rehearse")
print(json.dumps(seconds))
"""


def worker_laps(device: str) -> dict[str, float]:
    """Return what a worker's start takes, in its order."""
    settings = {
        "device": device,
        "budget_bytes": 2**30,
        "model": load_model_spec("demo").to_json(),
        "weights": "random",
        "seed": 0,
        "is_emulated": False,
    }
    command = (sys.executable, "-P", "-c", _WORKER, json.dumps(settings))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    laps: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return laps


def tracing(space_name: str) -> dict[str, Any]:
    """Return what tracing a whole space takes from an empty cache, and again from a full one."""
    space = load_space(space_name)
    result: dict[str, Any] = {"processors": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as cache:
        for way in ("cold", "warm"):
            predictor = TracingPredictor(load_model_spec(space.model), cache_dir=Path(cache))
            answered: list[float] = []
            began = time.perf_counter()
            predictor.predict_all(
                list(one_of_each_kind(space)),
                on_progress=lambda *_: answered.append(time.perf_counter() - began),  # noqa: B023
            )
            result[way] = round(time.perf_counter() - began, 2)
            if answered:
                result |= {"first answer": round(answered[1], 2), "structures": len(answered) - 1}
    return result


def first_trial(space_name: str) -> dict[str, float]:
    """Return when each thing happened first, from here to the end of a study's first trial."""
    began = time.perf_counter()
    seen: dict[str, float] = {}

    def see(name: str) -> None:
        seen.setdefault(name, round(time.perf_counter() - began, 2))

    def listen(event: Event) -> None:
        match event:
            case SpaceTraced(done, of) if done == of:
                see("traced")
            case TrialProgress(progress=progress):
                see(progress.phase)
            case TrialFinished():
                see("finished")

    @contextmanager
    def watch(_study: OpenStudy, _interruption: Interruption) -> Iterator[Listener]:
        see("opened")
        yield listen

    with tempfile.TemporaryDirectory() as home:
        os.environ["SWEEP_HOME"] = home
        study = prepare(space_name, overrides={"trials": 1}, study=None, card=read_card)
        drive(study, storage=f"sqlite:///{home}/sweep.db", watch=watch, warn=print)
    return seen


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--space", default="a10")
    options = arguments.parse_args()
    device = "cpu" if load_space(options.space).gpu == "cpu" else "cuda"
    document = {
        **stamp(),
        "space": options.space,
        "worker": worker_laps(device),
        "tracing": tracing(options.space),
        "first trial": first_trial(options.space),
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1), flush=True)


if __name__ == "__main__":
    main()
