"""Measure again committed configurations: with compiled layers, most of which surfaces hold too, or
in 8 bits.

    python tests/bench/compiled_peaks.py OUT.jsonl [--seconds 540] [--rows eight_bit_h200.jsonl]

What was measured by an earlier call is kept; it exits with `OUT_OF_TIME` where some are left.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

from search_spaces.config import parse_config
from search_spaces.models import load_model_spec
from storage.definition import Target
from storage.records import Measured
from sweep.running.device_info import read_card
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import TrialRequest
from tests.bench.record_surface import STEPS
from tests.bench.stamp import OUT_OF_TIME

DATA = Path(__file__).parents[1] / "data"
NUMBERS = ("peak_allocated_bytes", "peak_reserved_bytes", "step_seconds", "faithfulness")

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """Return a file's rows; none where it is not there."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def measure(rows: list[Row], out: Path, *, deadline: float) -> bool:
    """Append a row for each, model by model; return whether all were measured in time."""
    card = read_card()
    assert card is not None, "no GPU is here"
    target = Target(gpu=card.product, device="cuda", budget_bytes=card.memory_bytes)
    for name, of_model in itertools.groupby(rows, key=lambda row: str(row["model"])):
        model, log = load_model_spec(name), out.with_suffix(".log")
        with SupervisedRunner(model, target=target, log_path=log) as runner, out.open("a") as file:
            for row in of_model:
                if time.monotonic() > deadline:
                    return False
                outcome = runner.run(TrialRequest(config=parse_config(row["config"]), steps=STEPS))
                assert isinstance(outcome, Measured), outcome
                numbers = outcome.measurement.model_dump(include=set(NUMBERS), mode="json")
                numbers = {key: value for key, value in numbers.items() if value is not None}
                print(json.dumps({**row, **numbers}), file=file, flush=True)
    return True


def main() -> None:
    """Measure what is not there yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--rows", default="compiled_h200.jsonl", help="of tests/data")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    left = read(DATA / arguments.rows)[len(read(arguments.out)) :]
    if not measure(left, arguments.out, deadline=deadline):
        raise SystemExit(OUT_OF_TIME)


if __name__ == "__main__":
    main()
