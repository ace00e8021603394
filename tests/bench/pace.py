"""Take one step apart in time: what the GPU is busy with, and what the host costs on top.

The same configuration is stepped by a plain loop, by one that waits for the GPU at every stage of
a step, on one core, and as a trial. Writes one JSON document.

    python tests/bench/pace.py OUT.json [--model mistral-7b-v0.3] [--steps 12]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from search_spaces.config import parse_config
from search_spaces.models import load_model_spec
from search_spaces.space import StepBudget
from sweep.training.adapters import attached
from sweep.training.device import Device, open_device
from sweep.training.meter import CardReader
from sweep.training.model import BaseModel, build_base
from sweep.training.step import TrainingLoop
from sweep.training.trial import Trial
from tests.bench.stamp import stamp

CONFIGS: tuple[dict[str, Any], ...] = (
    {"micro_batch_size": 8, "kernels": "liger", "upcast_fp32": False},
    {"micro_batch_size": 8},
    {
        "micro_batch_size": 10,
        "kernels": "liger",
        "upcast_fp32": False,
        "checkpoint_fraction": 0.0,
    },
)
EMPTY_LAUNCHES = 5000


class WaitingLoop(TrainingLoop):
    """A loop that waits for the GPU at every stage, so that nothing is queued ahead."""

    @property
    def stage(self) -> str:
        return self._stage

    @stage.setter
    def stage(self, value: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._stage = value


def launch_microseconds(device: Device) -> float:
    """Return what the host takes to launch one tiny kernel through torch."""
    one = torch.zeros(1, device=device.torch_device)
    for _ in range(100):
        one.add_(1)
    device.synchronize()
    start = time.perf_counter()
    for _ in range(EMPTY_LAUNCHES):
        one.add_(1)
    device.synchronize()
    return (time.perf_counter() - start) / EMPTY_LAUNCHES * 1e6


def seconds_of(step: Callable[[], object], device: Device) -> float:
    device.synchronize()
    start = time.perf_counter()
    step()
    device.synchronize()
    return time.perf_counter() - start


def loop_times(
    base: BaseModel, values: dict[str, Any], device: Device, *, kind: type[TrainingLoop], steps: int
) -> dict[str, Any]:
    """Return the seconds of the first three steps and of the ones after."""
    config = parse_config(values)
    with attached(base, config) as attachment:
        loop = kind(attachment, config, seed=0)
        times = [seconds_of(loop.step, device) for _ in range(3 + steps)]
    device.release()
    return {
        "first": [round(t, 4) for t in times[:3]],
        "times": [round(t, 4) for t in times[3:]],
        "median": statistics.median(times[3:]),
    }


def card_work(base: BaseModel, values: dict[str, Any], device: Device) -> dict[str, Any]:
    """Return how many kernels a step launches and for how long the GPU works on them."""
    config = parse_config(values)
    with attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        for _ in range(3):
            loop.step()
        device.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watch:
            loop.step()
            device.synchronize()
    assert watch.profiler is not None
    assert watch.profiler.kineto_results is not None
    events = watch.profiler.kineto_results.events()
    kernels = [e for e in events if e.device_type() == torch.autograd.DeviceType.CUDA]
    device.release()
    return {
        "kernels": len(kernels),
        "busy_seconds": sum(e.duration_ns() for e in kernels) / 1e9,
        "host_synchronizations": sum("Synchronize" in e.name() for e in events),
    }


def pinned(cores: set[int]) -> None:
    """Let every thread of this process run on these cores alone."""
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def trial_times(
    base: BaseModel, values: dict[str, Any], device: Device, *, steps: int
) -> dict[str, Any]:
    """Return what the tool itself says of the configuration."""
    outcome = Trial(
        base=base,
        config=parse_config(values),
        steps=StepBudget(warmup_min=2, warmup_max=4, measured_min=steps, measured_max=steps),
        device=device,
        card=CardReader(None),
    ).run()
    measurement = getattr(outcome, "measurement", None)
    if measurement is None:
        return {"verdict": outcome.verdict, "outcome": str(outcome)}
    return {"median": measurement.step_seconds, "interval": measurement.step_seconds_ci95}


def examine(
    base: BaseModel, values: dict[str, Any], device: Device, *, steps: int
) -> dict[str, Any]:
    """Return one configuration's times, each way of stepping it after the other."""
    cores = os.sched_getaffinity(0)
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "plain, cold": lambda: loop_times(base, values, device, kind=TrainingLoop, steps=steps),
        "waiting": lambda: loop_times(base, values, device, kind=WaitingLoop, steps=steps),
        "trial": lambda: trial_times(base, values, device, steps=steps),
        "plain, warm": lambda: loop_times(base, values, device, kind=TrainingLoop, steps=steps),
        "card": lambda: card_work(base, values, device),
    }
    result: dict[str, Any] = {"config": values}
    for name, way in ways.items():
        result[name] = way()
        print(values, name, result[name], flush=True)
    pinned({min(cores)})
    result["plain, one core"] = loop_times(base, values, device, kind=TrainingLoop, steps=steps)
    result["launch_microseconds, one core"] = launch_microseconds(device)
    pinned(cores)
    result["launch_microseconds"] = launch_microseconds(device)
    print(values, result["plain, one core"]["median"], result["launch_microseconds"], flush=True)
    return result


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--model", default="mistral-7b-v0.3")
    arguments.add_argument("--steps", type=int, default=12)
    options = arguments.parse_args()
    device = open_device("cuda" if torch.cuda.is_available() else "cpu")
    device.warm_up()
    spec = load_model_spec(options.model)
    rows = []
    for values in CONFIGS:
        key = parse_config(values)
        base = build_base(key, spec=spec, weights="random", device=device.torch_device, seed=0)
        rows.append(examine(base, values, device, steps=options.steps))
        base.close()
        device.release()
        document = {**stamp(), "cores": os.cpu_count(), "model": options.model, "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
