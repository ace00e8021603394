"""A model of each architecture that ships, in sizes that a CPU trains in milliseconds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from search_spaces.models import ModelSpec, shipped_models

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "vocab_size": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def families() -> dict[str, ModelSpec]:
    """Return a small model of each model type, by its name."""
    return {spec.model_type: _small(spec) for spec in shipped_models() if spec.name != "demo"}


def _small(spec: ModelSpec) -> ModelSpec:
    config = spec.config | {key: value for key, value in _SIZES.items() if key in spec.config}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    rope = dict(config.get("rope_parameters") or {})
    if rope.get("rope_type") == "longrope":
        # A factor for each pair of the dimensions that turn.
        pairs = int(_SIZES["head_dim"] * config.get("partial_rotary_factor", 1.0)) // 2
        config["rope_parameters"] = rope | {
            key: rope[key][:pairs] for key in ("short_factor", "long_factor")
        }
    return dataclasses.replace(spec, config=config)


def saved(spec: ModelSpec, directory: Path) -> ModelSpec:
    """Write random weights of a model, and return it as the one that is there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.config))
    model.save_pretrained(directory)
    return dataclasses.replace(spec, source="directory", path=directory)
