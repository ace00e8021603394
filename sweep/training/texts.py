"""What a trial on texts trains on: its micro-batches, what they come to in tokens, and whether the
texts of a packed row are kept apart."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from search_spaces.config import TrialConfig
from sweep.data.batches import Batch, epoch_of, trial_batches
from sweep.data.collating import IGNORED
from sweep.data.opening import open_tokens
from sweep.data.probing import change
from sweep.data.split import split

_ALIKE = 0.05
"""Relative: a round is as fast as its epoch where as large a share of its tokens carries loss."""
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


@dataclass(frozen=True)
class Texts:
    """Prepared texts, and which of them are trained on."""

    directory: Path
    eval_fraction: float
    seed: int
    """Of what is held out."""


class TextsRound:
    """What stands for the texts' epoch under a configuration: the micro-batches of a trial.

    Args:
        texts: what it trains on.
        config: the configuration.
        micro_steps: of an optimizer step that are really run.

    Raises:
        InputError: the texts make no micro-batch of this size.
    """

    def __init__(self, texts: Texts, config: TrialConfig, *, micro_steps: int) -> None:
        self.texts, self.config = texts, config
        self.batches = made = trial_batches(
            texts.directory,
            config,
            seed=texts.seed,
            eval_fraction=texts.eval_fraction,
            micro_steps=micro_steps,
        )
        whole, count = made.epoch, len(made.round)
        self.steps = count // micro_steps
        """Optimizer steps of a round."""
        self.shapes = [tuple(batch["input_ids"].shape) for batch in made.round]
        """Rows and width of each micro-batch of a round."""
        self.padding_waste = 1.0 - whole.tokens / whole.padded_tokens
        """Share of the epoch's computed tokens that are pads."""
        share = made.loss_tokens / made.padded_tokens
        whole_share = whole.loss_tokens / whole.padded_tokens
        self.is_as_its_epoch = abs(share / whole_share - 1.0) <= _ALIKE
        """Whether as many of the computed tokens carry loss as in the epoch: no few micro-batches
        stand for one in which there are very long ones, and nothing between them and the others."""
        self.pace = 1.0
        """Seconds of a step of the epoch for each of the round's: 1 for a round that is as its
        epoch, else by the tokens that are computed."""
        each = made.loss_tokens / count
        if not self.is_as_its_epoch:
            self.pace = whole.padded_tokens / whole.micro_batches / (made.padded_tokens / count)
            each = whole.loss_tokens / whole.micro_batches
        self.loss_tokens_per_step = each * config.accumulation_steps
        """Tokens that carry loss in a whole optimizer step: a mean of the round, or where that is
        not as its epoch, of the epoch."""

    def padded_in_random_order(self) -> int:
        """Return the tokens that are computed in an epoch of the same rows in no order at all."""
        rows, seed = len(open_tokens(self.texts.directory)), self.texts.seed
        indices, _ = split(rows, self.texts.eval_fraction, seed)
        plain = self.config.model_copy(update={"packing": "none"})
        return epoch_of(self.texts.directory, plain, indices=indices, seed=seed).padded_tokens

    def largest_token(self) -> int:
        """Return the largest id that any of the micro-batches has."""
        batches = (*self.batches.largest, *self.batches.round)
        return max(int(batch["input_ids"].max()) for batch in batches)


def are_apart(model: torch.nn.Module, batch: Batch, *, vocab_size: int) -> bool | None:
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
        vocab_size: token ids stay below it.
    """
    pairs = _neighbours(batch["position_ids"])
    if not pairs:
        return None
    ids = batch["input_ids"]
    before = _mask(ids, [(row, begin, middle) for row, begin, middle, _ in pairs])
    behind = _mask(ids, [(row, middle, end) for row, _, middle, end in pairs])
    heads = [(row, at) for row, begin, middle, _ in pairs for at in (begin, middle)]
    looked = (before | behind) & _mask(ids, [(row, at, at + _LOOKED_AT) for row, at in heads])

    def moved(by: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        others = torch.where(by, (ids + 1) % vocab_size, ids)
        after = _activations(model, {**batch, "input_ids": others}, looked)
        return change(plain, after)[where[looked]]

    plain = _activations(model, batch, looked)
    leaked = moved(before, behind).median().item()
    rounding = moved(behind, before).quantile(_MOST).item()
    # What other tokens in the first of two texts change in the second where they are one text.
    row, begin, middle, end = pairs[0]
    begin, end = max(begin, middle - _SEEN_AT_MOST), min(end, middle + _LOOKED_AT)
    one = ids[row, begin:end][None]
    first = _mask(one, [(0, middle - begin, end - begin)])
    other = torch.where(first, one, (one + 1) % vocab_size)
    # A compiled layer would be compiled for this shape alone.
    with torch.compiler.set_stance("force_eager"):
        said = [_activations(model, {"input_ids": tokens}, first) for tokens in (one, other)]
    seen = change(*said).median().item()
    return leaked <= math.sqrt(max(rounding, _LEAST_ROUNDING * seen) * seen)


def _neighbours(positions: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Return of each row where its first text begins, where the next one does, and where that ends.

    Pads have position 0 each, and are texts of one token by that; they count for none.
    """
    found = []
    for row, follows in enumerate((positions[:, 1:] == positions[:, :-1] + 1).cpu()):
        starts = [0, *(index + 1 for index in torch.nonzero(~follows).flatten().tolist())]
        spans = zip(starts, [*starts[1:], positions.shape[1]], strict=True)
        texts = [(begin, end) for begin, end in spans if end - begin > 1]
        if len(texts) > 1:
            found.append((row, texts[0][0], *texts[1]))
    return found


def _mask(ids: torch.Tensor, spans: Iterable[tuple[int, int, int]]) -> torch.Tensor:
    """Return where the tokens of some spans are, each a row, its first token and its end."""
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, begin, end in spans:
        mask[row, begin:end] = True
    return mask


def _activations(model: torch.nn.Module, batch: Batch, looked: torch.Tensor) -> torch.Tensor:
    """Return what the decoder makes of some tokens of a micro-batch, of shape (tokens, hidden)."""
    inside = {key: value for key, value in batch.items() if key != "labels"}
    decoder: Any = getattr(model, "base_model", model)
    devices = [looked.device] if looked.device.type == "cuda" else []
    # A dropout drops the same in each, and training goes on as if nobody had asked.
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        result: torch.Tensor = decoder(**inside).last_hidden_state.detach()[looked]
    return result.float()


def loss_tokens(batch: Batch) -> int:
    """Return how many supervised tokens a micro-batch has."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def is_packed(config: TrialConfig) -> bool:
    """Whether several texts may share a row."""
    return config.packing == "packed"


def takes_positions(model: torch.nn.Module) -> bool:
    """Whether a model can be told where in its text a token is; without that, no texts share a
    row."""
    parameters = inspect.signature(model.forward).parameters
    return "position_ids" in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
