"""The FLOPs of a step, counted from the config alone and on the model that is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from search_spaces.config import TrialConfig
from search_spaces.models import ModelSpec
from sweep.predict.speed.layout import Layout
from sweep.predict.speed.work import step_work
from sweep.training.adapters import attached
from sweep.training.flops import flops_per_token
from sweep.training.model import build_base

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDE_HEADS = {"head_dim": 32}
"""Four of them are twice as wide as the residual stream."""


@pytest.mark.parametrize(
    "architecture",
    [
        {"model_type": "llama"},
        {"model_type": "llama", **WIDE_HEADS},
        {"model_type": "llama", "tie_word_embeddings": True},
        {"model_type": "mistral", "sliding_window": None, "head_dim": 8},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", **WIDE_HEADS},
        {"model_type": "gemma", **WIDE_HEADS},
        {"model_type": "phi3"},
    ],
    ids=str,
)
@pytest.mark.parametrize("targets", ["attention", "all-linear", ["down_proj"]], ids=str)
def test_both_counts_of_a_steps_flops_are_the_same(
    architecture: dict[str, Any], targets: str | list[str]
) -> None:
    model = ModelSpec("tiny", "directory", {**SIZES, **architecture})
    wanted = targets if isinstance(targets, str) else tuple(targets)
    config = TrialConfig(
        micro_batch_size=2,
        seq_len=32,
        effective_batch_size=4,
        lora_rank=4,
        target_modules=wanted,
        quantization="none",
        double_quant=False,
    )
    base = build_base(config, spec=model, weights="random", device=torch.device("cpu"), seed=0)
    try:
        with attached(base, config) as attachment:
            counted = flops_per_token(attachment, base.model.config, config.seq_len)
    finally:
        base.close()
    work = step_work(Layout.of([config], model))
    assert work.model_flops == counted * config.tokens_per_step
