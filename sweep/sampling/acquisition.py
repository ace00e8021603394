"""The acquisition: expected improvement of each candidate over what a study has reached.

Of one objective it is relative to the best so far, of several the expected growth of the volume
that the Pareto front dominates, relative to that volume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from search_spaces.space import Objective
from sweep.sampling.expecting import Array, Foreseen
from sweep.sampling.surrogate import Mixture

GAIN_MAX = 1.0
"""Share by which a trial can be faster than the best so far, at most: where next to nothing is
known, the far end of a distribution would outweigh all that is likely."""
_SURE = 1e-4
"""Standard deviation of the logarithm of what is known but for rounding."""
_PREDICTED = 0.01
"""The same of predicted memory."""


@dataclass(frozen=True)
class Goal:
    """What every candidate is expected to reach of the objectives, larger being better.

    The first is uncertain; the others, at most two, are known far better and taken as predicted.
    """

    first: Mixture
    """Of its logarithm."""
    others: Array
    """By candidate; of an objective that is not there all are equal."""
    worst: Array
    """Of each of the others, from which its volume is counted."""

    @classmethod
    def of(cls, objectives: Sequence[Objective], *, foreseen: Foreseen, speed: Mixture) -> Goal:
        """Return what is expected of objectives in the order of `uncertain_first`."""
        rows = speed.means.shape[1]
        first = speed
        if objectives[0] != "tokens_per_second":
            values = _predicted(objectives[0], foreseen, rows)
            mean, deviation = _log(values), _SURE
            if objectives[0] == "peak_memory":
                deviation = _PREDICTED
            first = Mixture(np.ones(1), mean[None, :], np.full((1, rows), deviation))
        others, worst = np.ones((rows, 2)), np.zeros(2)
        for column, name in enumerate(objectives[1:]):
            others[:, column] = _predicted(name, foreseen, rows)
            if name == "peak_memory":
                budget = foreseen.budget_bytes
                worst[column] = others[:, column].min() if budget is None else -budget
        return cls(first, others, worst)


def uncertain_first(objectives: Sequence[Objective]) -> tuple[Objective, ...]:
    """Return the objectives with speed before all others."""
    return tuple(sorted(objectives, key=lambda name: name != "tokens_per_second"))


def _predicted(name: Objective, foreseen: Foreseen, rows: int) -> Array:
    """Return an objective's predicted values; all equal where nothing is known of it."""
    if name == "peak_memory" and foreseen.peak_bytes is not None:
        return -np.nan_to_num(foreseen.peak_bytes, nan=np.nanmax(foreseen.peak_bytes))
    if name == "trainable_parameters" and foreseen.trainable_parameters is not None:
        return foreseen.trainable_parameters
    return np.full(rows, -1.0 if name == "peak_memory" else 1.0)


def _log(values: Array) -> Array:
    """Return the logarithm of positive values, and what orders negative ones the same way."""
    sizes = np.log(np.maximum(np.abs(values), 1e-9))
    return np.asarray(np.where(values < 0, -sizes, sizes))


def expected_improvement(goal: Goal, reached: Array) -> tuple[Array, Array]:
    """Return by how much each candidate is expected to better what was reached, relative to it, and
    the probability that it does at all.

    At the first objective's level u, a candidate adds what of the other objectives' area no point
    of the front that reaches u covers; the volume is the sum of that over the levels. Where nothing
    was reached yet, the first is what is expected, relative to the most.

    Args:
        goal: what is expected.
        reached: of each trial that counts its objectives, in the goal's order, larger being better.
    """
    own = np.maximum(goal.others - goal.worst, 0.0)
    if not len(reached):
        values = np.exp(goal.first.mean - goal.first.mean.max()) * own.prod(axis=1)
        return values / max(values.max(), 1e-300), (values > 0).astype(float)
    points = np.ones((len(reached), 3))
    points[:, : reached.shape[1]] = reached
    points[:, 0] = _log(points[:, 0])
    points = points[front(points)]
    levels, covered = points[:, 0], np.maximum(points[:, 1:] - goal.worst, 0.0)
    above = _above(goal.first, levels)
    gains, chances, volume, below = np.zeros(len(own)), np.zeros(len(own)), 0.0, 0.0
    for at in range(len(levels) + 1):
        area = _uncovered(own, covered[at:])
        gains += (above[at] - above[at + 1]) * area
        reaches = _chance_over(goal.first, levels[at - 1]) if at else 1.0
        chances = np.maximum(chances, reaches * (area > 1e-9))
        if at < len(levels):
            box, height = covered[at:].max(axis=0), np.exp(levels[at] - levels[-1])
            volume += (height - below) * (box.prod() - _uncovered(box[None, :], covered[at:])[0])
            below = height
    return gains / (volume if volume > 0 else max(gains.max(), 1e-300)), chances


