"""An epoch of texts: which rows are in it, and the micro-batches that a configuration makes.

The one rule for trials, trainings and predictions, in numpy alone:

- A row longer than ``seq_len`` is cut on the right; one that has no token left that carries loss is
  left out.
- A token carries loss where it is predicted: never the first of its document, which nothing comes
  before, and with completions alone only a completion's. So a plain row of n tokens carries n - 1.
- A micro-batch is padded on the right to its longest row; under ``compile`` to a multiple of a
  quarter of ``seq_len``, and the epoch's last one to as many rows as the others, so that there are
  at most four static shapes.
- ``grouped`` sorts by length within large draws, as transformers' length-grouped sampler does;
  ``packed`` fills rows of ``seq_len`` with whole documents, best fit decreasing, as TRL does.

Imports no torch.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.sweep.data.collation import MASK, is_flattened, padded_widths, rows_of_samples

Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]

DIFFERENCES = "differences.npy"
"""Of prepared pairs: the first token in which each one's rows differ. Two rows are a pair."""
PACKED_AT_ONCE = 1000
"""Rows that are packed with one another: what `datasets` maps at once, and so TRL packs."""
_DRAWS_AT_ONCE_MAX = 50
"""Effective batches that transformers draws before it sorts them by length; a quarter of an epoch
where that is less."""


def cut(lengths: ArrayLike, loss_lengths: ArrayLike, seq_len: int) -> tuple[Integers, Integers]:
    """Return each row's tokens and loss-carrying tokens once it is cut on the right.

    Exact where the tokens that carry loss are a row's last: plain texts, a completion behind its
    prompt. Of a chat with several answers it is the least that can be left.

    Args:
        lengths: tokens of each row.
        loss_lengths: those of them that carry loss.
        seq_len: tokens that are left of a longer row.
    """
    whole = np.asarray(lengths, dtype=np.int64)
    kept = np.minimum(whole, seq_len)
    loss = np.asarray(loss_lengths, dtype=np.int64) - (whole - kept)
    return kept, np.clip(loss, 0, np.maximum(kept - 1, 0))


def cut_exactly(
    directory: Path, lengths: ArrayLike, loss_lengths: ArrayLike, seq_len: int
) -> tuple[Integers, Integers]:
    """Return what `cut` does, to the token: where a row has tokens without loss, and is cut, its
    mask is looked at, mapped from the disk.

    Args:
        directory: of the prepared dataset.
        lengths: tokens of each of its rows, all of them.
        loss_lengths: those that carry loss.
        seq_len: tokens that are left of a longer row.

    Raises:
        OSError: the tokens are not there any more.
    """
    kept, loss = cut(lengths, loss_lengths, seq_len)
    if (directory / DIFFERENCES).exists():
        # A pair that is cut before it differs teaches nothing.
        loss[np.repeat(np.load(directory / DIFFERENCES) >= seq_len, 2)] = 0
        return kept, loss
    whole = np.asarray(lengths)
    is_open = (whole > seq_len) & (np.asarray(loss_lengths) < whole - 1)
    if not is_open.any():
        return kept, loss
    first = 0
    for offsets, mask in _masks(directory / "tokens"):
        rows = np.flatnonzero(is_open[first : first + len(offsets) - 1])
        begins = offsets[rows]
        sums = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        # The first token of a row is not predicted, whatever its mask says.
        loss[first + rows] = sums[begins + seq_len] - sums[begins + 1]
        first += len(offsets) - 1
    return kept, loss


def _masks(tokens: Path) -> Iterator[tuple[Integers, NDArray[Any]]]:
    """Yield where each row begins and the masks behind one another, a thousand rows at a time."""
    import pyarrow

    state = json.loads((tokens / "state.json").read_text(encoding="utf-8"))
    for file in state["_data_files"]:
        with pyarrow.memory_map(str(tokens / file["filename"])) as source:
            for batch in pyarrow.ipc.open_stream(source):
                column = batch.column(MASK)
                offsets = np.asarray(column.offsets, dtype=np.int64)
                yield offsets - offsets[0], np.asarray(column.flatten())


@dataclass(frozen=True)
class Shape:
    """Rows of a micro-batch and the tokens to which each is padded."""

    rows: int
    width: int

    @property
    def tokens(self) -> int:
        """Computed tokens, pads among them."""
        return self.rows * self.width


