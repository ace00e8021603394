"""What contributed measurements say of a GPU's speed, as a prediction takes it up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.sweep.paths import runs_directory
from qlora_sweep.sweep.predict.speed.steps import TERMS

Array = NDArray[np.float64]

DEVICE_SESSION = 0.036
HOST_SESSION = 0.38
"""How far whole sessions are apart beside each step's own: another GPU of the kind, another host,
another day.

By maximum likelihood of the 700 trials of seven recordings on H200s under `tests/data`
(`pytest tests/sweep/predict/test_contributions.py` leaves each out and predicts it). Of the GPU's
part the estimate is 0.014; with seven sessions 0.036 is the upper end of what nineteen in twenty
are below.
"""
_LAUNCH = len(TERMS)
SHARED: Array = np.zeros((len(TERMS) + 2, 2))
"""The log factors that a session moves together: all of the GPU's, and the host's launches.
(factors, shares)"""
SHARED[:_LAUNCH, 0] = 1.0
SHARED[_LAUNCH, 1] = 1.0
SESSION: Array = SHARED @ np.diag([DEVICE_SESSION**2, HOST_SESSION**2]) @ SHARED.T
"""The covariance of the log factors between sessions."""


@dataclass(frozen=True)
class Contributed:
    """What contributions say of one GPU: logarithms of factors, in the order of `FACTORS`."""

    mean: Array
    """Of the factors by which the GPU's terms differ from the catalogue's rates."""
    covariance: Array
    """Of the same, for the kind of GPU."""
    files: int
    trials: int

    @property
    def spread(self) -> Array:
        """The covariance on a machine of which nothing is known."""
        return self.covariance + SESSION


def directory() -> Path:
    """Return where this machine keeps contributions."""
    return runs_directory() / "contributions"


def contributed_speed(gpu: str) -> Contributed | None:
    """Return what this machine's contributions say of a GPU; None where there are none."""
    paths = sorted(directory().glob(f"{gpu}.*.jsonl"))
    if not paths:
        return None
    files = []
    for path in paths:
        files.append((path, path.stat().st_mtime_ns))
    return _fitted(tuple(files))


@lru_cache(maxsize=8)
def _fitted(files: tuple[tuple[Path, int], ...]) -> Contributed | None:
    """Return what files say, which are read again once one has changed."""
    # It predicts with the catalogue's rates alone, by what imports this.
    from qlora_sweep.sweep.predict import contributions

    return contributions.of_files([path for path, _ in files])
