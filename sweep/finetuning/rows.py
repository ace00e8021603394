"""The rows of a training and the order in which they come: prepared texts, or full rows of random
tokens where only speed and memory are wanted.

What a row becomes under a configuration is `sweep.data.batches`' rule, for trials and trainings
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch.utils.data import Dataset, Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from sweep.finetuning.wire import TrainingJob
from sweep.training.step import random_rows, stacked


@dataclass(frozen=True)
class Rows:
    """What a training trains on and what it holds out."""

    training: Any
    """Anything with a length whose items the collator takes."""
    held_out: Any | None
    collate: Callable[[list[Any]], dict[str, torch.Tensor]]
    widths: Sequence[int] | None
    """Tokens of each row; None where all are full."""
    texts: int | None = None
    """Rows of the texts that are trained on, however they are packed; None for random rows."""
    left_out: int = 0
    collate_held_out: Callable[[list[Any]], dict[str, torch.Tensor]] | None = None
    """None for the same."""


class RandomRows(Dataset[torch.Tensor]):
    """Full rows of random tokens, every one of which carries loss: as a trial has them."""

    def __init__(self, rows: torch.Tensor, *, count: int) -> None:
        self._rows, self._count = rows, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index % len(self._rows)]


class EpochOrder(Sampler[int]):
    """The order of an epoch: of its seed and number alone, so that a resumed training has it again.

    The longest row is in the first micro-batch, as Trainer's own order by length has it, and the
    next in the second optimizer step's first, which has the optimizer's state beside it: what does
    not fit shows at once and not after hours.

    Args:
        count: rows.
        batch_size: of them in an optimizer step.
        seed: of all epochs' orders.
        widths: tokens of each row; None where all are alike.
        is_grouped: whether micro-batches hold rows of like length.
    """

    def __init__(
        self,
        count: int,
        *,
        batch_size: int,
        seed: int,
        widths: Sequence[int] | None = None,
        is_grouped: bool = False,
    ) -> None:
        self._count = count
        self._batch_size = batch_size
        self._seed = seed
        self._widths = widths
        self._is_grouped = is_grouped
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; accelerate calls it."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed((self._seed << 16) + self._epoch)
        if self._is_grouped and self._widths is not None:
            widths, size = list(self._widths), self._batch_size
            order = np.asarray(get_length_grouped_indices(widths, size, generator=generator))
        else:
            order = torch.randperm(self._count, generator=generator).numpy()
        if self._widths is not None:
            self._put_widest_first(order, np.asarray(self._widths))
        return iter(order.tolist())

    def _put_widest_first(self, order: NDArray[np.int64], widths: NDArray[np.int64]) -> None:
        for first in (0, self._batch_size):
            if first < len(order):
                widest = first + int(np.argmax(widths[order[first:]]))
                order[[first, widest]] = order[[widest, first]]


def rows_of(job: TrainingJob, model: PeftModel) -> Rows:
    """Return what a job trains a model on.

    Raises:
        InputError: the texts make no micro-batch of the configuration's.
    """
    if job.texts is None:
        count = (job.max_steps or 1) * job.config.samples_per_step
        rows = RandomRows(random_rows(job.config, model, seed=job.seed), count=count)
        return Rows(training=rows, held_out=None, collate=stacked, widths=None)
    # Only texts need `datasets`, which takes a second to import.
    from sweep.finetuning.texts import text_rows

    return text_rows(job)
