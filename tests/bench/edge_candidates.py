"""Find configurations at the edge of a GPU's budget: those of which a prediction can be wrong.

Needs no GPU. Structures are drawn at random; of each, the largest micro-batch that is not called
too large is taken, and the next one. One JSON object per line, of the keys that are not the
recipe's; ``tests/bench/edges.py`` then tries them under the budget.

    python tests/bench/edge_candidates.py tests/bench/edges_a10.jsonl [--space a10] [--count 30]
        [--seed 0]
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_left
from pathlib import Path
from random import Random
from typing import Any

from search_spaces.config import TrialConfig, parse_config
from search_spaces.gpus import find_gpu
from search_spaces.loading import load_space
from search_spaces.models import load_model_spec
from sweep.paths import cache_directory
from sweep.predict.forecast import Forecaster, Forecasts
from sweep.predict.memory.prediction import Fit
from sweep.predict.memory.predictor import TracingPredictor

DRAWS: dict[str, tuple[Any, ...]] = {
    "lora_rank": (16, 64),
    "target_modules": ("attention", "all-linear"),
    "seq_len": (512, 1024, 2048),
    "checkpoint_fraction": (0.0, 0.25, 0.5, 0.75, 1.0),
    "upcast_fp32": (True, False),
    "kernels": ("hf", "fused-loss", "liger"),
    "compile": (False, False, False, True),
}
BATCH_MAX = 256


def is_too_large(forecasts: Forecasts, at: int) -> bool:
    return forecasts.fit(at) is Fit.NO


def edge_candidates(forecaster: Forecaster, *, count: int, seed: int) -> list[TrialConfig]:
    """Return so many different configurations, two of each structure: perhaps fitting, and not."""
    random = Random(seed)
    found: dict[TrialConfig, None] = {}
    while len(found) < count:
        values = {key: random.choice(choices) for key, choices in DRAWS.items()}

        row = [parse_config({**values, "micro_batch_size": b + 1}) for b in range(BATCH_MAX)]
        forecasts = forecaster.forecast(row)
        possible = bisect_left(range(BATCH_MAX), True, key=lambda at: is_too_large(forecasts, at))
        found |= dict.fromkeys(row[max(0, possible - 1) : possible + 1])
    return list(found)[:count]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--space", default="a10", help="whose GPU and model")
    arguments.add_argument("--count", type=int, default=30)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    space = load_space(options.space)
    gpu, model = find_gpu(space.gpu), load_model_spec(space.model)
    forecaster = Forecaster(
        model=model,
        gpu=gpu,
        budget_bytes=gpu.budget_bytes,
        # The GPU that tries them is not known here; an unknown one needs the most.
        predictor=TracingPredictor(model, cache_dir=cache_directory() / "memory"),
    )
    configs = edge_candidates(forecaster, count=options.count, seed=options.seed)
    changes = [config.changes_from(TrialConfig()) for config in configs]
    options.out.write_text("".join(json.dumps(one) + "\n" for one in changes), encoding="utf-8")
    print(f"{len(changes)} configurations at the edge of {gpu.name}'s budget", flush=True)


if __name__ == "__main__":
    main()
