"""What steps on pairs of completions need and take: configurations drawn at random, none fitted to.

    python -m tests.bench.pairs [--model NAME] [-o OUT.jsonl]

A row a configuration, as `tests/data/pairs_h100.jsonl` keeps them.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from search_spaces.config import TrialConfig, parse_config
from search_spaces.models import ModelSpec, load_model_spec
from search_spaces.rules import Setting, broken_rules
from search_spaces.space import StepBudget
from storage.records import Measured
from sweep.running.wire import RunCommand, TrialRequest, WorkerSettings
from sweep.running.worker import Worker
from tests.bench.harness import Row, stamp, write

DRAWN: dict[str, list[Any]] = {
    "lora_rank": [8, 16, 64],
    "target_modules": ["qv", "attention", "all-linear"],
    "micro_batch_size": [1, 2, 3, 4, 6],
    "seq_len": [384, 512, 1024, 2048],
    "compute_dtype": ["bf16", "fp16"],
    "quantization": ["nf4", "none"],
    "checkpoint_fraction": [0.0, 0.25, 0.5, 1.0],
    "kernels": ["hf", "liger"],
    "upcast_fp32": [True, False],
    "adapter_dtype": ["fp32", "bf16"],
    "optimizer": ["adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"],
    "reference": ["adapter_off", "precomputed"],
    "loss_type": ["sigmoid", "ipo"],
}
LEAN: dict[str, list[Any]] = {
    "upcast_fp32": [False],
    "kernels": ["hf"],
    "optimizer": ["adamw_torch_fused"],
}
COMPILED: dict[str, list[Any]] = {
    **LEAN,
    "compile": [True],
    "lora_rank": [16],
    "target_modules": ["attention"],
}
CASES: dict[str, list[tuple[int, dict[str, list[Any]]]]] = {
    "mistral-7b-v0.3": [
        (10, {}),
        (4, {**COMPILED, "checkpoint_fraction": [0.0, 0.5]}),
        (2, {**LEAN, "compute_dtype": ["int8"], "quantization": ["nf4", "int8"]}),
    ],
    "llama-3.2-3b": [(6, {})],
    "qwen2.5-7b": [(5, {})],
}
"""How many of each model, and what is drawn of them instead."""
STEPS = StepBudget(warmup_min=2, warmup_max=4, measured_min=4, measured_max=12, seconds_max=6)
TOKENS = 8192
"""Rows times length at most, so that an 80 GB GPU holds most of them."""


def drawn(model: ModelSpec, count: int, instead: dict[str, list[Any]]) -> Iterator[TrialConfig]:
    """Yield so many configurations that no rule forbids and that hold at most `TOKENS`."""
    chance = random.Random(f"{model.name} {instead}")
    values = {**DRAWN, **instead}
    setting = Setting(model, device="cuda", compute_capability=(9, 0))
    while count:
        knobs = {name: chance.choice(choices) for name, choices in values.items()}
        config = parse_config({"method": "dpo", "double_quant": False, **knobs})
        rows = 2 * config.micro_batch_size
        if rows * config.seq_len <= TOKENS and not any(broken_rules(config, setting)):
            count -= 1
            yield config


def worker_of(model: ModelSpec) -> Worker:
    """Return a worker of this process that trains the model with random weights."""
    settings = WorkerSettings(
        device="cuda",
        budget_bytes=int(0.97 * torch.cuda.get_device_properties(0).total_memory),
        model=model.to_json(),
        weights="random",
        seed=0,
        is_emulated=False,
        texts=None,
    )
    worker = Worker(settings, send=lambda message: None)
    worker.prepare()
    return worker


def measured(worker: Worker, model: ModelSpec, config: TrialConfig) -> Row:
    """Return the row of a configuration."""
    command = RunCommand(request=TrialRequest(config=config, steps=STEPS))
    outcome = worker.run(command).outcome
    row = {"model": model.name, "config": config.model_dump(mode="json")}
    if not isinstance(outcome, Measured):
        return {**row, "failure": str(outcome)[:500]}
    found = outcome.measurement
    kept = ("peak_allocated_bytes", "peak_reserved_bytes", "step_seconds", "step_seconds_ci95")
    more = ("steps_measured", "samples_per_second", "sm_clock_mhz", "compile_seconds")
    return {**row, **{name: getattr(found, name) for name in (*kept, *more)}, "flags": found.flags}


def main() -> None:
    """Measure, and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--model", choices=CASES)
    asked = parser.parse_args()
    write(stamp(), asked.output)
    for name, groups in CASES.items():
        if asked.model not in (None, name):
            continue
        model = load_model_spec(name)
        worker = worker_of(model)
        for count, instead in groups:
            for config in drawn(model, count, instead):
                write(measured(worker, model, config), asked.output)
        worker._resident.drop()


if __name__ == "__main__":
    main()
