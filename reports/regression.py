"""Owns a linear fit that says what it can tell and what it cannot. Pure numbers.

Ordinary least squares by the singular value decomposition: columns may depend on each other, and a
contrast of coefficients is then told only where the observations determine it (Searle, "Linear
models", ch. 5: estimable functions). Knows nothing of trials or settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Vector = NDArray[np.float64]
_SAME = 1e-8
"""Relative: what of a contrast may lie outside of what was observed, by rounding alone."""


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class LinearFit:
    """A fit of observations by columns."""

    coefficients: Vector
    directions: Vector
    """What the observations determine: one orthonormal row for each singular value kept."""
    singular: Vector
    deviation: float
    """Standard deviation of what is left of an observation; 0 without a degree of freedom."""
    degrees: int
    """Observations less what they determine."""

    @classmethod
    def of(cls, columns: Vector, values: Vector) -> LinearFit:
        """Fit ``values`` (n) by ``columns`` (n x k); an intercept is a column like any other."""
        left, singular, right = np.linalg.svd(columns, full_matrices=False)
        kept = singular > singular.max(initial=0.0) * max(columns.shape) * np.finfo(float).eps
        left, singular, right = left[:, kept], singular[kept], right[kept]
        coefficients = right.T @ ((left.T @ values) / singular)
        degrees = len(values) - int(kept.sum())
        residual = values - columns @ coefficients
        deviation = math.sqrt(float(residual @ residual) / degrees) if degrees else 0.0
        return cls(coefficients, right, singular, deviation, degrees)

    def tells(self, contrast: Vector) -> bool:
        """Whether the observations determine a sum of coefficients."""
        return bool(np.linalg.norm(self._outside(contrast)) <= _SAME * np.linalg.norm(contrast))

    def estimate(self, contrast: Vector) -> Estimate:
        """Return a sum of coefficients with Student's interval.

        Raises:
            ValueError: the observations do not determine it, or leave no degree of freedom.
        """
        if not self.tells(contrast) or not self.degrees:
            raise ValueError("the observations do not tell this contrast")
        value = float(contrast @ self.coefficients)
        spread = float(np.linalg.norm(self.directions @ contrast / self.singular))
        half = student(self.degrees) * self.deviation * spread
        return Estimate(value, value - half, value + half)

    def entangled(self, contrast: Vector) -> tuple[int, ...]:
        """Return the columns that a contrast cannot be told apart from, the most tied first."""
        shares = np.abs(self._outside(contrast))
        order = sorted(range(len(shares)), key=lambda column: (-shares[column], column))
        return tuple(column for column in order if shares[column] > _SAME)

    def _outside(self, contrast: Vector) -> Vector:
        inside = self.directions.T @ (self.directions @ contrast)
        return np.asarray(contrast - inside, dtype=float)


def student(degrees: int) -> float:
    """Return Student's t at 97.5 %."""
    return float(stdtrit(degrees, 0.975))


def mean_estimate(values: Sequence[float], *, least_half: float = 0.0) -> Estimate:
    """Return the mean of at least two values with Student's interval.

    Args:
        values: independent of each other.
        least_half: half of an interval that is known to be no narrower.
    """
    known = np.asarray(values, dtype=float)
    mean = float(known.mean())
    spread = float(known.std(ddof=1)) / math.sqrt(len(known))
    half = max(student(len(known) - 1) * spread, least_half)
    return Estimate(mean, mean - half, mean + half)
