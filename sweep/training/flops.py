"""Owns the FLOPs of a training step, counted on the model that is there.

Knows nothing of time or of how a step runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from search_spaces.config import TrialConfig
from search_spaces.linears import attention_width, training_flops_per_token
from sweep.training.adapters import Attached


def flops_per_token(attachment: Attached, model_config: PreTrainedConfig, seq_len: int) -> float:
    """Return the FLOPs that a step needs for each token, counted on the model that is there."""
    frozen = adapters = 0
    for name, module in attachment.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            if ".lora_" in name:
                adapters += module.in_features * module.out_features
            else:
                frozen += module.in_features * module.out_features
    text = model_config.get_text_config()
    return training_flops_per_token(
        frozen=frozen,
        adapters=adapters,
        layers=len(attachment.layers),
        attention_width=attention_width(
            hidden=text.hidden_size,
            heads=getattr(text, "num_attention_heads", None) or 1,
            head_dim=getattr(text, "head_dim", None),
        ),
        seq_len=seq_len,
    )


def flops_per_step(
    attachment: Attached,
    model_config: PreTrainedConfig,
    config: TrialConfig,
    *,
    shapes: Sequence[tuple[int, int]] | None = None,
) -> float:
    """Return the FLOPs of an optimizer step of one card, pads included.

    Args:
        attachment: base and adapters.
        model_config: the base's.
        config: what is trained.
        shapes: rows and width of micro-batches that stand for all; None for full rows.
    """
    if shapes is None:
        each = flops_per_token(attachment, model_config, config.seq_len)
        return each * config.tokens_per_step / config.data_parallel
    # Flattened rows stay apart: no token has more before it than its own row has.
    within = config.seq_len
    work = sum(
        rows * width * flops_per_token(attachment, model_config, min(width, within))
        for rows, width in shapes
    )
    return config.accumulation_steps * work / len(shapes)
