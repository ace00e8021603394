"""Owns finding how many of ever larger configurations fit, by few predictions and fewer replays.

Knows nothing of spaces or tables. Walking a step for its peak takes a fraction of a millisecond,
replaying it through the allocator some: what the peak alone rules out is never replayed.
"""

from __future__ import annotations

from collections.abc import Callable

from search_spaces.config import TrialConfig
from sweep.planning.forecast import Forecaster
from sweep.predict.memory import Fit


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
