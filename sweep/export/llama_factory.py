"""Owns a recipe in LLaMA-Factory's words.

Option names and what they do were read in its argument classes, its loaders and its manual.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from search_spaces.config import Attention, TrialConfig
from sweep.export.document import (
    DATA_FILE,
    common_differences,
    mixed_precision,
    model_of,
    trainer_file,
    transformers_options,
    whole_alpha,
)
from sweep.export.recipe import Recipe

_DATASET = "texts"
_DATASET_INFO = f'{{"{_DATASET}": {{"file_name": "{DATA_FILE}", "columns": {{"prompt": "text"}}}}}}'
_ATTENTION: dict[Attention, str] = {
    "sdpa": "sdpa",
    "flash_attention_2": "fa2",
    "eager": "disabled",
}


def llama_factory(recipe: Recipe) -> str:
    """Return a recipe as a LLaMA-Factory YAML file."""
    config, names = recipe.config, recipe.target_modules
    options = {
        "model_name_or_path": model_of(recipe),
        **_quantization(config),
        # Stage pt joins the texts and cuts them into rows of cutoff_len: every token carries loss.
        "stage": "pt",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": config.lora_rank,
        "lora_alpha": whole_alpha(config),
        "lora_dropout": config.lora_dropout,
        "lora_target": "all" if names is None else ",".join(names),
        "dataset": _DATASET,
        "dataset_dir": "data",
        "cutoff_len": config.seq_len,
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation_steps,
        **mixed_precision(config),
        "upcast_layernorm": config.upcast_fp32,
        "flash_attn": _ATTENTION[config.attention],
        "disable_gradient_checkpointing": not recipe.recomputed,
        "use_reentrant_gc": False,
        "enable_liger_kernel": config.kernels != "hf",
        **transformers_options(config),
    }
    return trainer_file(
        recipe,
        trainer="LLaMA-Factory",
        command="llamafactory-cli train FILE",
        edits=(
            f"dataset_dir, with your {DATA_FILE} and a dataset_info.json of {_DATASET_INFO}",
            "output_dir",
        ),
        options=options,
        differences=_differences(recipe),
    )


def _quantization(config: TrialConfig) -> dict[str, Any]:
    if config.quantization == "none":
        return {}
    return {
        "quantization_method": "bnb",
        "quantization_bit": 4,
        "quantization_type": config.quantization,
        "double_quantization": config.double_quant,
    }


def _differences(recipe: Recipe) -> Iterator[str]:
    config = recipe.config
    if config.upcast_fp32:
        yield (
            "upcast_fp32 true: it puts the norms in fp32 and leaves embeddings and head in the "
            "compute dtype: memory and speed differ from what was measured."
        )
    if config.kernels == "fused-loss":
        yield (
            "kernels fused-loss: it has Liger's whole set or none, so the whole set here: fused "
            "loss, RMSNorm, SwiGLU and RoPE."
        )
    if config.compute_dtype == "fp32":
        yield (
            "compute_dtype fp32: it cannot be asked for. Without bf16 and fp16 it infers a dtype "
            "from the checkpoint and the card."
        )
    yield from common_differences(recipe)
