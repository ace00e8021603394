"""Model families as tiny models: what transformers builds of a small config with random weights.

Those in `FAMILIES` are written down; of any other type of transformers its class's own config is
shrunk (`tiny_config_of`).
"""

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

SHRUNK: dict[str, Any] = {
    **SIZES,
    **EXPERTS,
    **LOCAL_EXPERTS,
    **LATENT,
    **LINEAR_ATTENTION,
    "qk_head_dim": 48,
    "global_head_dim": 32,
    "swa_head_dim": 32,
    "rotary_dim": 16,
    "query_pre_attn_scalar": 32,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "num_experts_per_token": 2,
    "zero_expert_num": 2,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "dense_intermediate_size": 256,
    "ffn_hidden_size": 256,
    "expert_ffn_hidden_size": 64,
    "intermediate_size_mlp": 256,
    "ffn_dim": 256,
    "dff": 256,
    "dim_ff": 256,
    "dim_head": 32,
    "d_inner": 256,
    "d_head": 32,
    "embedding_size": 128,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 16,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 16,
    "o_lora_rank": 64,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_ssm": 256,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "mamba_headdim": 32,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "ssm_state_size": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "num_kv_heads": 2,
    "kv_channels": 32,
    "attention_head_dim": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "router_hidden_size": 64,
}
"""Sizes to which a default config is shrunk, by transformers' names of them."""
_CONV_AND_ATTENTION: dict[str, Any] = {
    "layer_types": ["conv", "full_attention"] * 2,
    "num_hidden_layers": 4,
}
_SHORT_CHUNKS = {"mamba_chunk_size": 16}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), _SHORT_CHUNKS),
    "axk1": {"head_dim": 16},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [6, 5, 5],
            }
        }
    },
    "dbrx": {
        "d_model": 128,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8},
        "ffn_config": {
            "hidden_size": 128,
            "ffn_hidden_size": 64,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "dots1": {
        "head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "gemma3n_text": {
        "intermediate_size": [256] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_unified_text": {"global_head_dim": 32},
    "hrm_text": {"num_hidden_layers": 1},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "lfm2": _CONV_AND_ATTENTION,
    "lfm2_moe": {**_CONV_AND_ATTENTION, "num_dense_layers": 1},
    "longcat_flash": {"num_layers": 2, "num_hidden_layers": 4, "head_dim": 16},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
        "n_groups": 1,
    },
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "audio_config": {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 64,
            "nemo_conv_channels": 64,
        },
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
    },
    "youtu": {"head_dim": 16},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "use_mamba_kernels": False,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What a config needs besides, as a rule as its class's default is none that can be built."""
LAYERS = SIZES["num_hidden_layers"]


def tiny_config_of(kind: str) -> dict[str, Any]:
    """Return a tiny config of a type, from its class's own.

    Sizes that the class has are shrunk; of lists with a value for each layer the first layer of
    every kind is kept.

    Raises:
        Exception: whatever transformers says of a class that has no default.
    """
    if kind in FAMILIES:
        return {"model_type": kind, **SIZES, **FAMILIES[kind], **OWN.get(kind, {})}
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    default = CONFIG_MAPPING[kind]()
    values = default.to_dict()
    named = values.keys() | type(default).attribute_map.keys()
    tiny: dict[str, Any] = {"model_type": kind}
    for key, size in SHRUNK.items():
        value = values.get(key)
        is_size = isinstance(value, int) and not isinstance(value, bool)
        is_renamed = key in SIZES and key in named and key not in values
        is_token = key.endswith("_token_id") and key in named
        if is_size or is_renamed or is_token:
            tiny[key] = size
    tiny |= _of_layers(values, getattr(default, "num_hidden_layers", 0))
    for key in ("is_encoder_decoder", "text_config"):
        if values.get(key):
            # What refuses such a model is asked as of a published one.
            tiny[key] = values[key]
    return tiny | OWN.get(kind, {})


def _of_layers(values: dict[str, Any], count: int) -> dict[str, Any]:
    """Return a config's lists of a value for each layer, for as few layers as have every kind."""
    lists = {k: v for k, v in values.items() if isinstance(v, list) and len(v) == count}
    if not lists or count <= LAYERS:
        return {}
    kinds = [repr([column[layer] for column in lists.values()]) for layer in range(count)]
    first = {kinds.index(kind) for kind in kinds}
    others = [layer for layer in range(count) if layer not in first]
    chosen = sorted([*first, *others[: max(0, LAYERS - len(first))]])
    cut = {key: [column[layer] for layer in chosen] for key, column in lists.items()}
    return {**cut, "num_hidden_layers": len(chosen)}


def spec_of(family: str) -> ModelSpec:
    """Return the family's tiny model."""
    return ModelSpec(family, "directory", tiny_config_of(family))


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
