"""The micro-batches of texts on their way to the device: a trial's few, a training's all, and those
of a training on a budget of tokens with the held-out texts that it is asked about.

Runs in a worker alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.sweep.data import collation
from qlora_sweep.sweep.data.collation import (
    IGNORED,
    INPUT,
    MASK,
    SEQ_LENGTHS,
    Collator,
    by_member,
    split,
)
from qlora_sweep.sweep.data.epoch import (
    Epoch,
    Integers,
    cut_exactly,
    epoch,
    packed,
    representative,
    too_few,
)
from qlora_sweep.sweep.data.prepared_dataset import LENGTHS, LOSS_LENGTHS, TOKENS

if TYPE_CHECKING:
    from datasets import Dataset

_ALIKE = 3
"""Micro-batches of the largest size. accelerate fetches one ahead, so that with fewer of them one
would be alive less than in a training."""
_ALIKE_SHARE = 0.05
"""Relative: a round is as fast as its epoch where as large a share of its tokens carries loss."""

BLOCKS_MAX = 64
"""Of held-out texts: what says how sure their loss is, and no evaluation is slower for it."""

WEIGHT = "weight"
"""Key of a micro-batch for how much its mean loss counts; 1 where there is none."""

Batch = dict[str, Any]


def import_readers() -> None:
    """Import what texts are read and collated by, a second's work of 200 MB that no trial is to
    do: it would be taken from its budget.
    """
    import datasets  # noqa: F401
    from trl.trainer import sft_trainer  # noqa: F401


def open_tokens(directory: Path) -> Dataset:
    """Return the rows of prepared texts, mapped from the disk.

    ``input_ids`` (list of int32) and ``completion_mask`` (list of int8, 1 where a token carries
    loss).

    Raises:
        OSError: they are not there any more.
    """
    # Imported here: pandas comes with it, and without texts a worker opens none.
    from datasets import Dataset, load_from_disk

    dataset = load_from_disk(str(directory / TOKENS), keep_in_memory=False)
    assert isinstance(dataset, Dataset)
    return dataset


@dataclass(frozen=True)
class TokenizedDataset:
    """Prepared texts, and which of them are trained on."""

    directory: Path
    eval_fraction: float
    seed: int
    """Of what is held out."""


@dataclass(frozen=True)
class TrialBatches:
    """What a trial on texts trains on: tensors on the host, made once."""

    dataset: TokenizedDataset
    epoch: Epoch
    largest: list[Batch]
    """Micro-batches of the epoch's longest rows: none is larger in any order."""
    round: list[Batch]
    """One rank's share of micro-batches in equal shares of the epoch by size: a whole number of
    optimizer steps."""
    loss_tokens: int
    """Of all ranks' rounds, those that carry loss."""
    padded_tokens: int
    """Of all ranks' rounds, as computed."""

    @property
    def is_as_its_epoch(self) -> bool:
        """Whether as many of the computed tokens carry loss as in the epoch: no few micro-batches
        stand for one in which there are very long ones, and nothing between them and the others."""
        share = self.loss_tokens / self.padded_tokens
        whole_share = self.epoch.loss_tokens / self.epoch.padded_tokens
        return abs(share / whole_share - 1.0) <= _ALIKE_SHARE

    @property
    def pace(self) -> float:
        """Seconds of a step of the epoch for each of the round's: 1 for a round that is as its
        epoch, else by the tokens that are computed."""
        if self.is_as_its_epoch:
            return 1.0
        whole = self.epoch
        count = len(self.round) * whole.config.data_parallel
        return whole.padded_tokens / whole.micro_batches / (self.padded_tokens / count)

    @property
    def loss_tokens_per_step(self) -> float:
        """Tokens that carry loss in a whole optimizer step: a mean of the round, or where that is
        not as its epoch, of the epoch."""
        config = self.epoch.config
        each = self.loss_tokens / (len(self.round) * config.data_parallel)
        if not self.is_as_its_epoch:
            each = self.epoch.loss_tokens / self.epoch.micro_batches
        return each * config.micro_batches_per_step


