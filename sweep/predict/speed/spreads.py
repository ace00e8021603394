"""What measured steps say of how far predicted ones may be off: a log-normal model of their ratio.

A step's seconds over the predicted ones are a product: of what its GPU is off by as a whole, of
what its source is (a framework, its versions, a session), of what the step itself is, all as far
as it waits for the GPU, and of its host, as far as it waits for that. Their logarithms are normal,
and the variances are those of restricted maximum likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search_spaces.gpus import SpeedSpread, SpeedSpreads

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


def evidence_of(rows: Sequence[MeasuredStep]) -> SpeedSpreads:
    """Return the spreads that measured steps show, and what each of their GPUs is off by.

    A GPU's shift is its posterior mean: the fewer sources it has, the nearer it is to none.
    """
    ratios = np.array([row.log_ratio for row in rows])
    host = np.array([row.host_share for row in rows])
    device = 1.0 - host
    gpus = np.array([row.gpu for row in rows])
    sources = np.array([f"{row.gpu} {row.source}" for row in rows])
    together = np.outer(device, device)
    shared = np.diag([float(row.is_shared) for row in rows])
    parts = {
        "gpu": together * (gpus[:, None] == gpus),
        "source": together * (sources[:, None] == sources),
        "step": np.diag(device**2),
        "host": np.diag(host**2),
        "shared": shared,
    }
    variances = _variances(ratios, list(parts.values()))
    spreads = dict(zip(parts, np.sqrt(variances).tolist(), strict=True))
    covariance = sum(v * part for v, part in zip(variances, parts.values(), strict=True))
    pulled, known = np.linalg.solve(covariance, ratios), np.linalg.inv(covariance)
    found = {}
    for gpu in sorted(set(gpus.tolist())):
        own = variances[0] * device * (gpus == gpu)
        left = max(0.0, variances[0] - own @ known @ own)
        found[gpu] = {**spreads, "shift": float(own @ pulled), "gpu": float(np.sqrt(left))}
    rounded = {gpu: SpeedSpread(**_rounded(spread)) for gpu, spread in found.items()}
    return SpeedSpreads(others=SpeedSpread(**_rounded(spreads)), gpus=rounded)


def _rounded(spread: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in spread.items()}


def _variances(values: Array, parts: Sequence[Array]) -> Array:
    """Return the variances by which parts of a covariance make values of mean zero likeliest.

    Each update raises the likelihood and leaves a variance positive (Zhou et al. 2019, "MM
    algorithms for variance components models").
    """
    found = np.full(len(parts), np.var(values) / len(parts))
    for _ in range(ROUNDS):
        known = np.linalg.inv(sum(v * part for v, part in zip(found, parts, strict=True)))
        pulled = known @ values
        for at, part in enumerate(parts):
            if part.any():
                found[at] *= np.sqrt((pulled @ part @ pulled) / np.sum(known * part))
    return found
