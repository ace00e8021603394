"""What `new_models.py` tries of each model, and what a row says of a run that came to nothing."""

from __future__ import annotations

import pytest

from search_spaces.linears import unquantized
from search_spaces.models import load_model_spec, shipped_models
from search_spaces.rules import violation
from storage.records import OutOfMemory
from tests.bench.new_models import MODELS, configurations, in_words, measured

MEASURED_BEFORE = {
    "demo",
    "llama-2-13b",
    "llama-3.1-8b",
    "mistral-7b-v0.3",
    "qwen2.5-7b",
    "qwen3-8b",
    "tinyllama-1.1b",
}


MEASURED_ON_TWO_CARDS = {"llama-3.1-70b"}
"""By `tests.bench.several_cards`, as none holds it."""


def test_every_shipped_model_is_measured_by_this_or_was_before() -> None:
    assert len(set(MODELS)) == len(MODELS)
    known = MEASURED_BEFORE | set(MODELS) | MEASURED_ON_TWO_CARDS
    assert {model.name for model in shipped_models()} == known


@pytest.mark.parametrize("name", MODELS)
def test_of_each_model_three_configurations_are_tried_that_no_rule_forbids(name: str) -> None:
    model = load_model_spec(name)
    configs = configurations(model, device="cuda")
    assert len(set(configs)) == 3
    for config in configs:
        assert violation(config, model=model, compute_capability=(9, 0), device="cuda") is None
    is_mixture = unquantized(model) is not None
    assert {c.quantization for c in configs} == {"none" if is_mixture else "nf4"}
    kernels = [c.kernels for c in configs]
    assert kernels == ["hf", "fused-loss", "fused-loss" if is_mixture else "liger"]


def test_a_run_that_came_to_nothing_is_a_row_and_a_line() -> None:
    row = {"model": "phi-4", **measured(OutOfMemory(stage="forward")), "predicted": {}}
    assert row["verdict"] == "oom"
    assert in_words(row).startswith("phi-4 oom: ")
