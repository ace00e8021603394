"""Owns a recipe in axolotl's words.

Option names and what they do were read in its configuration schema, its loaders and its manual.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from search_spaces.config import TrialConfig
from sweep.export.document import (
    DATA_FILE,
    OUTPUT_DIRECTORY,
    common_differences,
    mixed_precision,
    model_of,
    trainer_file,
    whole_alpha,
)
from sweep.export.recipe import LEARNING_RATE, MAX_GRAD_NORM, SCHEDULE, WEIGHT_DECAY, Recipe
from sweep.export.script import liger_kernels

_LIGER = {
    "fused_linear_cross_entropy": "liger_fused_linear_cross_entropy",
    "rms_norm": "liger_rms_norm",
    "swiglu": "liger_glu_activation",
    "rope": "liger_rope",
}


def axolotl(recipe: Recipe) -> str:
    """Return a recipe as an axolotl YAML file."""
    config = recipe.config
    options = {
        "base_model": model_of(recipe),
        **_quantization(config),
        "lora_r": config.lora_rank,
        "lora_alpha": whole_alpha(config),
        "lora_dropout": config.lora_dropout,
        **_targets(recipe),
        # Left out, they may be switched on by themselves; they were not measured.
        "lora_mlp_kernel": False,
        "lora_qkv_kernel": False,
        "lora_o_kernel": False,
        **_data(config),
        "micro_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation_steps,
        **mixed_precision(config),
        "attn_implementation": config.attention,
        **_recomputation(recipe),
        **_kernels(config),
        "optimizer": config.optimizer,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "lr_scheduler": SCHEDULE,
        "warmup_steps": 0,
        "num_epochs": 1,
        "logging_steps": 10,
        "output_dir": OUTPUT_DIRECTORY,
    }
    return trainer_file(
        recipe,
        trainer="axolotl",
        command="axolotl train FILE",
        edits=("datasets", "output_dir"),
        options=options,
        differences=_differences(recipe),
    )


def _quantization(config: TrialConfig) -> dict[str, Any]:
    if config.quantization == "none":
        return {"adapter": "lora", "load_in_4bit": False}
    details = {
        "bnb_4bit_quant_type": config.quantization,
        "bnb_4bit_use_double_quant": config.double_quant,
    }
    return {"adapter": "qlora", "load_in_4bit": True, "bnb_config_kwargs": details}


def _targets(recipe: Recipe) -> dict[str, Any]:
    if recipe.target_modules is None:
        return {"lora_target_linear": True}
    return {"lora_target_modules": list(recipe.target_modules)}


def _data(config: TrialConfig) -> dict[str, Any]:
    texts = {"path": DATA_FILE, "ds_type": "json", "type": "completion", "field": "text"}
    return {
        "datasets": [texts],
        "val_set_size": 0.0,
        "sequence_len": config.seq_len,
        "sample_packing": _packs(config),
        "pad_to_sequence_len": True,
    }


def _packs(config: TrialConfig) -> bool:
    """Whether its packing works: it needs attention that keeps the texts of a row apart."""
    return config.attention == "flash_attention_2"


def _recomputation(recipe: Recipe) -> dict[str, Any]:
    if not recipe.recomputed:
        return {"gradient_checkpointing": False}
    return {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }


def _kernels(config: TrialConfig) -> dict[str, Any]:
    measured = liger_kernels(config)
    if measured is None:
        return {}
    switches = {option: measured[name] for name, option in _LIGER.items()}
    return {"plugins": ["axolotl.integrations.liger.LigerPlugin"], **switches}


def _differences(recipe: Recipe) -> Iterator[str]:
    config = recipe.config
    if config.upcast_fp32:
        yield (
            "upcast_fp32 true: it puts norms, embeddings and head back to the compute dtype: less "
            "memory than measured, and faster."
        )
    if config.kernels == "liger" and recipe.model.model_type == "qwen3":
        yield "kernels liger: for Qwen3 it keeps the model's own RoPE."
    yield from common_differences(recipe)
    if _packs(config):
        yield (
            "Rows: it packs texts with attention kept inside each of them; measured were full rows "
            "with attention over the whole row."
        )
    else:
        yield (
            f"Rows: it does not pack with attention {config.attention}, so each text is a row of "
            "its own, padded to sequence_len. Padding takes time and carries no loss: fewer useful "
            "tokens/s than measured."
        )
    yield (
        "Older releases have no attn_implementation: they want flash_attention, sdp_attention or "
        "eager_attention true in its place."
    )
