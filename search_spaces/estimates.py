"""A number that is known within an interval."""

from __future__ import annotations

import math
from typing import NamedTuple


class Estimate(NamedTuple):
    """A number with the ends of the interval that it is expected within."""

    value: float
    low: float
    high: float

    def over(self, other: Estimate) -> Estimate:
        """Return how many times another, independent number this is.

        Its ends hold the ratio as often as the two numbers' own ends hold them: in logarithms
        their distances add up as the sides of a right triangle do.
        """
        value = self.value / other.value
        less = math.hypot(math.log(self.value / self.low), math.log(other.high / other.value))
        more = math.hypot(math.log(self.high / self.value), math.log(other.value / other.low))
        return Estimate(value, value * math.exp(-less), value * math.exp(more))

    def holds(self, number: float) -> bool:
        """Return whether a number is within the interval."""
        return self.low <= number <= self.high

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the most that it is expected to be."""
        return self.low, self.high
