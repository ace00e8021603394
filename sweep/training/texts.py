"""Owns what a trial on texts trains on: its micro-batches, their loaders, what they come to in
tokens, and whether the texts of a packed row are kept apart.

Knows nothing of steps, time or outcomes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from search_spaces.config import TrialConfig
from sweep.data.batches import Batch, TrialBatches, epoch_of, trial_batches
from sweep.data.opening import open_tokens
from sweep.data.split import split

_SEEN = 1e-2
"""Share of the largest activation by which another text's tokens change one that sees them; what
rounding does stays below."""


@dataclass(frozen=True)
class Texts:
    """Prepared texts, and which of them are trained on."""

    directory: Path
    eval_fraction: float
    seed: int
    """Of what is held out."""


@dataclass(frozen=True)
class TextsRound:
    """The micro-batches of a trial on texts.

    Attributes:
        micro_steps: of an optimizer step that are really run.
    """

    config: TrialConfig
    texts: Texts
    batches: TrialBatches
    micro_steps: int

    @classmethod
    def of(cls, texts: Texts, config: TrialConfig, *, micro_steps: int) -> TextsRound:
        """Return what stands for the texts' epoch under a configuration.

        Raises:
            InputError: the texts make no micro-batch of this size.
        """
        batches = trial_batches(
            texts.directory,
            config,
            seed=texts.seed,
            eval_fraction=texts.eval_fraction,
            micro_steps=micro_steps,
        )
        return cls(config, texts, batches, micro_steps)

    @property
    def steps(self) -> int:
        """Optimizer steps of a round."""
        return len(self.batches.round) // self.micro_steps

    @property
    def loss_tokens_per_step(self) -> float:
        """Tokens that carry loss in a whole optimizer step, as a mean of the round."""
        each = self.batches.loss_tokens / len(self.batches.round)
        return each * self.config.accumulation_steps

    @property
    def padding_waste(self) -> float:
        """Share of the epoch's computed tokens that are pads."""
        epoch = self.batches.epoch
        return 1.0 - epoch.tokens / epoch.padded_tokens

    @property
    def texts_in_row(self) -> int:
        """Most texts of any row of the epoch."""
        return int(self.batches.epoch.rows.counts().max())

    @cached_property
    def padded_in_random_order(self) -> int:
        """Tokens that are computed in an epoch of the same rows in no order at all."""
        rows, seed = len(open_tokens(self.texts.directory)), self.texts.seed
        indices, _ = split(rows, self.texts.eval_fraction, seed)
        plain = self.config.model_copy(update={"packing": "none"})
        whole = epoch_of(self.texts.directory, plain, indices=indices, seed=seed)
        return whole.padded_tokens

    @property
    def largest_token(self) -> int:
        """The largest id that any of the micro-batches has."""
        batches = (*self.batches.largest, *self.batches.round)
        return max(int(batch["input_ids"].max()) for batch in batches)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and width of each micro-batch of a round."""
        shapes = (batch["input_ids"].shape for batch in self.batches.round)
        return [(rows, width) for rows, width in shapes]


def loader_of(batches: Sequence[Batch] | Dataset[Batch], *, is_pinned: bool) -> DataLoader[Any]:
    """Return a loader of whole micro-batches, in order.

    Args:
        batches: tensors on the host.
        is_pinned: whether a card can fetch them while the host goes on.
    """
    return DataLoader(
        batches,  # type: ignore[arg-type]
        batch_size=1,
        collate_fn=_only,
        pin_memory=is_pinned,
    )


def _only(batches: list[Batch]) -> Batch:
    (batch,) = batches
    return batch


def are_apart(model: torch.nn.Module, batch: Batch, *, vocab_size: int) -> bool | None:
    """Return whether the texts of a packed row do not see each other; None where no row has two.

    Seen in what they do: with other tokens in the texts before it, a text's activations have to
    stay what they were. So it holds of any attention, and of whatever else mixes tokens.

    Args:
        model: a causal language model, as it trains.
        batch: a packed micro-batch, on the model's device.
        vocab_size: token ids stay below it.
    """
    found = _behind_another(batch["position_ids"])
    if found is None:
        return None
    row, begin, end = found
    other = batch["input_ids"].clone()
    other[row, :begin] = (other[row, :begin] + 1) % vocab_size
    seen = [_activations(model, {**batch, "input_ids": ids}) for ids in (batch["input_ids"], other)]
    one, changed = (activations[row, begin:end].float() for activations in seen)
    return bool((one - changed).abs().max() <= _SEEN * one.abs().max())


def _behind_another(positions: torch.Tensor) -> tuple[int, int, int] | None:
    """Return the row, the first token and the end of a text that another one is before.

    Pads have position 0 each, and are texts of one token by that.
    """
    steps = positions[:, 1:] == positions[:, :-1] + 1
    for row, follows in enumerate(steps.cpu()):
        starts = [0, *(index + 1 for index in torch.nonzero(~follows).flatten().tolist())]
        ends = [*starts[1:], positions.shape[1]]
        whole = [pair for pair in zip(starts, ends, strict=True) if pair[1] - pair[0] > 1]
        if len(whole) > 1:
            return row, *whole[1]
    return None


def _activations(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return what the decoder makes of a micro-batch, of shape (rows, width, hidden)."""
    inside = {key: value for key, value in batch.items() if key != "labels"}
    # The same elements are dropped each time.
    torch.manual_seed(0)
    decoder: Any = getattr(model, "base_model", model)
    result: torch.Tensor = decoder(**inside).last_hidden_state.detach()
    return result


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
