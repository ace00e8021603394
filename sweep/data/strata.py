"""Owns the few micro-batches that stand for a whole epoch in a trial.

An epoch's micro-batches are put in order of their size and divided into strata of an equal number;
one of each is the round that a trial repeats. Of packed rows, all as wide, one stands for all.
Knows nothing of tokens or tensors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sweep.data.epoch import Epoch

STRATA = 4
"""At most, but for what whole optimizer steps ask for."""
_ROUNDS = 8
"""Of exchanges; two or three leave nothing to exchange."""


def representative(epoch: Epoch, *, micro_steps: int) -> list[int]:
    """Return the micro-batches of a round: one of each stratum, a whole number of optimizer steps.

    They are chosen together, so that computed tokens, their squares (attention's work) and
    loss-carrying tokens come to the epoch's mean: where one is too large another makes up for it.
    In an epoch with fewer micro-batches than strata some stand for several.

    Args:
        epoch: whose micro-batches they are; one with fewer rows is none of them.
        micro_steps: micro-batches of an optimizer step.
    """
    whole = len(epoch.rows) // epoch.config.micro_batch_size
    padded, widths, loss = epoch.padded[:whole], epoch.widths[:whole], epoch.loss[:whole]
    is_packed = epoch.config.packing == "packed"
    # Packed rows take as long each; what tells them apart is how many of their tokens carry loss.
    size, strata = (loss, 1) if is_packed else (padded, STRATA)
    by_size = np.lexsort((loss, size))
    features = np.stack([padded, padded * widths, loss], axis=1)[by_size].astype(float)
    count = -(-strata // micro_steps) * micro_steps
    relative = features / np.maximum(features.mean(axis=0), 1e-9)
    return [int(by_size[place]) for place in _balanced(relative, _strata(whole, count))]


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

    A rate is loss-carrying tokens over time, which goes with computed tokens, less with their
    squares, and in part with neither.
    """
    padded, squares, loss = means.T
    parts = [(loss / padded, 1.0), (loss, 0.5), (loss / squares, 0.25)]
    return np.sum([weight * np.square(rate - 1.0) for rate, weight in parts], axis=0)
