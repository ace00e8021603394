"""What a model sees of a row: tokens that are behind, or another text that is packed with it.

Asked of the model itself, by a forward pass over some tokens and another in which some of them are
others: what cannot see those stays as it is, but for rounding.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from qlora_sweep.search_spaces.errors import InputError

_TEXT = 8
"""Tokens before what is changed, and of what is."""
_AHEAD = 1 / 3
"""Of what is seen of tokens before: what looks ahead sees as much of those behind, and rounding is
far less, though where experts are chosen it may be some percent of what a model says."""
_LOOKED_AT = 16
"""First tokens of a text: there another one shows most, as they have few of their own before them,
and the one right before it is all that a window or a state may still know."""
_SEEN_AT_MOST = 256
"""Tokens of the text before, where it is looked at what they do to one that sees them."""
_LEAST_ROUNDING = 1e-6
"""Share of what is seen that rounding is taken for at least: of most models it is nothing at all,
and then whatever is more than a thousandth of what is seen is a leak."""
_MOST = 0.9
"""Of the tokens that rounding may have changed: it changes some of them, and some not at all."""


def check_is_causal(model: torch.nn.Module) -> None:
    """Refuse a model whose tokens see what is behind them: they would see the pads of their row.

    Raises:
        InputError: it looks ahead.
    """
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    device = embeddings.weight.device
    size = int(embeddings.num_embeddings)
    # Not those at the ends of the vocabulary, where pads are: RoBERTa counts positions without.
    tokens = size // 2 + torch.arange(_TEXT) * 3
    one = tokens % size
    another = (tokens + 1) % size
    text = (tokens + 2) % size

    def said(*texts: torch.Tensor) -> torch.Tensor:
        # A compiled layer runs as it is written.
        with torch.no_grad(), _dropping_alike(device), torch.compiler.set_stance("force_eager"):
            logits: torch.Tensor = model(input_ids=torch.cat(texts)[None].to(device)).logits
        return logits[0].float()

    ahead = change(said(text, one)[:_TEXT], said(text, another)[:_TEXT]).median()
    back = change(said(one, text)[_TEXT:], said(another, text)[_TEXT:]).median()
    if ahead > _AHEAD * back:
        kind = getattr(getattr(model, "config", None), "model_type", "this")
        raise InputError(
            f"model type '{kind}' looks ahead: its tokens see the pads behind them, and what "
            "predicts the next token has seen it; train a causal model on texts"
        )


def change(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return by how much of its length each vector has changed."""
    return (one - other).norm(dim=-1) / one.norm(dim=-1).clamp_min(1e-12)


@contextlib.contextmanager
def _dropping_alike(device: torch.device) -> Iterator[None]:
    """Let dropouts drop the same each time, and leave the training's random state as it is."""
    devices = []
    if device.type == "cuda":
        devices.append(device)
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        yield


def are_apart(model: Any, batch: dict[str, Any]) -> bool | None:
    """Return whether the texts of a packed row do not see each other; None where no row has two.

    Seen in what they do, so that it holds of any attention and of whatever else mixes tokens: with
    other tokens in the text before it, what the decoder makes of a text has to stay what it was.
    It does not to the bit: other tokens go to other experts, whose sums are rounded otherwise, and
    a rounding may choose another expert for a token. So that change is set against two more, of
    this model at this precision: what others change in a text *before* them, which is rounding
    alone, and what they change where both are one text and so seen. Nearer to the first, by
    factors, is apart.

    Args:
        model: a causal language model, as it trains.
        batch: a packed micro-batch, on the model's device.
    """
    vocab_size = int(model.get_input_embeddings().num_embeddings)
    pairs = _neighbours(batch["position_ids"])
    if not pairs:
        return None
    ids = batch["input_ids"]
    # (rows, tokens)
    before = torch.zeros_like(ids, dtype=torch.bool)
    behind = torch.zeros_like(ids, dtype=torch.bool)
    looked = torch.zeros_like(ids, dtype=torch.bool)
    for row, begin, middle, end in pairs:
        before[row, begin:middle] = True
        behind[row, middle:end] = True
        looked[row, begin : min(begin + _LOOKED_AT, end)] = True
        looked[row, middle : min(middle + _LOOKED_AT, end)] = True

    def moved(by: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        others = torch.where(by, (ids + 1) % vocab_size, ids)
        after = _activations(model, {**batch, "input_ids": others}, looked)
        return change(plain, after)[where[looked]]

    plain = _activations(model, batch, looked)
    leaked = moved(before, behind).median().item()
    rounding = moved(behind, before).quantile(_MOST).item()
    # What other tokens in the first of two texts change in the second where they are one text.
    row, begin, middle, end = pairs[0]
    begin = max(begin, middle - _SEEN_AT_MOST)
    end = min(end, middle + _LOOKED_AT)
    one = ids[row, begin:end][None]
    second = torch.zeros_like(one, dtype=torch.bool)
    second[0, middle - begin :] = True
    other = torch.where(second, one, (one + 1) % vocab_size)
    # A compiled layer would be compiled for this shape alone.
    with torch.compiler.set_stance("force_eager"):
        of_one = _activations(model, {"input_ids": one}, second)
        of_other = _activations(model, {"input_ids": other}, second)
    seen = change(of_one, of_other).median().item()
    return leaked <= math.sqrt(max(rounding, _LEAST_ROUNDING * seen) * seen)


def _neighbours(positions: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Return of each row where its first text begins, where the next one does, and where that ends.

    Pads have position 0 each, and are texts of one token by that; they count for none.
    """
    neighbours = []
    for row, follows in enumerate((positions[:, 1:] == positions[:, :-1] + 1).cpu()):
        edges = (torch.nonzero(~follows).flatten() + 1).tolist()
        edges = [0] + edges + [positions.shape[1]]
        texts = [(begin, end) for begin, end in pairwise(edges) if end - begin > 1]
        if len(texts) > 1:
            neighbours.append((row, texts[0][0], texts[1][0], texts[1][1]))
    return neighbours


def _activations(model: Any, batch: dict[str, Any], looked: torch.Tensor) -> torch.Tensor:
    """Return what the decoder makes of some tokens of a micro-batch, of shape (tokens, hidden)."""
    inside = {key: value for key, value in batch.items() if key != "labels"}
    decoder = getattr(model, "base_model", model)
    with _dropping_alike(looked.device):
        result: torch.Tensor = decoder(**inside).last_hidden_state.detach()[looked]
    return result.float()


def takes_positions(model: torch.nn.Module) -> bool:
    """Whether a model can be told where in its text a token is; without that, no texts share a
    row."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in parameters)