@dataclass(frozen=True)
class EpochRows:
    """The rows that go through, each a text or several that are packed into it; or pairs."""

    documents: Integers = field(repr=False)
    """Numbers of the texts, row after row."""
    starts: Integers = field(repr=False)
    """Where in `documents` each row begins."""

    def __len__(self) -> int:
        return len(self.starts)

    def counts(self) -> Integers:
        """Return how many texts are in each row."""
        return np.diff(self.starts, append=len(self.documents))

    def of(self, row: int) -> Integers:
        """Return the texts of a row."""
        if row + 1 == len(self.starts):
            return self.documents[self.starts[row] :]
        return self.documents[self.starts[row] : self.starts[row + 1]]

    def sums(self, values: Integers) -> Integers:
        """Return each row's sum of a value of its texts."""
        return np.add.reduceat(values[self.documents], self.starts)


@dataclass(frozen=True)
class Epoch:
    """One pass over texts in one order, micro-batch by micro-batch.

    Arrays have an entry for each micro-batch, in the epoch's order; the last may have fewer rows.
    """

    config: TrialConfig
    rows: EpochRows
    """In the epoch's order."""
    starts: Integers = field(repr=False)
    """The row with which each micro-batch begins."""
    widths: Integers = field(repr=False)
    """Tokens to which the rows of a micro-batch are padded; flattened, those of all its rows."""
    padded: Integers = field(repr=False)
    """Tokens that are computed, pads among them."""
    filled: Integers = field(repr=False)
    """Tokens of texts."""
    loss: Integers = field(repr=False)
    """Tokens that carry loss."""
    pairs: Integers = field(repr=False)
    """Pairs of tokens that attention looks at: of each row's width; flattened, of each text's."""
    masked: Mask = field(repr=False)
    """Whether a mask keeps texts apart: not where no row has two, and not with flash attention."""
    largest_rows: Integers = field(repr=False)
    """The rows of the largest micro-batch, by their place in the epoch's order."""
    largest: Shape
    """The largest micro-batch that any order of this epoch can have."""
    rows_cut: int
    rows_left_out: int
    """For want of a token that carries loss."""

    @property
    def is_masked(self) -> bool:
        """Whether any of the micro-batches is."""
        return bool(self.masked.any())

    @property
    def tokens(self) -> int:
        """Tokens of texts in the whole epoch, without pads."""
        return int(self.filled.sum())

    @property
    def loss_tokens(self) -> int:
        """Tokens that carry loss in the whole epoch."""
        return int(self.loss.sum())

    @property
    def padded_tokens(self) -> int:
        """Tokens that are computed in the whole epoch, pads among them."""
        return int(self.padded.sum())

    @property
    def waste(self) -> float:
        """Share of the computed tokens that are pads."""
        return 1.0 - self.tokens / self.padded_tokens

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the epoch."""
        return len(self.widths)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the epoch; the last may have fewer micro-batches."""
        return -(-self.micro_batches // self.config.micro_batches_per_step)

    def rows_of(self, micro_batch: int) -> range:
        """Return the rows of a micro-batch, by their place in the epoch's order."""
        first = int(self.starts[micro_batch])
        return range(first, min(first + self.config.micro_batch_size, len(self.rows)))


def epoch(lengths: ArrayLike, loss_lengths: ArrayLike, config: TrialConfig, *, seed: int) -> Epoch:
    """Return an epoch of texts under a configuration.

    Args:
        lengths: tokens of each row.
        loss_lengths: those of them that carry loss once it is cut.
        config: what trains on them.
        seed: of the order.

    Raises:
        InputError: no row carries loss, or there are fewer rows than a micro-batch has.
    """
    whole = np.asarray(lengths, dtype=np.int64)
    kept = np.minimum(whole, config.seq_len)
    loss = np.minimum(np.asarray(loss_lengths, dtype=np.int64), np.maximum(kept - 1, 0))
    each = config.rows_per_sample
    chosen = np.flatnonzero((loss.reshape(-1, each) > 0).all(1))
    sizes = kept.reshape(-1, each).max(1)
    rows = _rows(chosen, sizes[chosen], config, seed=seed)
    refusal = too_few(len(rows), config)
    if refusal is not None:
        raise InputError(refusal)
    row_lengths = rows.sums(sizes)
    if each > 1:
        rows = EpochRows(rows_of_samples(rows.documents, each), rows.starts * each)
    starts = np.arange(0, len(rows), config.micro_batch_size)
    # transformers finds several texts in a packed row, its pads among them. Such rows are all as
    # wide, and the mask that keeps texts apart is what costs memory.
    masked = (rows.counts() > 1) | (row_lengths < config.seq_len)
    masked &= config.packing == "packed" and not is_flattened(config)
    largest_rows = np.lexsort((-row_lengths, ~masked))[: config.micro_batch_size]
    largest = row_lengths[largest_rows]
    # (micro-batches)
    filled = np.add.reduceat(rows.sums(kept), starts)
    if is_flattened(config):
        widths = padded_widths(np.add.reduceat(row_lengths, starts), config)
        padded = widths
        pairs = np.add.reduceat(rows.sums(kept**2), starts)
        largest_shape = Shape(rows=1, width=int(padded_widths(largest.sum(), config)))
    else:
        widths = padded_widths(np.maximum.reduceat(row_lengths, starts), config)
        counts = np.diff(starts, append=len(rows))
        if config.compile and each == 1:
            counts[-1] = config.micro_batch_size
        padded = widths * counts * each
        pairs = padded * widths
        width = int(padded_widths(largest.max(), config))
        largest_shape = Shape(rows=len(largest) * each, width=width)
    return Epoch(
        config=config,
        rows=rows,
        starts=starts,
        widths=widths,
        padded=padded,
        filled=filled,
        loss=np.add.reduceat(rows.sums(loss), starts),
        pairs=pairs,
        masked=np.logical_or.reduceat(masked, starts),
        largest_rows=largest_rows,
        largest=largest_shape,
        rows_cut=int((whole.reshape(-1, each)[chosen].max(1) > config.seq_len).sum()),
        rows_left_out=len(sizes) - len(chosen),
    )


def too_few(rows: int, config: TrialConfig) -> str | None:
    """Return why so many rows that carry loss make no micro-batch of each GPU; None where they
    do."""
    if rows >= config.micro_batch_size * config.data_parallel:
        return None
    if rows == 0:
        return (
            f"no row of the texts has a token that carries loss at seq_len {config.seq_len}: take "
            "a longer seq_len, or let prompts carry loss too"
        )
    row = "rows"
    if rows == 1:
        row = "row"
    kind = f"{row} to train on"
    if config.packing == "packed":
        kind = f"packed {row}"
    gpus = ""
    if config.data_parallel > 1:
        gpus = f" on each of {config.data_parallel} GPUs"
    return (
        f"micro_batch_size is {config.micro_batch_size}{gpus} and the texts make {rows:,} {kind} "
        f"at seq_len {config.seq_len}: take a smaller micro_batch_size"
    )


def _rows(chosen: Integers, lengths: Integers, config: TrialConfig, *, seed: int) -> EpochRows:
    """Return the rows in the order of the epoch, where texts are numbered by ``chosen``."""
    random = np.random.default_rng(seed)
    if config.packing == "packed" and len(chosen):
        members = packed(lengths, config.seq_len)
        ordered = [members[index] for index in random.permutation(len(members))]
        counts = np.fromiter(map(len, ordered), dtype=np.int64)
        return EpochRows(chosen[np.concatenate(ordered)], np.cumsum(counts) - counts)
    order = random.permutation(len(chosen))
    if config.packing == "grouped" and len(chosen):
        order = _grouped(order, lengths, config.samples_per_step)
    return EpochRows(chosen[order], np.arange(len(order)))


def _grouped(order: Integers, lengths: Integers, batch: int) -> Integers:
    """Sort draws of many batches by length, as transformers' `get_length_grouped_indices` does."""
    draws = max(1, min(len(order) // (batch * 4), _DRAWS_AT_ONCE_MAX)) * batch
    parts = []
    for first in range(0, len(order), draws):
        part = order[first : first + draws]
        parts.append(part[np.argsort(-lengths[part], kind="stable")])
    # The longest row of all goes first, so that a lack of memory shows at once.
    longest = int(np.argmax([lengths[part[0]] for part in parts]))
    swapped = parts[0][0]
    parts[0][0] = parts[longest][0]
    parts[longest][0] = swapped
    return np.concatenate(parts)


def packed(lengths: ArrayLike, seq_len: int) -> list[Integers]:
    """Return the documents of each packed row: best fit decreasing, a thousand rows at a time.

    As TRL's ``pack_dataset(strategy="bfd")`` packs rows that are cut to ``seq_len``.

    Args:
        lengths: tokens of each document, at least 1.
        seq_len: tokens of a packed row.
    """
    kept = np.minimum(np.asarray(lengths, dtype=np.int64), seq_len)
    rows: list[Integers] = []
    for first in range(0, len(kept), PACKED_AT_ONCE):
        members = _best_fit(kept[first : first + PACKED_AT_ONCE], seq_len)
        rows += [np.asarray(row, dtype=np.int64) + first for row in members]
    return rows


def _best_fit(lengths: Integers, seq_len: int) -> list[list[int]]:
    rows: list[list[int]] = []
    spaces: list[tuple[int, int, int]] = []
    """Of rows that are not full: the space, since when it is that, the row; smallest and oldest
    first."""
    order = np.argsort(-lengths, kind="stable").tolist()
    for turn, document in enumerate(order):
        length = int(lengths[document])
        place = bisect.bisect_left(spaces, (length, -1, -1))
        if place == len(spaces):
            space = seq_len
            row = len(rows)
            rows.append([])
        else:
            space, _, row = spaces.pop(place)
        rows[row].append(document)
        if space > length:
            bisect.insort(spaces, (space - length, turn, row))
    return rows


# The few micro-batches that stand for a whole epoch in a trial

STRATA = 4
STRATA_MAX = 8
"""Of packed rows that a mask makes slow or not: nothing lies between. Whole optimizer steps may ask
for more."""
MASKED_COST = 3.0
"""Times that attention takes under the mask that keeps packed texts apart: 2.8 to 3.1 at 4,096
tokens on an H200 (tests/bench/results/masked_attention.json)."""
_NEAR = 0.01
"""Relative: a micro-batch of packed rows that is so near to the epoch's mean stands for all."""
_ROUNDS = 8
"""Of exchanges; two or three leave nothing to exchange."""


def representative(epoch: Epoch, *, micro_steps: int) -> list[int]:
    """Return the micro-batches of a round by size: one of each stratum, a whole number of optimizer
    steps, and so many for each rank.

    They are chosen together, so that computed tokens, attention's work and loss-carrying tokens
    come to the epoch's mean: where one is too large another makes up for it. In an epoch with fewer
    micro-batches than strata some stand for several.

    Args:
        epoch: whose micro-batches they are; one with fewer rows is none of them.
        micro_steps: micro-batches of an optimizer step, of each rank.
    """
    config = epoch.config
    whole = len(epoch.rows) // config.micro_batch_size
    slowed = epoch.masked & (config.attention == "sdpa")
    attention = (epoch.pairs * np.where(slowed, MASKED_COST, 1.0))[:whole]
    padded = epoch.padded[:whole]
    loss = epoch.loss[:whole]
    # (micro-batches), and (micro-batches, features)
    by_size = np.lexsort((loss, attention, padded))
    features = np.stack([padded, attention, loss], axis=1)[by_size].astype(float)
    relative = features / np.maximum(features.mean(axis=0), 1e-9)
    count = STRATA
    if config.packing == "packed":
        # Padded rows of other widths run through other kernels; packed ones are all as wide.
        if np.abs(relative - 1.0).max(axis=1).min() <= _NEAR:
            count = 1
        elif 0 < np.count_nonzero(epoch.masked[:whole]) < whole:
            count = STRATA_MAX
    count = -(-count // micro_steps) * micro_steps * config.data_parallel
    # Equal shares, of one at least; a micro-batch on an edge is in both.
    edges = np.linspace(0, whole, count + 1)
    firsts = np.minimum(edges[:-1].astype(int), whole - 1)
    ends = np.maximum(np.ceil(edges[1:]).astype(int), firsts + 1)
    strata = [slice(int(first), int(end)) for first, end in zip(firsts, ends, strict=True)]
    return [int(by_size[place]) for place in _balanced(relative, strata)]


def _balanced(features: NDArray[np.float64], strata: list[slice]) -> list[int]:
    """Return one index of each stratum, so that each feature's mean over them is near one.

    From each stratum's middle on, one after another is exchanged for what serves the sum best.
    """
    chosen = [(stratum.start + stratum.stop) // 2 for stratum in strata]
    for _ in range(_ROUNDS):
        before = list(chosen)
        for turn, stratum in enumerate(strata):
            others = features[chosen].sum(axis=0) - features[chosen[turn]]
            means = (others + features[stratum]) / len(strata)
            chosen[turn] = stratum.start + int(np.argmin(_misses(means)))
        if chosen == before:
            break
    return chosen


def _misses(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how far off the rates are that rounds of such means would show.

    A rate is loss-carrying tokens over time, which goes with computed tokens, less with attention's
    work, and in part with neither.
    """
    padded, attention, loss = means.T
    by_tokens = np.square(loss / padded - 1.0)
    by_neither = np.square(loss - 1.0)
    by_attention = np.square(loss / attention - 1.0)
    misses: NDArray[np.float64] = by_tokens + 0.5 * by_neither + 0.25 * by_attention
    return misses
