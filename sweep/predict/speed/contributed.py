"""What contributed measurements say of a GPU's speed, as a prediction takes it up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
