"""Owns the micro-batches of texts on their way to the device: a trial's few, and a training's all.

Runs in a worker alone. Knows nothing of models or steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from search_spaces.config import TrialConfig
from sweep.data.collating import COMPLETIONS, INPUT, SEQ_LENGTHS, collator
from sweep.data.cutting import cut_exactly
from sweep.data.epoch import PACKED_AT_ONCE, Epoch, Integers, epoch
from sweep.data.opening import open_tokens
from sweep.data.request import LENGTHS, LOSS_LENGTHS
from sweep.data.split import split
from sweep.data.strata import representative

if TYPE_CHECKING:
    from datasets import Dataset

LENGTH = "length"
"""The column by which transformers' sampler groups rows of like length."""
_ALIKE = 3
"""Micro-batches of the largest size. accelerate fetches one ahead, so that with fewer of them one
would be alive less than in a training."""

Batch = dict[str, Any]


@dataclass(frozen=True)
class TrialBatches:
    """What a trial on texts trains on: tensors on the host, made once."""

    largest: list[Batch]
    """Micro-batches of the epoch's longest rows: none is larger in any order."""
    round: list[Batch]
    """Micro-batches in equal shares of the epoch by size: a whole number of optimizer steps."""
    loss_tokens: int
    """Of the round, those that carry loss."""
    tokens: int
    """Of the round, without pads."""
    padded_tokens: int
    """Of the round, as computed."""
    epoch: Epoch


def trial_batches(
    directory: Path,
    config: TrialConfig,
    *,
    seed: int,
    eval_fraction: float,
    micro_steps: int | None = None,
    pad_token_id: int = 0,
) -> TrialBatches:
    """Return the micro-batches of a trial on prepared texts.

    Args:
        directory: of the prepared texts.
        config: what trains on them.
        seed: of the epoch's order, and of what is held out.
        eval_fraction: share of the rows that no training sees.
        micro_steps: micro-batches of an optimizer step; None for as many as the configuration says.
        pad_token_id: any token of the model.

    Raises:
        InputError: the texts make no micro-batch of this size.
    """
    rows = open_tokens(directory).with_format("numpy")
    indices, _ = split(len(rows), eval_fraction, seed)
    whole = epoch_of(directory, config, indices=indices, seed=seed)
    chosen = representative(whole, micro_steps=micro_steps or config.accumulation_steps)
    collate = collator(config, pad_token_id)

    def made(places: Iterable[int]) -> list[dict[str, Any]]:
        return [row_of(rows, indices[whole.rows.of(place)], config) for place in places]

    longest = made(map(int, whole.largest_rows))
    return TrialBatches(
        largest=[collate(longest[turn:] + longest[:turn]) for turn in range(_ALIKE)],
        round=[collate(made(whole.rows_of(index))) for index in chosen],
        loss_tokens=int(whole.loss[chosen].sum()),
        tokens=int(whole.filled[chosen].sum()),
        padded_tokens=int(whole.padded[chosen].sum()),
        epoch=whole,
    )


def epoch_of(directory: Path, config: TrialConfig, *, indices: Integers, seed: int) -> Epoch:
    """Return an epoch of some rows of prepared texts, numbered by their place in ``indices``.

    Raises:
        InputError: the texts make no micro-batch of this size.
    """
    lengths, loss_lengths = (
        np.load(directory / name, mmap_mode="r") for name in (LENGTHS, LOSS_LENGTHS)
    )
    _, loss = cut_exactly(directory, lengths, loss_lengths, config.seq_len)
    return epoch(lengths[indices], loss[indices], config, seed=seed, are_cut=True)


def training_rows(
    directory: Path, config: TrialConfig, *, indices: Sequence[int] | Integers, seed: int
) -> Dataset:
    """Return the rows of a training, which `collator` makes into micro-batches.

    Rows are read from the disk as they are asked for. Each has its ``length`` as it is cut or
    packed, by which ``grouped`` is sampled: Trainer's ``group_by_length``. Trainer has to leave all
    columns there (``remove_unused_columns=False``).

    Args:
        directory: of the prepared texts.
        config: what trains on them.
        indices: the rows to train on, by their number in the texts.
        seed: of the order in which they are packed, where they are.

    Raises:
        InputError: the texts make no micro-batch of this size.
    """
    numbers = np.asarray(indices, dtype=np.int64)
    whole = epoch_of(directory, config, indices=numbers, seed=seed)
    kept = np.sort(numbers[whole.rows.documents])
    rows = open_tokens(directory).with_format("numpy")
    if config.packing != "packed":
        lengths = np.minimum(np.load(directory / LENGTHS, mmap_mode="r"), config.seq_len)
        return rows.add_column(LENGTH, lengths).select(kept).with_format("numpy")
    # Imported here, as in `collating`.
    from trl import pack_dataset

    chosen = rows.select(kept)
    packed = pack_dataset(
        chosen, config.seq_len, strategy="bfd", map_kwargs={"batch_size": PACKED_AT_ONCE}
    )
    return packed.with_format("numpy")


def row_of(rows: Dataset, numbers: Integers, config: TrialConfig) -> dict[str, Any]:
    """Return one row of the texts of these numbers, each cut, put behind one another; `collator`
    takes it."""
    texts = [rows[int(number)] for number in numbers]
    columns = [name for name in (INPUT, COMPLETIONS) if name in rows.column_names]
    row: dict[str, Any] = {
        name: np.concatenate([text[name][: config.seq_len] for text in texts]) for name in columns
    }
    if config.packing == "packed":
        row[SEQ_LENGTHS] = [min(len(text[INPUT]), config.seq_len) for text in texts]
    return row
