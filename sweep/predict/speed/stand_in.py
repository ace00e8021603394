"""What steps that were measured on a GPU that stands in say of the same steps on the target.

A prediction is off by what the GPU is off by as a whole, which is each GPU's own: factors fitted to
a study's steps on an H200 leave the published steps of six other GPUs no better predicted. It is
also off by what is the step's own. Of that the part that waits for the GPU may be the same on
another one, as the same kernels run there; the part that waits for the host's launches says nothing
of a slower GPU, which seldom waits for them.

So a step's own errors on the two GPUs are taken as normal with a correlation of `TRANSFERS` as far
as both steps wait for their GPU, and what is expected of the target's, given what was measured, is
a linear regression: it shrinks by the noise of the measurement and by the share of the step that
the host holds up. What all measured steps are off by in common is left out, as the level of the
GPU that stands in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweep.predict.speed.predictor import StepTimes

Array = NDArray[np.float64]

TRANSFERS = 0.2
"""Correlation of a step's own errors on two GPUs.

By 16 differences between steps that were measured on two GPUs each (of one source, published or
ours, the same but for the micro-batch): 0.2, with a standard error of 0.25. Six of ours on an H100
and an H200 alone say 0.8, those on GPUs of other generations nothing that is told from 0.
`tests/sweep/predict/speed/test_stand_in.py` derives it.
"""


@dataclass(frozen=True)
class StandIn:
    """The steps of configurations on the GPU that runs them and on the target, a row each."""

    host: StepTimes
    target: StepTimes

    @cached_property
    def _shared(self) -> Array:
        """Covariance of each step's own errors on the two GPUs. (configurations,)"""
        return np.nan_to_num(TRANSFERS * self.host.waiting_spread * self.target.waiting_spread)

    def _weights(self, rows: NDArray[np.intp], noise: Array) -> Array:
        variance = np.nan_to_num(self.host.own_spread[rows], nan=1.0) ** 2 + noise**2
        return np.asarray(self._shared[rows] / variance)

    def told_spread(self, noise: float) -> Array:
        """Return how far a trial of each configuration is expected to move the target's log
        seconds: a standard deviation. (configurations,)

        Args:
            noise: relative error of the measured step.
        """
        rows = np.arange(len(self._shared))
        told = self._weights(rows, np.full(len(rows), noise)) * self._shared
        return np.asarray(np.sqrt(told))

    def left_spread(self, rows: NDArray[np.intp], noise: Array) -> Array:
        """Return what is left of the target's `own_spread` after some rows were measured."""
        own = self.target.own_spread[rows] ** 2
        return np.asarray(np.sqrt(own - self._weights(rows, noise) * self._shared[rows]))

    def log_corrections(
        self, rows: NDArray[np.intp], log_seconds: Array, noise: Array
    ) -> Array:
        """Return what is added to the target's log seconds of the rows that were measured.

        Args:
            rows: of the configurations.
            log_seconds: of each one's step on the GPU that stands in.
            noise: standard deviation of each.
        """
        weights = self._weights(rows, noise)
        residuals = np.nan_to_num(log_seconds - np.log(self.host.seconds[rows]))
        total = weights.sum()
        level = float(weights @ residuals / total) if total > 0.0 else 0.0
        return np.asarray(weights * (residuals - level))
