"""What the lengths of texts say before anything is trained: how they are spread, what a sequence
length cuts off and wastes, and which lengths are worth searching.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.dataset_choice import CUT_MAX
from qlora_sweep.search_spaces.kinds import Method
from qlora_sweep.sweep.data.collation import Truncation
from qlora_sweep.sweep.data.epoch import Integers, cut, epoch, packed

Lengths = NDArray[np.int32]
CutAt = Callable[[int], tuple[Integers, Integers]]

MICRO_BATCH_SIZE = 4
"""Rows of a micro-batch that waste is said for unless another is named: the standard recipe's."""
SHORTEST = 64
"""Tokens of the shortest length that is looked at."""
_QUANTILES = (0.50, 0.90, 0.95, 0.99, 1.0)
_SEED = 0
_BINS_MAX = 16

_SHARES = (0.90, 0.95, 0.99)
"""Of the rows that a length worth searching leaves whole."""
_OUTLIER = 2.0
"""A longest row that is more than so many times as long as 99 in 100 of them sets no length."""
_FINE = 64
_COARSE = 128
_COARSE_FROM = 1024
"""Multiples that lengths are rounded up to, the coarser from so many tokens on."""


def rounded_up(length: int) -> int:
    """Return a length as kernels like it: a multiple of 64, of 128 from 1,024 on."""
    step = _FINE
    if length > _COARSE_FROM:
        step = _COARSE
    return -(-length // step) * step


def worthwhile_lengths(
    lengths: Lengths,
    *,
    max_positions: int | None = None,
    truncation_at: Callable[[int], Truncation] | None = None,
) -> tuple[int, ...]:
    """Return the sequence lengths worth searching for rows of these lengths, in rising order.

    They leave 90, 95, 99 and all of 100 rows whole, rounded up; the last only where the longest
    row is no outlier. Shorter ones, and those that cut off more than `CUT_MAX` of the supervised
    tokens, would be faster in tokens a second for throwing away what is there to be learned; longer
    ones pad. Of none that cuts so little it is the longest.

    Args:
        lengths: tokens of each row, at least one.
        max_positions: of the model, which no length passes; None where that is not known.
        truncation_at: says what a length cuts off them; None where every token but a row's first is
            supervised.
    """
    quantiles = np.quantile(lengths, _SHARES, method="inverted_cdf")
    longest = int(np.max(lengths))
    wanted = quantiles.tolist()
    if longest <= _OUTLIER * wanted[-1]:
        wanted.append(longest)
    limit = max_positions or rounded_up(longest)
    known = sorted({min(rounded_up(value), limit) for value in wanted})
    truncated = truncation_at or partial(_truncation_of_lengths, lengths)
    kept = [length for length in known if truncated(length).supervised_share <= CUT_MAX]
    return tuple(kept or known[-1:])


def _truncation_of_lengths(lengths: Lengths, seq_len: int) -> Truncation:
    """Return what a length cuts off rows of which every token but the first is supervised."""
    supervised = np.asarray(lengths, dtype=np.int64) - 1
    _, left = cut(lengths, supervised, seq_len)
    return Truncation.of(seq_len, lengths=lengths, supervised=supervised, left=left)


def longer_lengths(longest: int, *, above: int, max_positions: int | None) -> list[int]:
    """Return the lengths above one, as kernels like them, in rising order, up to one that leaves
    every row whole or is the model's limit.

    Args:
        longest: tokens of the longest row.
        above: the length that is too short.
        max_positions: of the model; None where that is not known.
    """
    limit = max_positions or rounded_up(longest)
    lengths: list[int] = []
    last = above
    while last < min(limit, longest):
        last = min(rounded_up(last + 1), limit)
        lengths.append(last)
    return lengths


def candidate_lengths(lengths: Lengths, *, max_positions: int | None = None) -> tuple[int, ...]:
    """Return the sequence lengths that are looked at, in rising order.

    Powers of two up to the longest row, quantiles rounded up, and the model's own limit, which none
    of them passes.

    Args:
        lengths: tokens of each row, at least one.
        max_positions: of the model; None where that is not known.
    """
    longest = int(np.max(lengths))
    quantiles = np.quantile(lengths, _QUANTILES, method="inverted_cdf")
    wanted = {rounded_up(int(value)) for value in quantiles}
    power = SHORTEST
    while power < longest:
        wanted.add(power)
        power *= 2
    if max_positions is not None:
        wanted.add(max_positions)
        wanted = {min(length, max_positions) for length in wanted}
    return tuple(sorted(wanted))


@dataclass(frozen=True)
class Waste:
    """What a sequence length does to texts. All but the first are shares, 0 to 1."""

    seq_len: int
    rows_cut: float
    """Of the rows, those that are longer."""
    tokens_cut: float
    """Of the tokens, those behind the cut."""
    supervised_tokens_cut: float
    """Of the supervised tokens, those behind the cut, or of rows that are left out."""
    rows_left_out: float
    """Of the rows, those whose cut leaves no token that carries loss, so that no epoch has them;
    a pair goes as a whole."""
    padding_waste: float
    """Of the tokens that are computed, those that are pads: rows drawn at random, each micro-batch
    padded to its longest row."""
    grouped_waste: float
    """The same where micro-batches hold rows of like length."""
    packed_waste: float | None
    """The same where rows of ``seq_len`` are filled with several texts, best fit decreasing; None
    of pairs, which are never packed."""


def waste_at(
    seq_len: int,
    lengths: Lengths,
    loss_lengths: Lengths,
    *,
    micro_batch_size: int,
    cut_at: CutAt | None = None,
    method: Method = "sft",
) -> Waste | None:
    """Return what a sequence length does to texts; None where it leaves nothing to learn.

    Args:
        seq_len: to which rows are cut.
        lengths: tokens of each row.
        loss_lengths: those of them that carry loss.
        micro_batch_size: rows, or pairs, of a micro-batch, on which it depends what padding wastes;
            all of them where there are fewer.
        cut_at: says what a sequence length leaves of each row, and how much of that carries loss;
            None where the tokens that carry loss are a row's last.
        method: what trains on them; under ``dpo`` each two rows are a pair.
    """
    kept, loss = (cut_at or partial(cut, lengths, loss_lengths))(seq_len)
    each = TrialConfig(method=method).rows_per_sample
    is_left = (loss.reshape(-1, each) > 0).all(1)
    whole = int(np.sum(lengths, dtype=np.int64))
    left = kept.reshape(-1, each)[is_left].ravel()
    if not len(left):
        return None
    lost = Truncation.of(
        seq_len, lengths=lengths, supervised=loss_lengths, left=loss, rows_per_sample=each
    )
    size = min(micro_batch_size, len(left) // each)

    def padded(packing: str) -> float:
        settings = {"seq_len": seq_len, "micro_batch_size": size, "packing": packing}
        config = TrialConfig.model_validate({"method": method} | settings)
        return epoch(lengths, loss, config, seed=_SEED).waste

    packed_waste = None
    if each == 1:
        # Not by an epoch: that may have fewer rows than a micro-batch once they are packed.
        packed_waste = 1.0 - int(left.sum()) / (len(packed(left, seq_len)) * seq_len)
    return Waste(
        seq_len=seq_len,
        rows_cut=float(np.mean(np.asarray(lengths) > seq_len)),
        tokens_cut=1.0 - int(kept.sum()) / whole,
        supervised_tokens_cut=lost.supervised_share,
        rows_left_out=lost.examples_left_out / lost.examples,
        padding_waste=padded("none"),
        grouped_waste=padded("grouped"),
        packed_waste=packed_waste,
    )


@dataclass(frozen=True)
class Bin:
    """Rows of a range of lengths."""

    at_least: int
    at_most: int
    """Tokens, both ends included."""
    rows: int


def histogram(lengths: Lengths) -> tuple[Bin, ...]:
    """Return how many rows there are of each range of lengths, in rising order.

    Ranges are equal powers of two up to where 99 in 100 rows end; the last holds what is longer.
    """
    end = int(np.quantile(lengths, 0.99, method="inverted_cdf"))
    width = 1
    while width * _BINS_MAX < end:
        width *= 2
    longest = int(np.max(lengths))
    count = -(-end // width)
    edges = list(range(1, width * count + 2, width))
    edges.append(max(longest, edges[-1]) + 1)
    rows, _ = np.histogram(lengths, bins=edges)
    bins = [Bin(edges[i], edges[i + 1] - 1, int(rows[i])) for i in range(len(rows))]
    if bins[-1].rows == 0:
        bins.pop()
    return tuple(bins)
