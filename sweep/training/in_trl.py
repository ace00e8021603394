"""The loss of TRL's SFTTrainer, by TRL's own head: logits are never there as a whole."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

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

    def forward(self, **batch: torch.Tensor) -> CausalLMOutput:
        """Return the mean ``loss`` of a micro-batch's supervised tokens."""
        outputs: Any = self.model(**batch, fused_lm_head=True)
        tokens = outputs.label_mask.sum().clamp(min=1)
        return CausalLMOutput(loss=-outputs.log_probs.sum() / tokens)
