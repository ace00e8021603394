"""Try configurations close to a card's budget, under that budget: which really fit.

python tests/bench/edges.py a10 CONFIGS.jsonl OUT.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from search_spaces.config import parse_config
from search_spaces.loading import load_model_spec, load_space
from search_spaces.space import StepBudget
from sweep.cards import read_card
from sweep.supervisor import SupervisedRunner
from sweep.targets import resolve_target

STEPS = StepBudget(warmup_min=2, warmup_max=3, measured_min=2, measured_max=3)


def main() -> None:
    space = load_space(sys.argv[1])
    target = resolve_target(space, read_card()).target
    lines = Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()
    with (
        SupervisedRunner(
            load_model_spec(space.model), target=target, log_path=Path("runs/edges.log")
        ) as runner,
        Path(sys.argv[3]).open("w", encoding="utf-8") as out,
    ):
        for line in lines:
            config = parse_config(json.loads(line))
            outcome = runner.run(config, steps=STEPS)
            row = {
                "model": space.model,
                "budget_bytes": target.budget_bytes,
                "config": config.model_dump(mode="json"),
                "verdict": outcome.verdict,
            }
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(outcome.verdict, line, flush=True)


if __name__ == "__main__":
    main()
