"""Models that see, so small that a step takes milliseconds on a CPU."""

from __future__ import annotations

from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import ModelSpec, checked_config
from tests.families import FAMILIES

DECODER: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
QWEN: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
    "tie_word_embeddings": False,
    "text_config": {
        **DECODER,
        "model_type": "qwen3_vl_text",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 128,
        "deepstack_visual_indexes": [1, 2],
        "num_position_embeddings": 256,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma3",
    "image_token_index": 500,
    "boi_token_index": 501,
    "eoi_token_index": 502,
    "mm_tokens_per_image": 16,
    "text_config": {
        **DECODER,
        "model_type": "gemma3_text",
        "sliding_window": 1024,
        "rope_theta": 1e6,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "image_size": 224,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
"""With as many layers in its tower as in its decoder, which is not to be taken for it."""
GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4",
    "image_token_id": 500,
    "boi_token_id": 501,
    "eoi_token_id": 502,
    "video_token_id": 503,
    "audio_token_id": 504,
    "boa_token_id": 505,
    "eoa_token_index": 506,
    "audio_config": None,
    "text_config": {
        **FAMILIES["gemma4_text"],
        **DECODER,
        "model_type": "gemma4_text",
        "pad_token_id": 0,
        "sliding_window": 1024,
    },
    "vision_config": {
        "model_type": "gemma4_vision",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
    },
}
QWEN_3_5: dict[str, Any] = {
    **QWEN,
    "model_type": "qwen3_5",
    "text_config": {
        **DECODER,
        **FAMILIES["qwen3_5_text"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
    },
    "vision_config": {
        **{k: v for k, v in QWEN["vision_config"].items() if not k.startswith("deepstack")},
        "model_type": "qwen3_5",
    },
}
"""Its decoder has linear attention, which takes a CPU seconds."""
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MIXTURE: dict[str, Any] = {
    **QWEN,
    "model_type": "qwen3_vl_moe",
    "text_config": {**QWEN["text_config"], **_EXPERTS, "model_type": "qwen3_vl_moe_text"},
    "vision_config": {**QWEN["vision_config"], "model_type": "qwen3_vl_moe"},
}
OTHERS = {"qwen3_5": QWEN_3_5, "qwen3_vl_moe": MIXTURE}
CONFIGS = {"qwen3_vl": QWEN, "gemma3": GEMMA, "gemma4": GEMMA_4}


def seeing(kind: str) -> ModelSpec:
    """Return a tiny model of a type that sees."""
    return ModelSpec(
        f"tiny-{kind}", "directory", checked_config({**CONFIGS, **OTHERS}[kind], label=kind)
    )


def seeing_config(**settings: Any) -> TrialConfig:
    """Return a configuration whose rows have an image."""
    usual = {
        "image_size": 256,
        "seq_len": 288,
        "micro_batch_size": 2,
        "quantization": "none",
        "upcast_fp32": False,
        "optimizer": "adamw_torch_fused",
    }
    return TrialConfig(**{**usual, **settings})
