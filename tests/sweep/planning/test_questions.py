"""What a plan recommends is within a tie of the best that a person could type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.predict.forecast import Forecaster
from qlora_sweep.sweep.predict.memory.prediction import Fit
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from tests.sweep.planning.imagined import a_forecaster
from tests.sweep.planning.questions import (
    QUESTIONS,
    WITHIN,
    Asked,
    compared,
    forecaster_of,
)
from tests.sweep.planning.test_planning_on_texts import shapes

LEAN = {"upcast_fp32": False, "kernels": "fused-loss", "expandable_segments": True}


def imagining(asked: Asked, **changes: Any) -> Forecaster:
    return a_forecaster(gpu=asked.gpu, model=load_model_spec(asked.model), **changes)


def is_right(asked: Asked, forecaster: Forecaster) -> None:
    found, best = compared(asked, forecaster)
    answer = found.recommended
    if answer is None or best is None:
        smallest = TrialConfig(seq_len=asked.seq_len, micro_batch_size=1, **{**LEAN, **asked.fixed})
        assert forecaster.expect(smallest).fit is Fit.NO
        return
    if best.fit is Fit.YES:
        assert answer.fit is Fit.YES
        assert answer.config.seq_len == asked.seq_len
        assert (answer.tokens_per_second or 0) >= WITHIN * (best.tokens_per_second or 0)


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize("asked", QUESTIONS, ids=str)
def test_of_thirty_questions(
    asked: Asked, tracing_child: TracingChildren, profile_cache: Path
) -> None:
    is_right(asked, forecaster_of(asked, cache=profile_cache, tracer=tracing_child))


@pytest.mark.parametrize(
    "budget_gib",
    [11, *(pytest.param(gib, marks=pytest.mark.integration) for gib in (5.6, 7, 40))],
)
@pytest.mark.parametrize(
    "asked",
    [
        Asked("a10", "mistral-7b-v0.3", 512),
        Asked("h200", "llama-3.1-8b", 4096, {"lora_rank": 64, "target_modules": "all-linear"}),
        Asked("a100-80gb", "qwen3-4b", 1024, {"effective_batch_size": 24}),
        Asked("a100-80gb", "qwen3-4b", 1024, {"data_parallel": 2}),
        Asked("rtx-3090", "qwen3-4b", 512, {"expandable_segments": False}),
    ],
    ids=str,
)
def test_of_any_budget(asked: Asked, budget_gib: float) -> None:
    if asked.seq_len < 4096 or budget_gib > 6:
        is_right(asked, imagining(asked, budget_gib=budget_gib))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.integration) for seed in (1, 2, 3))]
)
def test_of_a_dataset(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.lognormal(np.log(300), 0.7, 400).astype(np.int64) + 2
    asked = Asked("rtx-4090", "llama-3.2-1b", int(draw.choice([512, 1024])))
    packing = {"packing": str(draw.choice(["none", "grouped", "packed"]))}
    is_right(
        Asked(asked.gpu, asked.model, asked.seq_len, packing),
        imagining(asked, budget_gib=9, shapes=shapes(np.minimum(rows, asked.seq_len))),
    )
