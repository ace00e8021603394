"""The committed measurements of one H200, as rows; nothing said of accuracy rests on other numbers.

`tests/bench/results/README.md` says which command makes each file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.sweep.predict.memory.predictor import MemoryPrediction
from qlora_sweep.sweep.predict.trainers import for_memory

DATA = Path(__file__).parents[2] / "data"

Row = dict[str, Any]
Predict = Callable[[Row], MemoryPrediction]


def read_rows(name: str) -> list[Row]:
    """The rows of a file in which something was measured."""
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [row for line in lines if "failure" not in (row := json.loads(line))]


TABLE = read_rows("measurements_h200.jsonl")
HELD_OUT = read_rows("held_out_h200.jsonl")
COMPILED = read_rows("compiled_h200.jsonl")
EIGHT_BIT = read_rows("eight_bit_h200.jsonl")
GATED = read_rows("gated_h200.jsonl")
"""Compiled layers whose peak is in the gated MLP's way back, in 16 and in 8 bits."""
PACKED = read_rows("packed_h200.jsonl")
"""Rows that texts fill to the last token; ``full`` is the same configuration on one text a row."""
PAIRS = read_rows("pairs_h100.jsonl")
"""Of pairs of completions, on an H100."""
SHARED = read_rows("sharded_h100.jsonl")
"""Of a model that two H100 share, most of them compiled."""
GRPO = read_rows("grpo_h100.jsonl")
"""Of TRL's GRPOTrainer."""
TRL = read_rows("trl_h200.jsonl")
"""Of TRL's SFTTrainer, on the files that `sweep export` writes."""
SEVERAL_GPUS = read_rows("several_gpus_h200.jsonl")
"""Of two GPUs that train one configuration, and of one beside them."""
EDGES = read_rows("edges_h200.jsonl")
STUDY_STEPS = read_rows("study_steps_h200.jsonl")
IS_NEW_MEASURED = (DATA / "new_models_h200.jsonl").exists()
NEW_MODELS = read_rows("new_models_h200.jsonl") if IS_NEW_MEASURED else []
"""What `new_models.py` of commit 97b60c55 measured of models that had not been measured before."""


def config_of(row: Row) -> TrialConfig:
    """What stands in a predictor for what a row ran."""
    return for_memory(parse_config(row["config"]))


def model_of(row: Row) -> ModelSpec:
    """The model that a row is about: shipped, or one that is committed for these rows alone."""
    directory = DATA / "models" / row["model"]
    return load_model_spec(str(directory) if directory.exists() else row["model"])


def is_compiled(row: Row) -> bool:
    return bool(row["config"]["compile"])


def is_sharded(row: Row) -> bool:
    return config_of(row).is_sharded


def is_recomputed(row: Row) -> bool:
    """Whether all of its layers are."""
    return bool(row["config"]["checkpoint_fraction"] == 1)


def describe(row: Row) -> str:
    return f"{row['model']} {config_of(row).changes_from(TrialConfig())}"


def step_spread(row: Row) -> float:
    """How far a row's own steps lie apart, half of them around the median: (q3 - q1) / median."""
    times = sorted(row["step_times"])
    quarter = len(times) // 4
    return float((times[-1 - quarter] - times[quarter]) / row["step_seconds"])
