"""Owns the few micro-batches that stand for a whole epoch in a trial.

An epoch's micro-batches are put in order of their size and divided into strata of an equal number;
one of each is the round that a trial repeats. Knows nothing of tokens or tensors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sweep.data.epoch import Epoch

STRATA = 4


def representative(epoch: Epoch, *, strata: int = STRATA, micro_steps: int) -> list[int]:
    """Return the micro-batches of a round: one of each stratum, a whole number of optimizer steps.

    Of each stratum that micro-batch is taken which keeps the round's computed tokens, their squares
    (attention's work) and its loss-carrying tokens, all so far, nearest to the strata's means: what
    one is too large the next makes up for. A stratum of an epoch with fewer micro-batches than that
    takes them more than once.

    Args:
        epoch: whose micro-batches they are; those with fewer rows are none of them.
        strata: the least number.
        micro_steps: micro-batches of an optimizer step.
    """
    whole = len(epoch.rows) // epoch.config.micro_batch_size
    padded, widths, loss = epoch.padded[:whole], epoch.widths[:whole], epoch.loss[:whole]
    # Packed rows are all as wide: there the tokens that carry loss tell the strata apart.
    size = loss if epoch.config.packing == "packed" else padded
    by_size = np.lexsort((loss, size))
    features = np.stack([padded, padded * widths, loss], axis=1)[by_size].astype(float)
    count = -(-strata // micro_steps) * micro_steps
    return [int(by_size[place]) for place in _balanced(features, count)]


def _balanced(features: NDArray[np.float64], count: int) -> list[int]:
    """Return one index of each of so many equal strata, the sums held near the strata's."""
    scale = np.maximum(features.mean(axis=0), 1e-9)
    edges = np.linspace(0, len(features), count + 1)
    owed = np.zeros(features.shape[1])
    chosen = []
    for share, first, end in zip(_means(features, edges), edges[:-1], edges[1:], strict=True):
        begin = min(int(first), len(features) - 1)
        stratum = features[begin : max(int(np.ceil(end)), begin + 1)]
        owed = owed + share
        best = int(np.argmin(np.abs((owed - stratum) / scale).sum(axis=1)))
        owed = owed - stratum[best]
        chosen.append(begin + best)
    return chosen


def _means(features: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of each stratum, of which a micro-batch on an edge is a part alone."""
    sums = np.concatenate([np.zeros((1, features.shape[1])), features.cumsum(axis=0)])
    places = np.arange(len(sums))
    at_edges = np.stack([np.interp(edges, places, column) for column in sums.T], axis=1)
    means: NDArray[np.float64] = np.diff(at_edges, axis=0) / np.diff(edges)[:, None]
    return means