def front(points: Array) -> list[int]:
    """Return the places of points that no other matches in every column, rising in the first."""
    kept: list[int] = []
    # In falling order whatever dominates a point comes before it.
    for place in np.lexsort(points.T[::-1])[::-1].tolist():
        if not (points[kept] >= points[place]).all(axis=1).any():
            kept.append(place)
    return kept[::-1]


def _above(first: Mixture, levels: Array) -> list[Array | float]:
    """Return the expected amount by which each is above nothing, above each of rising levels, and
    above the most that it may be, relative to the last level."""
    top = levels[-1]
    most = _improvement(first, top + math.log1p(GAIN_MAX)) * (1.0 + GAIN_MAX)
    moments = np.exp(np.minimum(first.means - top + 0.5 * first.deviations**2, 50.0))
    amounts = [moments, *(_improvement(first, u) * np.exp(u - top) for u in levels)]
    return [*(np.asarray(first.weights @ (amount - most)) for amount in amounts), 0.0]


def _improvement(first: Mixture, level: float) -> Array:
    """Return E[max(0, value / reference - 1)] of each view, of values whose logarithm is normal."""
    means, deviations = first.means, first.deviations
    edge = (means - level) / deviations
    faster = np.exp(np.minimum(means - level + 0.5 * deviations**2, 50.0)) * ndtr(edge + deviations)
    return np.asarray(np.maximum(faster - ndtr(edge), 0.0))


def _chance_over(first: Mixture, level: float) -> Array:
    return np.asarray(first.weights @ ndtr((first.means - level) / first.deviations))


def _uncovered(own: Array, covered: Array) -> Array:
    """Return the area up to each candidate that no point covers.

    It is taken in strips of the first column, from the narrowest point to the widest.
    """
    left, taken = np.zeros(len(own)), np.zeros(len(own))
    for width in np.sort(covered[:, 0]):
        height = covered[covered[:, 0] >= width, 1].max()
        strip = np.maximum(np.minimum(own[:, 0], width) - left, 0.0)
        taken += strip * np.minimum(own[:, 1], height)
        left = np.maximum(left, np.minimum(own[:, 0], width))
    return np.asarray(np.maximum(own[:, 0] * own[:, 1] - taken, 0.0))


def most_telling(merits: Array, *, most: int) -> list[int]:
    """Return the places of the trials to learn from, in their order: all where there are no more
    than ``most``, and else as many as that.

    A quarter are the best by each objective, up to a quarter the Pareto front, a quarter the
    newest. The rest are spread over all there are, and hardly change from one trial to the next.

    Args:
        merits: by trial and objective, larger being better; minus infinity where nothing was
            reached.
        most: trials that a model is fitted to.
    """
    count, objectives = merits.shape
    if count <= most:
        return list(range(count))
    quarter = most // 4
    best = np.argsort(-merits, axis=0, kind="stable")[: quarter // objectives]
    on_front = front(merits)
    chosen = {*best.ravel().tolist(), *on_front[:: -(-len(on_front) // quarter)]}
    chosen |= {*range(count - quarter, count)}
    # Places that a high power of two divides come first: those are spread evenly, and stay.
    others = sorted({*range(count)} - chosen, key=lambda place: (place & -place or count, place))
    return sorted([*chosen, *others[len(others) - (most - len(chosen)) :]])
