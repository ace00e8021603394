"""Owns what a model sees of a row: whether it looks ahead, and whether packed texts are apart.

Both are asked of the model itself, by a forward pass over a few tokens and another in which some of
them are others: what cannot see those stays as it is. transformers derives the mask of packed rows
from their positions for most architectures and not for all (as of 5.17 not for gpt-oss, falcon,
bloom, mpt and opt), and layers that carry a state from token to token (mamba, linear attention)
carry it from text to text as well. Knows nothing of trials.
"""

from __future__ import annotations

from typing import Any

import torch

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from sweep.data.collating import INPUT, SEQ_LENGTHS, collator

_TEXT = 8
"""Tokens of a text; two make the row."""
_MOVED = 0.01
"""Relative change of what a model says of a token, from which on it has seen what was changed.

What has seen nothing is mostly the same to the bit; experts sum in an order that may change, which
is within the rounding of bf16. What has seen another text of random weights moves by 3 % and more.
"""


def keeps_documents_apart(model: torch.nn.Module, config: TrialConfig) -> bool:
    """Whether no token of a packed row sees another text of it.

    Args:
        model: base or base with adapters, as it trains; it stays as it is.
        config: what it trains by: its attention decides how a row says what is a text.
    """
    if any(getattr(module, "_is_stateful", False) for module in model.modules()):
        return False
    small = config.model_copy(update={"seq_len": 2 * _TEXT, "micro_batch_size": 1})
    collate = collator(small, pad_token_id=0)

    def packed(first: torch.Tensor, second: torch.Tensor) -> dict[str, Any]:
        tokens = torch.cat([first, second])
        batch = collate([{INPUT: tokens.tolist(), SEQ_LENGTHS: [len(first), len(second)]}])
        return {name: value for name, value in batch.items() if name != "labels"}

    one, another, second = _texts(model)
    return not _moves(model, packed(one, second), packed(another, second), slice(_TEXT, None))


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