def trial_batches(
    dataset: TokenizedDataset, config: TrialConfig, *, micro_steps: int | None = None, rank: int = 0
) -> TrialBatches:
    """Return the micro-batches of a trial on prepared texts.

    Each of the round has the weight with which its mean loss counts, so that the loss of an
    optimizer step is the mean over its supervised tokens, of all ranks together; pairs count alike.

    Args:
        dataset: what it trains on.
        config: what trains on them.
        micro_steps: micro-batches of an optimizer step, of each rank; None for as many as the
            configuration says.
        rank: of those that train together.

    Raises:
        InputError: the texts make no micro-batch of this size.
    """
    rows = open_tokens(dataset.directory).with_format("numpy")
    indices, _ = split(len(rows), dataset.eval_fraction, dataset.seed, config.rows_per_sample)
    whole = trained_epoch(dataset, config)
    micro_steps = micro_steps or config.accumulation_steps
    chosen = representative(whole, micro_steps=micro_steps)
    ranks = config.data_parallel
    if ranks > 1 and config.packing != "grouped":
        # Ranks wait for one another; only where rows are grouped are their micro-batches alike.
        chosen.sort()
    weights = _weights(whole.loss[chosen], of_step=micro_steps * ranks)
    collate = Collator(config)

    def sample(place: int) -> list[dict[str, Any]]:
        """Return a packed row's texts in one row, or a pair's two rows."""
        members = np.split(indices[whole.rows.of(place)], config.rows_per_sample)
        return [row_of(rows, numbers, config) for numbers in members]

    round = []
    for index, weight in zip(chosen[rank::ranks], weights[rank::ranks], strict=True):
        batch = collate(by_member(map(sample, whole.rows_of(index))))
        round.append(_weighted(batch, weight, config))
    longest = [sample(int(place)) for place in whole.largest_rows]
    return TrialBatches(
        dataset=dataset,
        epoch=whole,
        largest=[collate(by_member(longest[at:] + longest[:at])) for at in range(_ALIKE)],
        round=round,
        loss_tokens=int(whole.loss[chosen].sum()),
        padded_tokens=int(whole.padded[chosen].sum()),
    )


def _weighted(batch: Batch, weight: float, config: TrialConfig) -> Batch:
    """Return a micro-batch with how much its mean loss counts; pairs count alike."""
    if config.is_on_pairs:
        return batch
    return {**batch, WEIGHT: weight}


def _weights(tokens: Integers, *, of_step: int) -> list[float]:
    """Return how much the mean loss of each micro-batch counts, by its supervised tokens among
    those of its optimizer step."""
    steps = tokens.reshape(-1, of_step)
    return (steps * of_step / steps.sum(1, keepdims=True)).ravel().tolist()


def trained_epoch(dataset: TokenizedDataset, config: TrialConfig) -> Epoch:
    """Return an epoch of the texts that are trained on.

    Raises:
        InputError: the texts make no micro-batch of this size.
    """
    count = len(np.load(dataset.directory / LENGTHS, mmap_mode="r"))
    indices, _ = split(count, dataset.eval_fraction, dataset.seed, config.rows_per_sample)
    return epoch_of(dataset.directory, config, indices=indices, seed=dataset.seed)


def loss_left(directory: Path, seq_len: int) -> tuple[Integers, Integers]:
    """Return each text's tokens, and how many that carry loss are left of it once it is cut."""
    lengths = np.load(directory / LENGTHS, mmap_mode="r")
    loss = np.load(directory / LOSS_LENGTHS, mmap_mode="r")
    _, left = cut_exactly(directory, lengths, loss, seq_len)
    return lengths, left


def epoch_of(directory: Path, config: TrialConfig, *, indices: Integers, seed: int) -> Epoch:
    """Return an epoch of some rows of prepared texts, numbered by their place in ``indices``.

    Raises:
        InputError: the texts make no micro-batch of this size.
    """
    lengths, loss = loss_left(directory, config.seq_len)
    return epoch(lengths[indices], loss[indices], config, seed=seed)


