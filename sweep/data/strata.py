"""The few micro-batches that stand for a whole epoch in a trial.

An epoch's micro-batches are put in order of their size and divided into strata of an equal number;
one of each is the round that a trial repeats. Of packed rows one that is as the mean stands for
all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sweep.data.epoch import Epoch

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
    """Return the micro-batches of a round: one of each stratum, a whole number of optimizer steps.

    They are chosen together, so that computed tokens, attention's work and loss-carrying tokens
    come to the epoch's mean: where one is too large another makes up for it. In an epoch with fewer
    micro-batches than strata some stand for several.

    Args:
        epoch: whose micro-batches they are; one with fewer rows is none of them.
        micro_steps: micro-batches of an optimizer step.
    """
    whole = len(epoch.rows) // epoch.config.micro_batch_size
    padded, loss, attention = epoch.padded[:whole], epoch.loss[:whole], _attention(epoch)[:whole]
    by_size = np.lexsort((loss, attention, padded))
    features = np.stack([padded, attention, loss], axis=1)[by_size].astype(float)
    relative = features / np.maximum(features.mean(axis=0), 1e-9)
    count = -(-_least(epoch, relative) // micro_steps) * micro_steps
    return [int(by_size[place]) for place in _balanced(relative, _strata(whole, count))]


def _attention(epoch: Epoch) -> NDArray[np.float64]:
    """Return what attention costs in each micro-batch, in pairs of tokens without a mask."""
    is_slowed = epoch.masked & (epoch.config.attention == "sdpa")
    return np.asarray(epoch.pairs * np.where(is_slowed, MASKED_COST, 1.0), np.float64)


def _least(epoch: Epoch, features: NDArray[np.float64]) -> int:
    """Return how many micro-batches stand for an epoch at least."""
    if epoch.config.packing != "packed":
        return STRATA
    # Padded rows of other widths run through other kernels; packed ones are all as wide.
    if np.abs(features - 1.0).max(axis=1).min() <= _NEAR:
        return 1
    is_mixed = 0 < np.count_nonzero(epoch.masked[: len(features)]) < len(features)
    return STRATA_MAX if is_mixed else STRATA


def _strata(entries: int, count: int) -> list[slice]:
    """Return equal shares of so many entries, of one at least; what is on an edge is in both."""
    edges = np.linspace(0, entries, count + 1)
    firsts = np.minimum(edges[:-1].astype(int), entries - 1)
    ends = np.maximum(np.ceil(edges[1:]).astype(int), firsts + 1)
    return [slice(int(first), int(end)) for first, end in zip(firsts, ends, strict=True)]


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
    parts = [(loss / padded, 1.0), (loss, 0.5), (loss / attention, 0.25)]
    return np.sum([weight * np.square(rate - 1.0) for rate, weight in parts], axis=0)
