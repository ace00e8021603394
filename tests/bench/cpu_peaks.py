"""Measure the allocated peaks of the configurations in tests/data/cpu/peaks.jsonl again, on a CPU.

    python -m tests.bench.cpu_peaks OUT.jsonl

They repeat to the byte under the same torch, bitsandbytes and peft.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from search_spaces.config import parse_config
from search_spaces.gpus import GIB
from search_spaces.models import load_model_spec
from search_spaces.space import StepBudget
from storage.definition import Target
from storage.records import Measured
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import TrialRequest

ROWS = Path(__file__).parents[1] / "data" / "cpu" / "peaks.jsonl"
STEPS = StepBudget(warmup_min=1, warmup_max=1, measured_min=2, measured_max=2, seconds_max=1)


def main(out: Path) -> None:
    """Write a row for each configuration that fits a GiB."""
    target = Target(gpu="cpu", device="cpu", budget_bytes=GIB)
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    log = out.with_suffix(".log")
    with (
        SupervisedRunner(load_model_spec("demo"), target=target, log_path=log) as runner,
        out.open("w") as file,
    ):
        for row in rows:
            outcome = runner.run(TrialRequest(config=parse_config(row["config"]), steps=STEPS))
            assert isinstance(outcome, Measured), outcome
            peak = outcome.measurement.peak_allocated_bytes
            print(json.dumps({**row, "peak_allocated_bytes": peak}), file=file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
