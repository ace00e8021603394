"""Measure configurations that several GPUs train together, each a trial of the supervised runner.

    python -m tests.bench.several_cards OUT.jsonl [--seconds 240] [--only NAME]...

One row per configuration; ``again`` is what other calls came to. What an earlier call measured is
kept; it exits with `OUT_OF_TIME` where some are left, as all are on a machine of one GPU. ``--only
cpu`` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig, parse_config
from search_spaces.gpus import GIB
from search_spaces.models import load_model_spec
from search_spaces.space import StepBudget
from storage.definition import Target
from storage.records import Measured, Outcome
from sweep.running.device_info import read_cards
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import TrialRequest
from tests.bench.stamp import OUT_OF_TIME, stamp

STEPS = StepBudget(
    warmup_min=2,
    warmup_max=6,
    measured_min=6,
    measured_max=14,
    seconds_max=6,
)
NUMBERS = (
    "cards",
    "tokens_per_second",
    "step_seconds",
    "step_seconds_ci95",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "sm_clock_mhz",
    "throttle_reasons",
    "flags",
)
LEAN = {"upcast_fp32": False, "kernels": "liger", "checkpoint_fraction": 0.0, "micro_batch_size": 8}
FUSED = {**LEAN, "optimizer": "adamw_torch_fused"}
TWO = {"data_parallel": 2}
SHARED = {**FUSED, **TWO, "sharding": "fsdp", "checkpoint_fraction": 1.0}
COMPILED = {**FUSED, "kernels": "fused-loss", "compile": True, "micro_batch_size": 10}

Row = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """Configurations of one model under one budget, on the same workers in turn."""

    model: str
    budget_gib: float
    configs: tuple[Row, ...]
    device: str = "cuda"


SERIES = {
    # No GPU of 44 GiB holds it.
    "70b": Series(
        "llama-3.1-70b",
        44,
        ({**SHARED, "micro_batch_size": 4}, {**SHARED, "micro_batch_size": 16}),
    ),
    # Its weights alone take more than one GPU may have.
    "capped": Series("mistral-7b-v0.3", 3.5, ({**SHARED, "micro_batch_size": 1},)),
    "mistral": Series(
        "mistral-7b-v0.3",
        100,
        (
            {**SHARED, "checkpoint_fraction": 0.0},
            {**LEAN, **TWO},
            LEAN,
            {**FUSED, "checkpoint_fraction": 1.0},
            SHARED,
            {**SHARED, "kernels": "hf"},
            {**SHARED, "kernels": "hf", "micro_batch_size": 4},
            {**LEAN, **TWO, "micro_batch_size": 10},
        ),
    ),
    "compiled": Series("mistral-7b-v0.3", 100, ({**COMPILED, **TWO},)),
    "cpu": Series(
        "demo",
        1,
        (
            {**TWO, "micro_batch_size": 2, "seq_len": 64},
            {**SHARED, "kernels": "hf", "micro_batch_size": 2, "seq_len": 64},
        ),
        device="cpu",
    ),
}


def identity(series: Series, config: TrialConfig) -> Row:
    """Return what of a row says which configuration it is of."""
    return {
        "model": series.model,
        "budget_bytes": int(series.budget_gib * GIB),
        "config": config.model_dump(mode="json"),
    }


def key_of(row: Row) -> str:
    """Return the same of a row, as one text."""
    return json.dumps([row["model"], row["budget_bytes"], row["config"]], sort_keys=True)


def row_of(series: Series, config: TrialConfig, outcome: Outcome) -> Row:
    """Return what is kept of a trial."""
    row = identity(series, config)
    if not isinstance(outcome, Measured):
        return {**row, "failure": outcome.model_dump(mode="json")}
    measurement = outcome.measurement.model_dump(mode="json")
    return {**row, **{name: measurement[name] for name in NUMBERS}}


def measure(series: Series, configs: list[TrialConfig], *, out: Path, until: float) -> bool:
    """Add a row for each configuration; return whether there was time for all."""
    target = Target(gpu="here", device=series.device, budget_bytes=int(series.budget_gib * GIB))
    spec = load_model_spec(series.model)
    with (
        tempfile.TemporaryDirectory() as home,
        SupervisedRunner(spec, target=target, log_path=Path(home) / "worker.log") as runner,
    ):
        for config in configs:
            if time.monotonic() >= until:
                return False
            row = row_of(series, config, runner.run(TrialRequest(config=config, steps=STEPS)))
            told = (*NUMBERS[:2], "peak_allocated_bytes")
            print({name: row.get(name) for name in told}, flush=True)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return True


def main() -> None:
    """Measure what is not in the file yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--only", action="append", choices=SERIES)
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    known = set()
    if asked.out.exists():
        rows = map(json.loads, asked.out.read_text(encoding="utf-8").splitlines())
        known = {key_of(row) for row in rows}
    asked.out.with_suffix(".meta.json").write_text(json.dumps(stamp(), indent=2) + "\n")
    is_whole = True
    for name in asked.only or [name for name in SERIES if name != "cpu"]:
        series = SERIES[name]
        configs = [parse_config(knobs) for knobs in series.configs]
        left = [config for config in configs if key_of(identity(series, config)) not in known]
        has_cards = series.device == "cpu" or len(read_cards()) > 1
        is_done = has_cards and measure(series, left, out=asked.out, until=until) if left else True
        is_whole = is_whole and is_done
    os._exit(0 if is_whole else OUT_OF_TIME)


if __name__ == "__main__":
    main()
