"""Owns finding how many of ever larger configurations fit, by few predictions and fewer replays.

Knows nothing of spaces, tables or speeds. Walking a step for its peak takes a fraction of what
replaying it through the allocator does: what the peak alone rules out is never replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from search_spaces.config import TrialConfig
from sweep.planning.forecast import Forecaster
from sweep.predict.memory.predictor import Fit


@dataclass(frozen=True)
class SettledRow:
    """Valid configurations that differ in their micro-batch alone, and how many of them fit."""

    configurations: Sequence[TrialConfig]
    """The smallest micro-batch first."""
    sure: int
    """How many of the first ones fit surely."""
    possible: int
    """How many of the first ones fit surely or perhaps."""


def settle_row(
    configurations: Sequence[TrialConfig], *, forecaster: Forecaster, near: int
) -> SettledRow:
    """Return how much of a row fits; arguments as those of `settle`."""
    count, at = len(configurations), configurations.__getitem__
    return SettledRow(configurations, *settle(count, at, forecaster=forecaster, near=near))


def settle(
    count: int,
    configuration: Callable[[int], TrialConfig],
    *,
    forecaster: Forecaster,
    near: int = 1,
) -> tuple[int, int]:
    """Return how many of ``count`` valid configurations fit surely, and how many at least perhaps.

    Args:
        count: how many there are.
        configuration: returns the one at an index; a later one never needs less memory.
        forecaster: tells what fits.
        near: a guess of how many fit at least perhaps; a good one saves predictions.
    """
    hopeful = boundary(count, lambda n: not forecaster.is_hopeless(configuration(n - 1)), near=near)

    def fit(number: int) -> Fit:
        return forecaster.fit(configuration(number - 1))

    # Most of what the peak does not rule out fits.
    possible = boundary(hopeful, lambda n: fit(n) is not Fit.NO, near=hopeful)
    return boundary(possible, lambda n: fit(n) is Fit.YES, near=possible), possible


def boundary(count: int, holds: Callable[[int], bool], *, near: int) -> int:
    """Return the last of 1..``count`` up to which ``holds``; 0 where it does not hold for 1.

    What holds for a number must hold for every smaller one. It is asked around ``near`` first, in
    growing steps, so that a good guess costs two questions and a bad one a logarithmic number.
    """
    low, high = 0, count + 1
    probe, step = near, 1
    while low < probe < high:
        if holds(probe):
            low, probe = probe, probe + step
        else:
            high, probe = probe, probe - step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
