"""Record a surface: many configurations of one model, each measured shortly, as INTERFACE has them.

First the configurations are drawn, which takes no GPU: a random part of the space below, without
what would take long or is predicted far above the cap. Then they are measured in that order, so
that a recording that is cut short is still a fair sample.

    python tests/bench/record_surface.py MODEL CONFIGS.jsonl --draw 260 [--compiled 16]
    python tests/bench/record_surface.py MODEL CONFIGS.jsonl -o OUT.jsonl [--seconds 560]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig, parse_config
from search_spaces.gpus import match_product
from search_spaces.models import ModelSpec, load_model_spec
from search_spaces.space import StepBudget
from storage.definition import Target
from storage.records import Measured, Outcome, OutOfMemory
from sweep.paths import cache_directory
from sweep.predict.memory.predictor import TracingPredictor
from sweep.running.device_info import read_card
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import TrialRequest
from tests.sweep.predict.predicted_steps import predict_step

VALUES: dict[str, tuple[Any, ...]] = {
    "lora_rank": (8, 16, 64),
    "target_modules": ("qv", "attention", "all-linear"),
    "micro_batch_size": (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32),
    "seq_len": (512, 1024, 2048),
    "checkpoint_fraction": (0.0, 0.5, 1.0),
    "upcast_fp32": (True, False),
    "kernels": ("hf", "fused-loss", "liger"),
}
STEPS = StepBudget(warmup_min=2, warmup_max=2, measured_min=2, measured_max=6, seconds_max=0.6)
NUMBERS = ("tokens_per_second", "step_seconds", "peak_allocated_bytes", "peak_reserved_bytes")
BEYOND_CAP = 1.15
"""Peaks up to this many times the cap are tried all the same: surfaces need their edge."""
STEP_SECONDS_MAX = 1.6
COMPILED = {"compile": True, "kernels": "fused-loss", "upcast_fp32": False}
GIB = 2**30


def drawn(
    rows: int, compiled: int, *, model: ModelSpec, cap: int, product: str
) -> list[TrialConfig]:
    """Return the configurations to record, in the order to record them in."""
    draw = random.Random(model.name)
    predictor = TracingPredictor(model, cache_dir=cache_directory() / "memory")
    gpu = match_product(product)
    assert gpu is not None, f"{product} is not in the catalogue"
    chosen: dict[str, TrialConfig] = {}
    while len(chosen) < rows:
        values = {key: draw.choice(column) for key, column in VALUES.items()}
        if len(chosen) % (rows // compiled) == 0:
            values |= COMPILED
        config = parse_config(values)
        step = predict_step(config, model=model, gpu=gpu)
        peak = predictor.predict(config).peak_allocated_bytes
        if step.step_seconds <= STEP_SECONDS_MAX and peak <= BEYOND_CAP * cap:
            chosen[config.key()] = config
    return list(chosen.values())


def row(config: TrialConfig, outcome: Outcome, begun: float) -> dict[str, Any] | None:
    """Return a line of the surface; None for what is neither measured nor out of memory."""
    match outcome:
        case Measured(measurement=m):
            numbers, verdict = {key: getattr(m, key) for key in NUMBERS}, "fits"
        case OutOfMemory():
            numbers, verdict = dict.fromkeys(NUMBERS), "oom"
        case _:
            print(config.key(), outcome, flush=True)
            return None
    return {
        "config": config.model_dump(mode="json"),
        "verdict": verdict,
        **numbers,
        "device_seconds": round(time.monotonic() - begun, 3),
    }


def record(
    configs: Sequence[TrialConfig], out: Path, *, model: ModelSpec, cap: int, seconds: float
) -> None:
    """Measure until the configurations or the seconds are spent; each line is there at once."""
    begun = time.monotonic()
    card = read_card()
    gpu = None if card is None else match_product(card.product)
    if card is None or gpu is None:
        raise SystemExit("no GPU of the catalogue is here")
    target = Target(gpu=card.product, device="cuda", budget_bytes=cap, emulated_on=card.product)
    header = {"surface": 1, "model": model.name, "model_config": model.config}
    header |= {"gpu": gpu.name, "measured_on": card.product, "budget_bytes": cap}
    header |= {"date": date.today().isoformat()}
    log = out.with_suffix(".log")
    with (
        SupervisedRunner(model, target=target, log_path=log) as runner,
        out.open("w", encoding="utf-8") as file,
    ):
        print(json.dumps(header), file=file, flush=True)
        for number, config in enumerate(configs):
            at = time.monotonic()
            if at - begun > seconds:
                break
            line = row(config, runner.run(TrialRequest(config=config, steps=STEPS)), at)
            if line is not None:
                print(json.dumps(line), file=file, flush=True)
            if number % 20 == 0:
                print(f"{number} of {len(configs)} after {at - begun:.0f} s", flush=True)


def main() -> None:
    """Draw, or record what was drawn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("configs", type=Path)
    parser.add_argument("--draw", type=int, metavar="ROWS")
    parser.add_argument("--compiled", type=int, default=16)
    parser.add_argument("--measured-on", default="NVIDIA H200")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--cap-gib", type=float, default=44.0)
    parser.add_argument("--seconds", type=float, default=math.inf)
    arguments = parser.parse_args()
    model, cap = load_model_spec(arguments.model), int(arguments.cap_gib * GIB)
    if arguments.draw:
        rows, compiled = arguments.draw, arguments.compiled
        configs = drawn(rows, compiled, model=model, cap=cap, product=arguments.measured_on)
        lines = (config.model_dump_json() for config in configs)
        arguments.configs.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    lines = arguments.configs.read_text(encoding="utf-8").splitlines()
    configs = [parse_config(json.loads(line)) for line in lines]
    record(configs, arguments.output, model=model, cap=cap, seconds=arguments.seconds)


if __name__ == "__main__":
    main()
