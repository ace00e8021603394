"""Owns a recipe in TRL's words: a file for ``trl sft --config``.

Option names and what they do were read in its configuration classes and its SFTTrainer, and in
transformers' training arguments, which they extend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from search_spaces.config import TrialConfig
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
from sweep.export.script import DTYPES, liger_kernels


def trl(recipe: Recipe) -> str:
    """Return a recipe as a configuration file of TRL's command line."""
    config, names = recipe.config, recipe.target_modules
    options = {
        "model_name_or_path": model_of(recipe),
        "dtype": DTYPES[config.compute_dtype],
        "attn_implementation": config.attention,
        **_quantization(config),
        "use_peft": True,
        "lora_r": config.lora_rank,
        "lora_alpha": whole_alpha(config),
        "lora_dropout": config.lora_dropout,
        "lora_target_modules": ["all-linear"] if names is None else list(names),
        "datasets": [{"path": "json", "data_files": DATA_FILE, "columns": ["text"]}],
        "packing": True,
        # Texts joined and cut at max_length, as measured: every token carries loss.
        "packing_strategy": "wrapped",
        "max_length": config.seq_len,
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation_steps,
        **mixed_precision(config),
        **_recomputation(recipe),
        # Left out, it may be computed in chunks: less memory, and not what was measured.
        "loss_type": "nll",
        **_kernels(config),
        **transformers_options(config),
    }
    return trainer_file(
        recipe,
        trainer="TRL",
        command="trl sft --config FILE",
        edits=("datasets", "output_dir"),
        options=options,
        differences=_differences(recipe),
    )


def _quantization(config: TrialConfig) -> dict[str, Any]:
    if config.quantization == "none":
        return {"load_in_4bit": False}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": config.quantization,
        "use_bnb_nested_quant": config.double_quant,
    }


def _recomputation(recipe: Recipe) -> dict[str, Any]:
    if not recipe.recomputed:
        return {"gradient_checkpointing": False}
    details: dict[str, Any] = {"use_reentrant": False}
    every = _every_nth(recipe)
    if every is not None:
        details["every_n_layers"] = every
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": details}


def _every_nth(recipe: Recipe) -> int | None:
    """Return n where some layers are recomputed: each n-th, the first included. None elsewhere."""
    layers = recipe.model.hidden_layers
    steps = range(2, layers + 1)
    return next((n for n in steps if recipe.recomputed == tuple(range(0, layers, n))), None)


def _kernels(config: TrialConfig) -> dict[str, Any]:
    measured = liger_kernels(config)
    if measured is None:
        return {}
    return {"use_liger_kernel": True, "liger_kernel_config": measured}


def _differences(recipe: Recipe) -> Iterator[str]:
    config, every = recipe.config, _every_nth(recipe)
    if config.upcast_fp32:
        yield (
            "upcast_fp32 true: it has no such step, so norms, embeddings and head stay in the "
            "compute dtype: less memory than measured, and faster."
        )
    if config.quantization != "none":
        yield "Adapters: on a 4-bit base it keeps them in bf16; they were measured in fp32."
    if every is not None:
        yield "every_n_layers: transformers 5.17 knows it; older releases may not."
    if config.kernels == "hf":
        yield (
            "Logging: it works out entropy and accuracy from the logits of every micro-batch, "
            "which takes time and memory that were not measured."
        )
    yield from common_differences(recipe, can_recompute_these=every is not None)
