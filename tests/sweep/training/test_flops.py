"""The FLOPs of a step, counted from the config alone and on the model that is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from search_spaces.config import TrialConfig
from search_spaces.models import ModelSpec
from storage.records import Measured
from sweep.predict.speed.kernels import Layout
from sweep.predict.speed.steps import model_flops
from sweep.training.adapters import attached
from sweep.training.meter import flops_per_token
from sweep.training.model import build_base
from tests.bench.try_models import spec_of
from tests.sweep.training.tiny import BRIEF, tiny_base, tiny_config, trial_on

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
    flops = model_flops(Layout([config], model))
    assert flops == counted * config.tokens_per_step


def counted(model: ModelSpec, **changes: Any) -> float | None:
    """Return the FLOPs of a token of a 16-bit base with adapters on its attention."""
    config = TrialConfig(seq_len=SEQ_LEN, lora_rank=4, **{**PLAIN, **changes})
    base = build_base(config, spec=model, weights="random", device=torch.device("cpu"), seed=0)
    try:
        with attached(base, config) as attachment:
            return flops_per_token(attachment, base.model.config, config.seq_len)
    finally:
        base.close()


SEQ_LEN, HIDDEN, LAYERS, VOCABULARY = 32, 64, 3, 320
PLAIN = {"quantization": "none", "double_quant": False, "target_modules": "attention"}
ATTENTION = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2
"""Weights of queries and output, and of keys and values of half as many heads."""
ADAPTERS = LAYERS * 4 * (2 * 2 * HIDDEN + 2 * (HIDDEN + HIDDEN // 2))


def expected(per_layer: float, *, adapters: int = ADAPTERS) -> float:
    frozen = LAYERS * per_layer + VOCABULARY * HIDDEN
    return 4 * frozen + 6 * adapters + 6 * LAYERS * SEQ_LEN * HIDDEN


@pytest.mark.parametrize("routed", [1, 2])
def test_a_token_multiplies_with_the_experts_that_it_is_sent_to(routed: int) -> None:
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": routed}
    model = ModelSpec("tiny", "directory", {"model_type": "mixtral", **sizes})
    router, expert = 4 * HIDDEN, 3 * HIDDEN * 160
    assert counted(model) == pytest.approx(expected(ATTENTION + router + routed * expert))


def test_a_shared_expert_is_every_tokens() -> None:
    sizes = {
        **SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 1,
    }
    model = ModelSpec("tiny", "directory", {"model_type": "qwen2_moe", **sizes})
    # The shared one has a gate of its own.
    experts = 2 * 3 * HIDDEN * 32 + 3 * HIDDEN * 48 + HIDDEN
    assert counted(model) == pytest.approx(expected(ATTENTION + 4 * HIDDEN + experts))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_linear_layers_of_gpt2s_own_class_count() -> None:
    sizes = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCABULARY}
    model = ModelSpec("tiny", "directory", {"model_type": "gpt2", "n_positions": 64, **sizes})
    adapters = LAYERS * 4 * (HIDDEN + 3 * HIDDEN + HIDDEN + HIDDEN)
    assert counted(model) == expected(12 * HIDDEN * HIDDEN, adapters=adapters)


def test_of_experts_in_a_list_those_count_that_a_token_is_sent_to() -> None:
    config = tiny_config(quantization="none", double_quant=False)
    with tiny_base(config) as base:
        text = base.model.config
        with attached(base, config) as attachment:
            before = flops_per_token(attachment, text, SEQ_LEN)
        linears = [torch.nn.Linear(8, 16, bias=False) for _ in range(4)]
        base.model.model.layers[0].mlp.experts = torch.nn.ModuleList(linears)
        with attached(base, config) as attachment:
            unknown = flops_per_token(attachment, text, SEQ_LEN)
            text.num_local_experts, text.num_experts_per_tok = 4, 2
            after = flops_per_token(attachment, text, SEQ_LEN)
    assert before is not None
    assert unknown is None
    assert after == before + 4 * 2 * 8 * 16


def test_work_that_no_module_tells_is_not_shown() -> None:
    """A state space's convolution is no product of each token with a matrix."""
    config = tiny_config(attention="eager", quantization="none", double_quant=False)
    base = build_base(
        config, spec=spec_of("jamba"), weights="random", device=torch.device("cpu"), seed=0
    )
    try:
        with attached(base, config) as attachment:
            assert flops_per_token(attachment, base.model.config, SEQ_LEN) is None
        outcome = trial_on(base, config, steps=BRIEF, peak_flops=1e12).run()
    finally:
        base.close()
    assert isinstance(outcome, Measured)
    assert outcome.measurement.flops_utilization is None
