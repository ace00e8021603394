"""Measure one reference configuration before and after others ran out of a GPU's memory.

python tests/bench/reference.py a10 [OUT.jsonl]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.loading import load_space
from search_spaces.models import load_model_spec
from storage.records import Measured, Outcome, OutOfMemory
from sweep.running.device_info import read_card
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import TrialRequest
from sweep.study.targets import resolve_target

REFERENCE = {"micro_batch_size": 8, "seq_len": 512}
TOO_LARGE = (
    {"micro_batch_size": 12, "seq_len": 512, "checkpoint_fraction": 0.0},
    {"micro_batch_size": 40, "seq_len": 512},
    {"micro_batch_size": 32, "seq_len": 1024, "kernels": "liger", "checkpoint_fraction": 0.25},
)


def row_of(model: str, config: TrialConfig, outcome: Outcome) -> dict[str, Any]:
    """Return one line of the file: how a configuration ended, and its peak or its stage."""
    row = {
        "model": model,
        "config": config.model_dump(mode="json"),
        "verdict": outcome.verdict,
    }
    match outcome:
        case Measured(measurement=measurement):
            row["peak_allocated_bytes"] = measurement.peak_allocated_bytes
        case OutOfMemory(stage=stage):
            row["stage"] = stage
    return row


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("gpu")
    arguments.add_argument("out", type=Path, nargs="?")
    options = arguments.parse_args()
    space = load_space(options.gpu)
    target = resolve_target(space, read_card()).target
    rows = []
    with SupervisedRunner(
        load_model_spec(space.model), target=target, log_path=Path("runs/reference.log")
    ) as runner:
        for values in (REFERENCE, *(each for pair in TOO_LARGE for each in (pair, REFERENCE))):
            config = TrialConfig(**values)
            row = row_of(
                space.model, config, runner.run(TrialRequest(config=config, steps=space.steps))
            )
            found = row.get("stage") or row.get("peak_allocated_bytes")
            print(values, row["verdict"], found, flush=True)
            rows.append(row)
    if options.out is not None:
        lines = [json.dumps(row) + "\n" for row in rows]
        options.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
