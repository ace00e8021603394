"""Try configurations close to a GPU's budget, under that budget: which really fit.

    python tests/bench/edges.py a10 CONFIGS.jsonl OUT.jsonl [--seconds 480]

Goes on where an earlier run stopped. Exits 75 when its seconds were used up before the list.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig, parse_config
from search_spaces.loading import load_space
from search_spaces.models import load_model_spec
from search_spaces.space import StepBudget
from storage.definition import Target
from sweep.running.device_info import read_card
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import TrialRequest
from sweep.study.targets import resolve_target
from tests.bench.moved import read_rows
from tests.bench.stamp import OUT_OF_TIME

STEPS = StepBudget(warmup_min=2, warmup_max=3, measured_min=2, measured_max=3)


def try_one(
    runner: SupervisedRunner, config: TrialConfig, *, model: str, target: Target
) -> dict[str, Any]:
    """Return a configuration's row."""
    outcome = runner.run(TrialRequest(config=config, steps=STEPS))
    print(outcome.verdict, config.changes_from(TrialConfig()), flush=True)
    return {
        "model": model,
        "budget_bytes": target.budget_bytes,
        "config": config.model_dump(mode="json"),
        "verdict": outcome.verdict,
    }


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("gpu")
    arguments.add_argument("configs", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--seconds", type=float, default=480.0)
    options = arguments.parse_args()
    begun = time.perf_counter()
    space = load_space(options.gpu)
    target = resolve_target(space, read_card()).target
    tried = {parse_config(row["config"]).key() for row in read_rows(options.out)}
    configs = [parse_config(values) for values in read_rows(options.configs)]
    model = load_model_spec(space.model)
    with (
        SupervisedRunner(model, target=target, log_path=Path("runs/edges.log")) as runner,
        options.out.open("a", encoding="utf-8") as out,
    ):
        for config in (config for config in configs if config.key() not in tried):
            if time.perf_counter() - begun > options.seconds:
                sys.exit(OUT_OF_TIME)
            row = try_one(runner, config, model=space.model, target=target)
            out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
