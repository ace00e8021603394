"""Owns what a candidate is expected to add to the best that a study has found, by its objectives.

Of one objective that is the expected improvement; of several the expected growth of the volume that
the front dominates. Numbers in, numbers out; knows nothing of trials, memory or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search_spaces.space import Objective
from sweep.sampling.belief import Array, Mixture, gain_over
from sweep.sampling.expecting import Foreseen

_SURE = 1e-4
"""Deviation of the logarithm of what is known but for rounding."""
_PREDICTED = 0.01
"""The same of predicted memory."""


@dataclass(frozen=True)
class Goal:
    """What every candidate is expected to reach: the first objective with its uncertainty, the
    others, which are known far better than speed is, as they are predicted."""

    objectives: tuple[Objective, ...]
    """The uncertain one first."""
    order: tuple[int, ...]
    """Where each of them stands among the study's."""
    first: Mixture
    """Logarithm of the uncertain one; more is better."""
    others: Array
    """By candidate and objective; more is better."""
    worst: Array
    """Of each of the others, from which its volume is counted."""

    @classmethod
    def of(
        cls, objectives: Sequence[Objective], *, foreseen: Foreseen, speed: Mixture, rows: int
    ) -> Goal:
        """Return what is expected; speed is the uncertain one wherever it is asked for."""
        order = sorted(range(len(objectives)), key=lambda i: objectives[i] != "tokens_per_second")
        named = tuple(objectives[i] for i in order)
        if named[0] == "tokens_per_second":
            first = speed
        else:
            values = _expected(named[0], foreseen, rows)
            mean = np.log(values) if named[0] != "peak_memory" else -np.log(-values)
            deviation = _PREDICTED if named[0] == "peak_memory" else _SURE
            first = Mixture(np.ones(1), mean[None, :], np.full((1, rows), deviation))
        others = [_expected(name, foreseen, rows) for name in named[1:]]
        columns = np.stack(others, axis=1) if others else np.zeros((rows, 0))
        return cls(named, tuple(order), first, columns, _worst(columns, foreseen, named[1:]))

    def reached(self, values: Sequence[float]) -> tuple[float, Array]:
        """Return a trial's logarithm of the first objective, and its others, more being better."""
        signed = [
            -values[at] if name == "peak_memory" else values[at]
            for name, at in zip(self.objectives, self.order, strict=True)
        ]
        first = -np.log(-signed[0]) if signed[0] < 0 else np.log(max(signed[0], 1e-9))
        return float(first), np.array(signed[1:])


def _expected(name: Objective, foreseen: Foreseen, rows: int) -> Array:
    if name == "peak_memory" and foreseen.peak_bytes is not None:
        return -np.nan_to_num(foreseen.peak_bytes, nan=np.nanmax(foreseen.peak_bytes))
    if name == "trainable_parameters" and foreseen.trainable_parameters is not None:
        return foreseen.trainable_parameters
    # Nothing is known of it, so one is as good as another.
    return -np.ones(rows) if name == "peak_memory" else np.ones(rows)


def _worst(others: Array, foreseen: Foreseen, names: Sequence[Objective]) -> Array:
    worst = others.min(axis=0) if len(others) else np.zeros(len(names))
    for column, name in enumerate(names):
        if name == "peak_memory" and foreseen.budget_bytes is not None:
            worst[column] = -foreseen.budget_bytes
        elif name == "trainable_parameters":
            worst[column] = 0.0
    return worst


def expected_gains(goal: Goal, reached: Sequence[Sequence[float]]) -> tuple[Array, Array]:
    """Return by how much each candidate is expected to better what was reached, relative to it, and
    the probability that it does at all.

    Where nothing was reached yet, the first is what is expected, relative to the most.

    Args:
        goal: what is expected.
        reached: every trial's objectives, in the study's order.
    """
    points = [goal.reached(values) for values in reached]
    if not goal.others.shape[1]:
        return _of_one(goal.first, [first for first, _ in points])
    return _of_several(goal, points)


def _of_one(first: Mixture, reached: Sequence[float]) -> tuple[Array, Array]:
    if not reached:
        return np.exp(first.mean - first.mean.max()), np.ones_like(first.mean)
    return first.gain_over(max(reached)), first.chance_over(max(reached))


def _of_several(goal: Goal, points: Sequence[tuple[float, Array]]) -> tuple[Array, Array]:
    """Return the growth of the dominated volume, relative to the volume there is.

    At the first objective's level u, a candidate adds what of the other objectives' area no point
    of the front that reaches u covers; the volume is the sum of that over the levels.
    """
    ordered = sorted(points, key=lambda point: point[0])
    scale = np.exp(ordered[-1][0] if ordered else goal.first.mean.max())
    own = np.maximum(goal.others - goal.worst, 0.0)
    covered = [np.maximum(others - goal.worst, 0.0) for _, others in ordered]
    levels = [None, *(first for first, _ in ordered)]
    above = [*(_above(goal.first, level) for level in levels), np.zeros(len(own))]
    gains, chances = np.zeros(len(own)), np.zeros(len(own))
    for level in range(len(ordered) + 1):
        area = _uncovered(own, covered[level:])
        gains += (above[level] - above[level + 1]) / scale * area
        reaches = goal.first.chance_over(ordered[level - 1][0]) if level else 1.0
        chances = np.maximum(chances, reaches * (area > 1e-9))
    volume = _volume(
        [(np.exp(first) / scale, c) for (first, _), c in zip(ordered, covered, strict=True)]
    )
    return gains / (volume if volume > 0 else max(gains.max(), 1e-300)), chances


def _above(first: Mixture, level: float | None) -> Array:
    """Return the expected amount by which each is above a level; above nothing without one."""
    if level is None:
        moments = np.exp(first.means + 0.5 * first.deviations**2)
    else:
        pairs = zip(first.means, first.deviations, strict=True)
        moments = np.array([gain_over(mean, sd, level) * np.exp(level) for mean, sd in pairs])
    return np.asarray(first.weights @ moments)


def _uncovered(own: Array, covered: Sequence[Array]) -> Array:
    """Return the area (or length) up to each candidate that no point covers."""
    if own.shape[1] == 1:
        return np.maximum(own[:, 0] - max((c[0] for c in covered), default=0.0), 0.0)
    # Two others: strips of the first, from the widest point to the narrowest.
    left, taken = np.zeros(len(own)), np.zeros(len(own))
    for width, _ in sorted((float(c[0]), float(c[1])) for c in covered):
        height = max(float(c[1]) for c in covered if float(c[0]) >= width)
        strip = np.maximum(np.minimum(own[:, 0], width) - left, 0.0)
        taken += strip * np.minimum(own[:, 1], height)
        left = np.maximum(left, np.minimum(own[:, 0], width))
    return np.maximum(own[:, 0] * own[:, 1] - taken, 0.0)


def _volume(points: Sequence[tuple[float, Array]]) -> float:
    """Return the volume that points dominate, those lowest in the first objective first."""
    total, below = 0.0, 0.0
    for at, (first, _) in enumerate(points):
        rest = np.array([c for _, c in points[at:]])
        area = rest.max(axis=0)[None, :]
        covered = float(np.prod(area) - _uncovered(area, list(rest))[0])
        total, below = total + (first - below) * covered, first
    return total
