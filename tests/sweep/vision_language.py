"""Tiny vision-language checkpoints, as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 200,
    "max_position_embeddings": 128,
}
SEEN = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
SEEN |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
QWEN |= {"intermediate_size": 64}
MROPE = {"mrope_section": [2, 3, 3]}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {"rope_scaling": {"type": "mrope", **MROPE}},
        "vision_config": QWEN,
    },
    "qwen2_vl": {
        "text_config": {"rope_scaling": {"type": "mrope", **MROPE}},
        "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
    },
    "qwen3_vl": {
        "text_config": {"rope_scaling": {"rope_type": "default", **MROPE}},
        "vision_config": {**QWEN, "deepstack_visual_indexes": [0]},
    },
    "gemma3": {
        "text_config": {"model_type": "gemma3_text"},
        "vision_config": {**SEEN, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral"},
        "vision_config": {**SEEN, "model_type": "pixtral", "head_dim": 16},
    },
    "llava": {
        "text_config": {"model_type": "llama"},
        "vision_config": {**SEEN, "model_type": "clip_vision_model", "projection_dim": 32},
    },
}
"""By the model's type; decoders are `TEXT` besides."""


def make_checkpoint(directory: Path, kind: str) -> Any:
    """Write a checkpoint and return the whole model, which sees and reads."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    values = CONFIGS[kind]
    config = AutoConfig.for_model(
        kind, **{**values, "text_config": {**TEXT, **values["text_config"]}}
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    model.save_pretrained(directory)
    return model.eval()
