"""What a step calls: the model, the loss of pairs, or TRL's own head, which never has the logits
as a whole."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.sweep.training import preference

_OUTPUTS = ("log_probs", "entropy", "is_top1")
"""What its head works out for each token: the loss, and what TRL logs."""


def add_head(model: PreTrainedModel) -> None:
    """Give a base TRL's head beside its own.

    Raises:
        ImportError: TRL has none.
    """
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=_OUTPUTS)


class InTrl(torch.nn.Module):
    """A model with adapters whose forward pass is the loss of a micro-batch in TRL.

    Args:
        model: over a base with TRL's head (`add_head`).
    """

    def __init__(self, model: PeftModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, num_items_in_batch: torch.Tensor | int | None = None, **batch: torch.Tensor
    ) -> CausalLMOutput:
        """Return the ``loss`` of a micro-batch: over its supervised tokens, or over those of all
        micro-batches of a step, as Trainer counts them."""
        outputs: Any = self.model(**batch, fused_lm_head=True)
        tokens = num_items_in_batch
        if tokens is None:
            tokens = outputs.label_mask.sum().clamp(min=1)
        return CausalLMOutput(loss=-outputs.log_probs.sum() / tokens)


def trained(model: PeftModel, config: TrialConfig) -> torch.nn.Module:
    """Return what a step calls with a micro-batch, and whose output has its loss."""
    if config.has_head_of_trl:
        return InTrl(model)
    return preference.trained(model, config)
