"""What TRL's `GRPOTrainer` (1.16) is told of a configuration whose training step was planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError


def grpo_config(
    config: TrialConfig, settings: Mapping[str, Any], *, learning_rate: float
) -> dict[str, Any]:
    """Return the keys of `GRPOConfig` that decide the step's memory, and its learning rate.

    Args:
        config: what was planned.
        settings: ``num_generations``, ``beta`` and ``max_completion_length``; where that is None,
            half of a sequence is the prompt's.
        learning_rate: the highest of the schedule.

    Raises:
        InputError: some prompt would not have all its completions in one step, or a completion
            leaves no room for a prompt.
    """
    generations = settings["num_generations"]
    longest = settings["max_completion_length"]
    if config.samples_per_step % generations:
        got = f"{config.samples_per_step} and {generations}"
        raise InputError(f"effective_batch_size must be a multiple of num_generations, got {got}")
    if (longest or 1) >= config.seq_len:
        got = f"{longest} and {config.seq_len}"
        raise InputError(f"max_completion_length must go into seq_len with a prompt, got {got}")
    keys = {
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation_steps,
        "num_generations": generations,
        "max_completion_length": longest or max(1, config.seq_len // 2),
        "beta": settings["beta"],
        "learning_rate": learning_rate,
        "gradient_checkpointing": config.checkpoint_fraction > 0,
        "bf16": config.compute_dtype == "bf16",
        "fp16": config.compute_dtype == "fp16",
        "optim": config.optimizer,
        "use_liger_kernel": config.kernels_kind.fuses_layers,
    }
    if config.checkpoint_fraction > 0:
        keys["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if config.kernels_kind.fuses_layers:
        # GRPOTrainer computes log-probabilities in chunks, and refuses Liger's fused loss.
        kernels = config.kernels_kind.in_liger or {}
        keys["liger_kernel_config"] = kernels | {"fused_linear_cross_entropy": False}
    return keys
