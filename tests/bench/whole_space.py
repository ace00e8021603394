"""Hold predicting a whole space together against predicting its configurations one by one.

Prints one JSON document: seconds of each part and how many times faster together is. Traces what is
not kept first. Takes a minute or two.

    python tests/bench/whole_space.py [SPACE] [--gpu a10] [--one-by-one 300]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

from search_spaces.gpus import find_gpu
from search_spaces.loading import load_space
from search_spaces.models import load_model_spec
from sweep.paths import cache_directory
from sweep.planning.candidates import rows
from sweep.predict.memory.predictor import TracingPredictor
from sweep.predict.speed.predictor import StepTimes
from tests.sweep.predict.predicted_steps import predict_step


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("space", nargs="?", default="a10")
    options.add_argument("--gpu", default="a10")
    options.add_argument("--one-by-one", type=int, default=300)
    typed = options.parse_args()
    print(json.dumps(measured(typed.space, typed.gpu, typed.one_by_one), indent=2))


def measured(name: str, gpu_name: str, sample: int) -> dict[str, Any]:
    """Seconds, and ratios for each configuration."""
    space, gpu = load_space(name), find_gpu(gpu_name)
    model = load_model_spec(space.model)
    predictor = TracingPredictor(
        model,
        cache_dir=cache_directory() / "memory",
        compute_capability=gpu.compute_capability,
    )
    built, configs = timed(lambda: [config for row in rows(space) for config in row])
    traced, _ = timed(lambda: predictor.predict_all(configs))
    memory, whole = timed(lambda: predictor.predict_all(configs))
    fits, codes = timed(lambda: whole.quick_fits(gpu.budget_bytes))
    speed, times = timed(lambda: StepTimes(configs, model=model, gpu=gpu))
    seconds, _ = timed(lambda: times.seconds)
    some = random.Random(0).sample(configs, min(sample, len(configs)))
    memory_alone, _ = timed(lambda: [predictor.predict(c).fits(gpu.budget_bytes) for c in some])
    speed_alone, _ = timed(lambda: [predict_step(c, model=model, gpu=gpu) for c in some])
    share = len(configs) / len(some)
    return {
        "configurations": len(configs),
        "only_a_replay_tells": codes.count(None),
        "seconds": {
            "configurations": built,
            "tracing": traced,
            "peaks": memory,
            "fits": fits,
            "step_times": speed,
            "step_seconds": seconds,
        },
        "times_faster": {
            "memory": share * memory_alone / (memory + fits),
            "speed": share * speed_alone / (speed + seconds),
        },
    }


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


if __name__ == "__main__":
    main()
