"""Model families as tiny models: what transformers builds of a small config with random weights."""

from __future__ import annotations

import os
from typing import Any

# As the supervisor does for a worker on the CPU; torch reads it when it is imported.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.rules import attention_of

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
LINEAR_ATTENTION = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": LOCAL_EXPERTS,
    "ministral": {"head_dim": 32},
    "ministral3": {"head_dim": 32},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 32},
    "qwen3_next": {**EXPERTS, **LINEAR_ATTENTION, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": LINEAR_ATTENTION,
    "qwen3_5_moe_text": {**EXPERTS, **LINEAR_ATTENTION, "shared_expert_intermediate_size": 64},
    "olmo_hybrid": {**LINEAR_ATTENTION, "num_key_value_heads": 4},
    "kimi_linear": {
        **EXPERTS,
        "num_local_experts": 4,
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 48,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {**EXPERTS, "intermediate_size": 64},
    "gpt_oss": {**LOCAL_EXPERTS, "head_dim": 32, "intermediate_size": 64},
    "gpt_neox": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_heads": 4},
    "gpt2": {},
    "gpt_bigcode": {},
    "gptj": {"rotary_dim": 16},
    "codegen": {"rotary_dim": 16},
    "falcon": {},
    "mpt": {"d_model": 128, "n_heads": 4, "n_layers": 4},
    "phi": {},
    "phi3": {},
    "phimoe": LOCAL_EXPERTS,
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128},
    "bloom": {},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "gemma4_text": {
        "head_dim": 32,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 0,
    },
    "granite": {},
    "granitemoe": LOCAL_EXPERTS,
    "granitemoehybrid": {
        **LOCAL_EXPERTS,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
    },
    "starcoder2": {},
    "stablelm": {},
    "cohere": {},
    "cohere2": {"head_dim": 32},
    "smollm3": {},
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "glm4_moe": {**EXPERTS, "head_dim": 32, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "exaone4": {"head_dim": 32},
    "nemotron": {},
    "ernie4_5": {"head_dim": 32},
    "seed_oss": {"head_dim": 32},
    "arcee": {},
    "apertus": {},
    "helium": {"head_dim": 32},
    "llama4_text": {**LOCAL_EXPERTS, "head_dim": 32, "intermediate_size_mlp": 256},
    "falcon_h1": {
        "head_dim": 32,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        # Every eighth layer attends by default, and a tiny model has four.
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 32, "attn_layer_indices": [1, 3]},
    "recurrent_gemma": {"lru_width": 128, "head_dim": 32},
}
"""What each family's tiny config has beyond `SIZES`, by transformers' model type."""


def spec_of(family: str) -> ModelSpec:
    """Return the family's tiny model."""
    return ModelSpec(family, "directory", {"model_type": family, **SIZES, **FAMILIES[family]})


def config_of(family: str, targets: str, quantization: str = "nf4") -> TrialConfig:
    """Return a small configuration, half of its layers checkpointed."""
    return TrialConfig(
        attention=attention_of(spec_of(family)),
        target_modules=targets,
        quantization=quantization,
        micro_batch_size=2,
        seq_len=32,
        lora_rank=4,
        checkpoint_fraction=0.5,
    )
