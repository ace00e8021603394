"""Measure one reference configuration before and after others ran out of a card's memory.

python tests/bench/reference.py a10
"""

from __future__ import annotations

import sys
from pathlib import Path

from search_spaces.config import TrialConfig
from search_spaces.loading import load_model_spec, load_space
from sweep.cards import read_card
from sweep.supervisor import SupervisedRunner
from sweep.targets import resolve_target

REFERENCE = {"micro_batch_size": 8, "seq_len": 512}
TOO_LARGE = (
    {"micro_batch_size": 12, "seq_len": 512, "checkpoint_fraction": 0.0},
    {"micro_batch_size": 40, "seq_len": 512},
    {"micro_batch_size": 32, "seq_len": 1024, "kernels": "liger", "checkpoint_fraction": 0.25},
)


def main() -> None:
    space = load_space(sys.argv[1])
    target = resolve_target(space, read_card()).target
    with SupervisedRunner(
        load_model_spec(space.model), target=target, log_path=Path("runs/reference.log")
    ) as runner:
        for values in (REFERENCE, *(each for pair in TOO_LARGE for each in (pair, REFERENCE))):
            outcome = runner.run(TrialConfig(**values), steps=space.steps)
            measurement = getattr(outcome, "measurement", None)
            peak = measurement and measurement.peak_allocated_bytes
            print(values, outcome.verdict, getattr(outcome, "stage", ""), peak, flush=True)


if __name__ == "__main__":
    main()
