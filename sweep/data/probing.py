"""Owns whether a model looks ahead: rows of texts are padded for one that does not.

Asked of the model itself, by a forward pass over a few tokens and another in which some of them are
others: what cannot see those stays as it is, but for rounding. Knows nothing of trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from search_spaces.errors import InputError
from sweep.data.collating import INPUT

_TEXT = 8
"""Tokens before what is changed, and of what is."""
_AHEAD = 1 / 3
"""Of what is seen of tokens before: what looks ahead sees as much of those behind, and rounding is
far less, though where experts are chosen it may be some percent of what a model says."""


def check_is_causal(model: torch.nn.Module) -> None:
    """Refuse a model whose tokens see what is behind them: they would see the pads of their row.

    Raises:
        InputError: it looks ahead.
    """
    one, another, text = _texts(model)
    ahead = _moved(model, [text, one], [text, another], slice(None, _TEXT))
    back = _moved(model, [one, text], [another, text], slice(_TEXT, None))
    if ahead > _AHEAD * back:
        kind = getattr(getattr(model, "config", None), "model_type", "this")
        raise InputError(
            f"model type '{kind}' looks ahead: its tokens see the pads behind them, and what "
            "predicts the next token has seen it; train a causal model on texts"
        )


def change(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return by how much of its length each vector has changed."""
    return (one - other).norm(dim=-1) / one.norm(dim=-1).clamp_min(1e-12)


def _texts(model: Any) -> list[torch.Tensor]:
    """Return three texts that differ in every token."""
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    return [(torch.arange(_TEXT) * 3 + shift) % vocabulary for shift in range(3)]


def _moved(
    model: Any, one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], where: slice
) -> float:
    """Return how much of what is said of most of some tokens other texts around them change."""
    first, second = (_said(model, {INPUT: torch.cat([*texts])[None]}) for texts in (one, other))
    return float(change(first[0, where], second[0, where]).median())


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
