"""Owns the tokens a trial trains on: full-length random ones, the worst case for memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

_DISTINCT_BATCHES = 3
"""accelerate fetches one batch ahead, but at the end of the loader. With two batches every second
micro-step would have one batch less alive than a training has, and always the same one of a step.
"""


def random_token_loader(
    *, vocab_size: int, micro_batch_size: int, seq_len: int, seed: int, is_pinned: bool = False
) -> DataLoader[Any]:
    """Return a loader of ``{"input_ids", "labels"}`` micro-batches, int64 of shape
    (micro_batch_size, seq_len).

    Every position carries loss: there is no padding. A few distinct batches are enough, since
    neither memory nor speed depends on the values.

    Args:
        vocab_size: token ids stay below it.
        micro_batch_size: rows.
        seq_len: tokens in a row.
        seed: of the tokens.
        is_pinned: whether a card can fetch them while the host goes on.
    """
    rows = np.random.default_rng(seed).integers(
        0, vocab_size, (_DISTINCT_BATCHES * micro_batch_size, seq_len)
    )
    return DataLoader(
        list(torch.from_numpy(rows)),  # type: ignore[arg-type]
        batch_size=micro_batch_size,
        collate_fn=_collate,
        drop_last=True,
        pin_memory=is_pinned,
    )


def _collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.stack(rows)
    return {"input_ids": tokens, "labels": tokens.clone()}


def endless(loader: DataLoader[Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the loader's batches over and over."""
    return itertools.chain.from_iterable(itertools.repeat(loader))
