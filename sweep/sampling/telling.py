"""Owns which of thousands of trials a model is fitted to: those that say most of what to try next.

What a model costs grows with its trials, of a Gaussian process with their cube, and what it knows
of the best hardly at all. Knows nothing of models, studies or configurations.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

Merits = tuple[float, ...]
"""What a trial reached of each objective, larger being better; empty where it reached nothing."""


def telling(trials: Sequence[T], *, merits: Callable[[T], Merits], most: int) -> list[T]:
    """Return the trials to learn from, in their order: all of them where there are no more than
    ``most``.

    Of more a quarter are the best by each objective and by all together, a quarter the newest. The
    rest are spread over all there are, and stay the same until those have doubled.
    """
    if len(trials) <= most:
        return list(trials)
    quarter = most // 4
    chosen = {*_best([merits(trial) for trial in trials], quarter)}
    chosen |= {*range(len(trials) - quarter, len(trials))}
    stride = 1
    while len(trials) > stride * (most - len(chosen)):
        stride *= 2
    chosen |= {*range(0, len(trials), stride)}
    return [trials[place] for place in sorted(chosen)]


def _best(reached: Sequence[Merits], count: int) -> list[int]:
    """Return the places of so many of the best: of several objectives half of them the front's."""
    places = [place for place, merits in enumerate(reached) if merits]
    objectives = max((len(reached[place]) for place in places), default=0)
    if objectives < 2:
        return heapq.nlargest(count, places, key=lambda place: (reached[place], -place))
    front = _front(places, reached)
    kept = front[:: -(-len(front) // (count // 2))]
    each = (count - len(kept)) // objectives
    for objective in range(objectives):
        kept += heapq.nlargest(each, places, key=lambda place: (reached[place][objective], -place))
    return kept


def _front(places: Sequence[int], reached: Sequence[Merits]) -> list[int]:
    """Return the places of what nothing matches in all objectives and beats in one."""
    kept: list[int] = []
    # In falling order whatever dominates a point comes before it, and what dominates that as well.
    for place in sorted(places, key=lambda place: (reached[place], -place), reverse=True):
        own = reached[place]
        if not any(all(map(float.__ge__, reached[k], own)) for k in kept):
            kept.append(place)
    return kept
