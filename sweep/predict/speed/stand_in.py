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

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.storage.confirmations import noise
from qlora_sweep.storage.records import Measurement
from qlora_sweep.sweep.predict.speed.predictor import StepTimes

Array = NDArray[np.float64]

LEAST = 1e-12
TRANSFERS = 0.24
"""Correlation of a step's own errors on two GPUs.

By 16 differences between steps that two GPUs ran, the same but for the micro-batch, published and
ours: 0.24, with a standard error of 0.25. Single pairs of GPUs say anything from -0.8 to 1; those
of ours with the most in common, four 8-bit steps of an H100 and an H200, 0.84.
`tests/sweep/predict/speed/test_stand_in.py` derives it.
"""


class Took(NamedTuple):
    """A step that was measured on the GPU that stands in."""

    seconds: float
    noise: float
    """Standard deviation of its logarithm."""

    @classmethod
    def of(cls, measured: Measurement) -> Took:
        """Return the step of a trial."""
        return cls(measured.step_seconds, noise([measured]))


@dataclass(frozen=True)
class StandIn:
    """The steps of configurations on the GPU that runs them and on the target, a row each."""

    host: StepTimes | None
    """By the catalogue's rates, not by trials; None of a GPU that the catalogue does not have."""
    target: StepTimes

    @cached_property
    def log_seconds(self) -> Array:
        """Logarithm of what is predicted of each step on the target; that of the median step where
        nothing is. (configurations,)"""
        seconds = self.target.seconds
        return np.asarray(np.log(np.where(np.isnan(seconds), np.nanmedian(seconds), seconds)))

    @cached_property
    def _shared(self) -> Array:
        """Covariance of each step's own errors on the two GPUs. (configurations,)"""
        if self.host is None:
            return np.zeros(len(self.target.seconds))
        return np.nan_to_num(TRANSFERS * self.host.waiting_spread * self.target.waiting_spread)

    def _weights(self, rows: NDArray[np.intp], noise: Array) -> Array:
        if self.host is None:
            return np.zeros(len(rows))
        variance = np.nan_to_num(self.host.own_spread[rows], nan=1.0) ** 2 + noise**2
        return np.asarray(self._shared[rows] / variance)

    def expected_shift(self, noise: float) -> Array:
        """Return how far a trial of each configuration is expected to move the target's log
        seconds: a standard deviation. (configurations,)

        Args:
            noise: relative error of the measured step.
        """
        rows = np.arange(len(self._shared))
        variance = self._weights(rows, np.full(len(rows), noise)) * self._shared
        return np.asarray(np.sqrt(variance))

    def own_spread(self, measured: Mapping[int, Took]) -> Array:
        """Return what is left of the target's `StepTimes.own_spread`. (configurations,)

        Args:
            measured: on the GPU that stands in, by row.
        """
        own = np.array(self.target.own_spread)
        rows, _, noises = _columns(measured)
        weights = self._weights(rows, noises)
        # A single step tells the level of the GPU that stands in, and nothing beside it.
        beside = 1.0 - weights / max(float(weights.sum()), LEAST)
        own[rows] = np.sqrt(own[rows] ** 2 - weights * self._shared[rows] * beside)
        return own

    def corrected(self, measured: Mapping[int, Took]) -> Array:
        """Return `log_seconds`, corrected by what was measured. (configurations,)

        Args:
            measured: on the GPU that stands in, by row.
        """
        seconds = np.array(self.log_seconds)
        if self.host is None or not measured:
            return seconds
        rows, took, noises = _columns(measured)
        weights = self._weights(rows, noises)
        residuals = np.nan_to_num(took - np.log(self.host.seconds[rows]))
        total = weights.sum()
        level = float(weights @ residuals / total) if total > 0.0 else 0.0
        seconds[rows] += weights * (residuals - level)
        return seconds

    def ratio_spread(self, row: int, other: int) -> float:
        """Return how far the ratio of two steps on the target may be off: a logarithm's standard
        deviation."""
        target = self.target
        shared = math.dist(target.common_spreads[row], target.common_spreads[other])
        of_both = math.hypot(shared, target.own_spread[row], target.own_spread[other])
        return min(of_both, math.hypot(target.log_spread[row], target.log_spread[other]))


def _columns(measured: Mapping[int, Took]) -> tuple[NDArray[np.intp], Array, Array]:
    """Return rows, log seconds and noise of what was measured."""
    rows = np.array(list(measured), dtype=np.intp)
    took = np.log([one.seconds for one in measured.values()])
    noises = np.array([one.noise for one in measured.values()])
    return rows, took, noises
