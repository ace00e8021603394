"""The mask that keeps packed texts apart costs what was measured of it on a GPU."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from search_spaces.config import TrialConfig
from search_spaces.gpus import find_gpu
from search_spaces.models import load_model_spec
from sweep.predict.speed.kernels import MASKED_DOUBT, Layout, attention
from sweep.predict.speed.steps import ATTENTION_EFFICIENCY, ELEMENTWISE_EFFICIENCY

MEASURED = Path(__file__).parents[3] / "bench" / "results" / "masked_attention.json"
LONG = 4096
"""Tokens; of shorter rows the host's launches are most of what is measured."""


def _seconds(model: str, rows: int, packing: str) -> float:
    config = TrialConfig(micro_batch_size=rows, seq_len=LONG, packing=packing)  # type: ignore[arg-type]
    card = find_gpu("h200")
    matrix = card.matrix_rate("bf16")
    assert matrix is not None
    forward, backward = attention(Layout([config], load_model_spec(model)))
    flops, moved, _ = (forward + backward)[:, 0].tolist()
    memory = card.copy_rate * ELEMENTWISE_EFFICIENCY
    return float(flops / (matrix * ATTENTION_EFFICIENCY) + moved / memory)


def test_a_mask_slows_attention_as_it_was_measured_to() -> None:
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    errors = []
    for row in (row for row in rows if row["length"] == LONG):
        measured = row["masked"]["both"] / row["plain"]["both"]
        model, batch = row["model"], row["rows"]
        predicted = _seconds(model, batch, "packed") / _seconds(model, batch, "none")
        errors.append(predicted / measured - 1.0)
        assert abs(errors[-1]) < MASKED_DOUBT
    assert statistics.fmean(errors) == pytest.approx(0.0, abs=0.1)
