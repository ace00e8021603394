"""Owns whether a model looks ahead: rows of texts are padded for one that does not.

Asked of the model itself, by a forward pass over a few tokens and another in which some of them are
others: what cannot see those stays as it is. Knows nothing of trials.
"""

from __future__ import annotations

from typing import Any

import torch

from search_spaces.errors import InputError
from sweep.data.collating import INPUT

_TEXT = 8
"""Tokens before what is changed, and of what is."""
_MOVED = 0.01
"""Relative change of what a model says of a token, from which on it has seen what was changed.

What has seen nothing is mostly the same to the bit; experts sum in an order that may change, which
is within the rounding of bf16. What looks ahead with random weights moves by 3 % and more.
"""


def check_is_causal(model: torch.nn.Module) -> None:
    """Refuse a model whose tokens see what is behind them: they would see the pads of their row.

    Raises:
        InputError: it looks ahead.
    """
    one, another, first = _texts(model)
    ends, others = ({INPUT: torch.cat([first, end])[None]} for end in (one, another))
    if _moves(model, ends, others, slice(0, _TEXT)):
        kind = getattr(getattr(model, "config", None), "model_type", "this")
        raise InputError(
            f"model type '{kind}' looks ahead: its tokens see the pads behind them, and what "
            "predicts the next token has seen it; train a causal model on texts"
        )


def _texts(model: Any) -> list[torch.Tensor]:
    """Return three texts that differ in every token."""
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    return [(torch.arange(_TEXT) * 3 + shift) % vocabulary for shift in range(3)]


def _moves(model: Any, one: dict[str, Any], other: dict[str, Any], where: slice) -> bool:
    """Whether most of what is said of some tokens is another thing in the one than in the other."""
    first, second = (_said(model, batch)[0, where] for batch in (one, other))
    change = (first - second).norm(dim=-1) / first.norm(dim=-1).clamp_min(1e-12)
    return bool(change.median() > _MOVED)


def _said(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the logits, without gradients, a compiled layer run as it is written."""
    device = model.get_input_embeddings().weight.device
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
    devices = [device] if device.type == "cuda" else []
    # A dropout drops the same in both, and training goes on as if nobody had asked.
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=devices),
        torch.compiler.set_stance("force_eager"),
    ):
        torch.manual_seed(0)
        logits: torch.Tensor = model(**moved).logits
    return logits.float()
