"""The FLOPs of a step, counted from the config alone and on the model that is there."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.config import TrialConfig
from search_spaces.models import ModelSpec
from tests.lazy import lazily
from tests.sweep.training.tiny import BRIEF, measured, tiny_base, tiny_config, tiny_loop, trial_on

adapters = lazily("sweep.training.adapters")
meter = lazily("sweep.training.meter")
SEQ_LEN, HIDDEN, INNER, LAYERS, VOCABULARY = 32, 64, 160, 3, 320
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDE_HEADS = {"head_dim": 32}
"""Four of them are twice as wide as the residual stream."""
PLAIN = tiny_config(
    seq_len=SEQ_LEN, lora_rank=4, quantization="none", double_quant=False, effective_batch_size=4
)


def a_model(model_type: str, **values: Any) -> ModelSpec:
    return ModelSpec("tiny", "directory", {"model_type": model_type, **SIZES, **values})


def counted(model: ModelSpec, config: TrialConfig = PLAIN) -> float | None:
    """Return the FLOPs of a token, as they are counted on the model that is there."""
    with tiny_loop(config, spec=model) as loop:
        found = meter.flops_per_token(loop.attached, loop.attached.model.config, SEQ_LEN)
    return None if found is None else float(found)


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ({"model_type": "llama"}, "attention"),
        ({"model_type": "llama", **WIDE_HEADS}, "all-linear"),
        ({"model_type": "llama", "tie_word_embeddings": True}, ("down_proj",)),
        ({"model_type": "mistral", "sliding_window": None, "head_dim": 8}, "attention"),
        ({"model_type": "qwen2"}, "all-linear"),
        ({"model_type": "qwen3", **WIDE_HEADS}, "attention"),
        ({"model_type": "gemma", **WIDE_HEADS}, "all-linear"),
        ({"model_type": "phi3"}, "all-linear"),
        ({"model_type": "phi3"}, ("down_proj",)),
    ],
    ids=str,
)
def test_both_counts_of_a_steps_flops_are_the_same(
    architecture: dict[str, Any], targets: str | tuple[str, ...]
) -> None:
    from sweep.predict.speed.kernels import Layout
    from sweep.predict.speed.steps import model_flops

    model = a_model(**architecture)
    config = PLAIN.model_copy(update={"target_modules": targets})
    flops = model_flops(Layout([config], model))
    assert flops == counted(model, config) * config.tokens_per_step  # type: ignore[operator]


ATTENTION = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2
"""Weights of queries and output, and of keys and values of half as many heads."""
ADAPTERS = LAYERS * 4 * (2 * 2 * HIDDEN + 2 * (HIDDEN + HIDDEN // 2))
SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "decoder_sparse_step": 1,
}
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 64,
    "intermediate_size": None,
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(
    ("model", "per_layer", "trained"),
    [
        (a_model("llama"), ATTENTION + 3 * HIDDEN * INNER, ADAPTERS),
        # A token multiplies with the experts that it is sent to, and with the router.
        (
            a_model("mixtral", **ROUTED),
            ATTENTION + 4 * HIDDEN + 2 * 3 * HIDDEN * INNER,
            ADAPTERS,
        ),
        # A shared expert is every token's, and has a gate of its own.
        (
            a_model("qwen2_moe", **SHARED_EXPERT),
            ATTENTION + 4 * HIDDEN + 2 * 3 * HIDDEN * 32 + 3 * HIDDEN * 48 + HIDDEN,
            ADAPTERS,
        ),
        # Linear layers of GPT-2's own class count.
        (a_model("gpt2", **GPT2), 12 * HIDDEN * HIDDEN, LAYERS * 4 * 6 * HIDDEN),
    ],
    ids=["llama", "mixtral", "qwen2_moe", "gpt2"],
)
def test_four_per_frozen_and_six_per_trained_weight_that_a_token_is_multiplied_with(
    model: ModelSpec, per_layer: int, trained: int
) -> None:
    frozen = LAYERS * per_layer + VOCABULARY * HIDDEN
    scores = 6 * LAYERS * SEQ_LEN * HIDDEN
    assert counted(model) == pytest.approx(4 * frozen + 6 * trained + scores)


def test_of_experts_in_a_list_those_count_that_a_token_is_sent_to() -> None:
    import torch

    with tiny_base(PLAIN) as base:
        text = base.model.config

        def of_a_token() -> Any:
            with adapters.attached(base, PLAIN) as attachment:
                return meter.flops_per_token(attachment, text, SEQ_LEN)

        before = of_a_token()
        linears = [torch.nn.Linear(8, 16, bias=False) for _ in range(4)]
        base.model.model.layers[0].mlp.experts = torch.nn.ModuleList(linears)
        assert of_a_token() is None
        text.num_local_experts, text.num_experts_per_tok = 4, 2
        assert of_a_token() == before + 4 * 2 * 8 * 16


def test_work_that_no_module_tells_is_not_shown() -> None:
    """A state space's convolution is no product of each token with a matrix."""
    from tests.families import spec_of

    config = tiny_config(attention="eager", quantization="none", double_quant=False)
    assert counted(spec_of("jamba"), config) is None
    with tiny_base(config, spec=spec_of("jamba")) as base:
        found = measured(trial_on(base, config, steps=BRIEF, peak_flops=1e12).run())
    assert found.flops_utilization is None