def training_rows(
    directory: Path, config: TrialConfig, *, indices: Sequence[int] | Integers, seed: int
) -> Dataset:
    """Return the rows of a training, which `Collator` makes into micro-batches.

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
    lengths = np.load(directory / LENGTHS, mmap_mode="r")
    return collation.training_rows(open_tokens(directory), lengths, kept, config)


def row_of(rows: Dataset, numbers: Integers, config: TrialConfig) -> dict[str, Any]:
    """Return one row of the texts of these numbers, each cut, put behind one another; `Collator`
    takes it."""
    ids = []
    masks = []
    for number in numbers:
        text = rows[int(number)]
        ids.append(text[INPUT][: config.seq_len])
        masks.append(text[MASK][: config.seq_len])
    row: dict[str, Any] = {INPUT: np.concatenate(ids), MASK: np.concatenate(masks)}
    if config.packing == "packed":
        row[SEQ_LENGTHS] = list(map(len, ids))
    return row


def loss_tokens(batch: Batch) -> int:
    """Return how many supervised tokens a micro-batch has: not the first of a row."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def in_parts(batch: Batch, count: int, rows_per_sample: int = 1) -> list[Batch]:
    """Return a micro-batch in so many parts, or in as many as it has samples; of pairs all that
    were chosen come first."""
    samples = len(batch["input_ids"]) // rows_per_sample
    if samples == 1:
        return [batch]
    size = -(-samples // count)
    parts: list[Batch] = []
    for first in range(0, samples, size):
        part: Batch = {}
        for key, values in batch.items():
            # (members, samples, of each, ...): a row of tokens, or the patches of its image.
            by_kind = values.unflatten(0, (rows_per_sample, samples, -1))
            part[key] = by_kind[:, first : first + size].flatten(0, 2)
        parts.append(part)
    return parts


class QualityBatches:
    """One rank's micro-batches of a training on so many supervised tokens, in whole optimizer
    steps.

    Each of texts has the weight with which its mean loss counts: by its supervised tokens, as
    Trainer counts them over an accumulation.

    Raises:
        InputError: no text carries loss.
    """

    def __init__(
        self,
        dataset: TokenizedDataset,
        config: TrialConfig,
        *,
        tokens: int,
        seed: int,
        rank: int = 0,
    ) -> None:
        lengths, loss = _of_samples(dataset, config)
        self.config = config
        self.rows = _rows(dataset, config, lengths, loss, tokens=tokens, seed=seed)
        """Numbers of the texts in each row, or of the pair."""
        of_rows = np.array([loss[row].sum() for row in self.rows], dtype=np.int64)
        self.tokens = of_rows.reshape(-1, config.micro_batch_size).sum(1)
        """Supervised tokens of each micro-batch, of all ranks."""
        self._weights = _weights(self.tokens, of_step=config.micro_batches_per_step)
        self._places = range(rank, len(self.tokens), config.data_parallel)
        self._tokenized = open_tokens(dataset.directory).with_format("numpy")
        self._collate = Collator(config)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Batch:
        """Return a micro-batch."""
        place = self._places[index]
        size = self.config.micro_batch_size
        samples = self.rows[place * size : (place + 1) * size]
        batch = _collated(self._tokenized, samples, self.config, self._collate)
        return _weighted(batch, self._weights[place], self.config)


def _of_samples(dataset: TokenizedDataset, config: TrialConfig) -> tuple[Integers, Integers]:
    """Return the tokens of each text and those left that carry loss; of a pair the longer row's,
    and both rows' together, or none where one has none."""
    lengths, loss = loss_left(dataset.directory, config.seq_len)
    each = config.rows_per_sample
    if each == 1:
        return lengths, loss
    # (pairs, members)
    loss = loss.reshape(-1, each)
    return lengths.reshape(-1, each).max(1), np.where((loss == 0).any(1), 0, loss.sum(1))


def _collated(
    rows: Dataset, samples: Iterable[Any], config: TrialConfig, collate: Collator
) -> Batch:
    """Return a micro-batch of the texts of these numbers, each sample's in a row, or of pairs."""
    each = config.rows_per_sample
    made = []
    for sample in samples:
        numbers = np.atleast_1d(sample) * each
        made.append([row_of(rows, numbers + member, config) for member in range(each)])
    return collate(by_member(made))


def _rows(
    dataset: TokenizedDataset,
    config: TrialConfig,
    lengths: Integers,
    loss: Integers,
    *,
    tokens: int,
    seed: int,
) -> list[Integers]:
    """Return the rows of so many optimizer steps as have the budget's tokens."""
    size = config.samples_per_step
    wanted = tokens
    if config.packing == "packed":
        # The last step is a whole one: of packed rows, whose texts are not known before, one more.
        wanted += size * config.seq_len
    train, _ = split(len(loss), dataset.eval_fraction, dataset.seed)
    if not np.any(loss[train] > 0):
        raise InputError(str(too_few(0, config)))
    # The first texts that have so many, a multiple of `size`: in one order for all configurations,
    # one epoch after another.
    random = np.random.default_rng(seed)
    numbers: list[int] = []
    have = 0
    while have < wanted or len(numbers) % size:
        for number in random.permutation(train):
            if have >= wanted and len(numbers) % size == 0:
                break
            if loss[number] > 0:
                numbers.append(int(number))
                have += int(loss[number])
    chosen = np.array(numbers, dtype=np.int64)
    if config.packing == "grouped":
        of_dataset = config.changed(method="sft")
        whole = epoch(lengths[chosen], loss[chosen], of_dataset, seed=seed)
        return [chosen[whole.rows.of(row)] for row in range(len(chosen))]
    if config.packing != "packed":
        return list(chosen[:, None])
    rows = packed(lengths[chosen], config.seq_len)
    shuffled = [chosen[rows[row]] for row in np.random.default_rng(seed).permutation(len(rows))]
    # The fewest rows of whole optimizer steps that have the tokens, or all of them.
    sums = np.cumsum([int(loss[row].sum()) for row in shuffled])
    reached = int(np.searchsorted(sums, tokens)) + 1
    return shuffled[: min(-(-reached // size), len(shuffled) // size) * size]


def held_out_batches(
    dataset: TokenizedDataset, config: TrialConfig, *, tokens: int, tokens_at_once: int
) -> Iterator[tuple[int, Batch]]:
    """Yield held-out texts as micro-batches of like length, each with the number of its block:
    blocks of as many texts, drawn at random and the same for every configuration.

    Args:
        dataset: of which some are held out.
        config: to which seq_len they are cut; neither packed nor compiled.
        tokens: supervised ones that are looked at; all there are where those are fewer.
        tokens_at_once: of a micro-batch with its pads at most, unless one text has more.

    Raises:
        InputError: there is none with a token that carries loss.
    """
    lengths, loss = _of_samples(dataset, config)
    _, held = split(len(loss), dataset.eval_fraction, dataset.seed)
    order = np.random.default_rng(dataset.seed).permutation(held)
    order = order[loss[order] > 0]
    if not len(order):
        raise InputError(
            "no text with a token that carries loss is held out; take a larger eval_fraction"
        )
    chosen = order[: np.searchsorted(np.cumsum(loss[order]), tokens) + 1]
    kept = np.minimum(lengths, config.seq_len).astype(np.int64)
    rows = open_tokens(dataset.directory).with_format("numpy")
    collate = Collator(config)
    tokens_at_once //= config.rows_per_sample
    for number, block in enumerate(np.array_split(chosen, min(BLOCKS_MAX, len(chosen)))):
        left = block[np.lexsort((block, -kept[block]))].tolist()
        while left:
            count = max(1, tokens_at_once // int(kept[left[0]]))
            yield number, _collated(rows, left[:count], config, collate)
            del left[:count]
