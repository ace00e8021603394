"""What measured steps say of how far predicted ones may be off: a log-normal model of their ratio.

A step's seconds over the predicted ones are a product: of what its GPU is off by as a whole, of
what its source is (a framework, its versions, a session), of what the step itself is, all as far
as it waits for the GPU, and of its host, as far as it waits for that. Their logarithms are normal,
and the variances are those of restricted maximum likelihood.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.search_spaces.gpus import SpeedSpread, SpeedSpreads

Array = NDArray[np.float64]

ROUNDS = 100
"""Of the variances' multiplicative updates; they stand still to three digits after some sixty."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was measured, beside what is predicted of it from its GPU's rates alone."""

    gpu: str
    source: str
    log_ratio: float
    """Logarithm of its measured seconds over the predicted ones."""
    host_share: float
    """By how much its log seconds rise with those of the host's launches; the rest is the GPU's."""
    is_shared: bool
    """Whether several GPUs take it."""
    is_on_pairs: bool = False
    """Whether it trains on pairs of completions."""


def evidence_of(rows: Sequence[MeasuredStep]) -> SpeedSpreads:
    """Return the spreads that measured steps show, and what each of their GPUs is off by.

    GPUs are off around one common mean, which is what others are expected to be off by: each counts
    once, however many steps it has. A GPU's shift is its posterior mean: the fewer sources it has,
    the nearer it is to the common one.
    """
    ratios = np.array([row.log_ratio for row in rows])
    host = np.array([row.host_share for row in rows])
    device = 1.0 - host
    gpus = np.array([row.gpu for row in rows])
    sources = np.array([f"{row.gpu} {row.source}" for row in rows])
    together = np.outer(device, device)
    parts = {
        "gpu": together * (gpus[:, None] == gpus),
        "source": together * (sources[:, None] == sources),
        "step": np.diag(device**2),
        "host": np.diag(host**2),
        "shared": np.diag([float(row.is_shared) for row in rows]),
    }
    variances = _variances(ratios, device, list(parts.values()))
    spreads = dict(zip(parts, np.sqrt(variances).tolist(), strict=True))
    known = np.linalg.inv(sum(v * part for v, part in zip(variances, parts.values(), strict=True)))
    mean_variance = 1.0 / (device @ known @ device)
    mean = mean_variance * (device @ known @ ratios)
    pulled = known @ (ratios - mean * device)

    def spread(shift: float, left: float) -> SpeedSpread:
        found = {**spreads, "shift": shift, "gpu": float(np.sqrt(max(0.0, left)))}
        return SpeedSpread(**{name: round(value, 3) for name, value in found.items()})

    found = {}
    for gpu in sorted(set(gpus.tolist())):
        own = variances[0] * device * (gpus == gpu)
        of_mean = (1.0 - own @ known @ device) ** 2 * mean_variance
        left = variances[0] - own @ known @ own + of_mean
        found[gpu] = spread(float(mean + own @ pulled), left)
    return SpeedSpreads(others=spread(float(mean), variances[0] + mean_variance), gpus=found)


def with_pairs(known: SpeedSpreads, rows: Sequence[MeasuredStep]) -> SpeedSpreads:
    """Return the spreads with what steps on pairs are off by beyond them."""
    beyond = []
    for row in rows:
        of, device = known.gpus.get(row.gpu, known.others), 1.0 - row.host_share
        stated = (device * of.device) ** 2 + (row.host_share * of.host) ** 2
        beyond.append((row.log_ratio - device * of.shift) ** 2 - stated)
    pairs = {"pairs": round(math.sqrt(max(0.0, statistics.fmean(beyond))), 3)}
    gpus = {name: of.model_copy(update=pairs) for name, of in known.gpus.items()}
    return SpeedSpreads(others=known.others.model_copy(update=pairs), gpus=gpus)


def _variances(values: Array, mean: Array, parts: Sequence[Array]) -> Array:
    """Return the variances by which parts of a covariance make values likeliest, whatever multiple
    of ``mean`` theirs is.

    Each update raises the likelihood and leaves a variance positive (Zhou et al. 2019, "MM
    algorithms for variance components models").
    """
    found = np.full(len(parts), np.var(values) / len(parts))
    for _ in range(ROUNDS):
        known = np.linalg.inv(sum(v * part for v, part in zip(found, parts, strict=True)))
        of_mean = known @ mean
        known -= np.outer(of_mean, of_mean) / (mean @ of_mean)
        pulled = known @ values
        for at, part in enumerate(parts):
            if part.any():
                found[at] *= np.sqrt((pulled @ part @ pulled) / np.sum(known * part))
    return found
