"""Offers beside each other: which bill is the least, where that changes, and what is sure.

A step's time is known within an uncertainty, and no order of two bills is claimed inside it. Two
offers of one card share its step: it may be longer or shorter than predicted, but for both alike.
Two cards share nothing that could be relied on: each step may be anywhere in its own interval.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from search_spaces.prices import Offer
from sweep.predict.cost import SECONDS_PER_HOUR, Bill


@dataclass(frozen=True)
class BreakEven:
    """An amount of work at which the cheaper of two offers changes, whatever the speeds are."""

    samples: float
    """Sequences at which both cost the same, by the predicted steps."""
    samples_range: tuple[float, float]
    """The least and the most that this may be, inside the uncertainty of the steps."""
    steps: float | None
    """The same in optimizer steps; None where the two have different effective batches."""
    cheaper_below: Offer
    cheaper_above: Offer


@dataclass(frozen=True)
class OfferComparison:
    """Bills of the same work under several offers."""

    bills: tuple[Bill, ...]
    """The cheapest per sequence first."""
    break_evens: tuple[BreakEven, ...]
    """Where the cheapest offer and another one change places for sure, by amount of work."""

    @property
    def cheapest(self) -> Bill:
        """The bill with the least dollars per sequence, by the predicted steps."""
        return self.bills[0]

    @property
    def soonest(self) -> Bill:
        """The bill of the run that ends first, waiting included, by the predicted steps."""
        return min(self.bills, key=_hours)

    @property
    def perhaps_cheapest(self) -> tuple[Bill, ...]:
        """The other bills that the uncertainty of the steps leaves as cheap as the cheapest."""
        return _not_beaten(self.cheapest, self.bills, _dollars)

    @property
    def perhaps_soonest(self) -> tuple[Bill, ...]:
        """The other cards' bills that may end as soon; of each card the soonest."""
        others = {
            bill.offer.gpu: bill
            for bill in sorted(self.bills, key=_hours, reverse=True)
            if bill.offer.gpu != self.soonest.offer.gpu
        }
        return _not_beaten(self.soonest, tuple(others.values()), _hours)


def _dollars(bill: Bill) -> float:
    return bill.usd_per_sample


def _hours(bill: Bill) -> float:
    return bill.wall_hours / bill.workload.samples


def _not_beaten(
    first: Bill, bills: Sequence[Bill], measure: Callable[[Bill], float]
) -> tuple[Bill, ...]:
    return tuple(b for b in bills if b is not first and not is_surely_less(first, b, measure))


def is_surely_less(first: Bill, second: Bill, measure: Callable[[Bill], float] = _dollars) -> bool:
    """Whether a bill is less than another by ``measure`` wherever their steps are in their
    intervals: dollars per sequence where nothing else is asked.
    """
    return all(measure(one) < measure(other) for one, other in _corners(first, second))


def _corners(first: Bill, second: Bill) -> Iterator[tuple[Bill, Bill]]:
    """Yield two bills at the ends of what their steps may take; one card's go together."""
    if first.offer.gpu == second.offer.gpu:
        yield from zip(first.extremes, second.extremes, strict=True)
    else:
        yield from itertools.product(first.extremes, second.extremes)


def compare_offers(bills: Sequence[Bill]) -> OfferComparison:
    """Return the bills from cheap to dear, and where the cheapest one would surely not be that.

    Break-evens are of exact costs, minimum charges included; rounding up to billing units blurs
    each by about a unit's worth of training. There is none where one offer is always cheaper, and
    none where the uncertainty of the steps leaves open whether there is one.

    Raises:
        ValueError: there is no bill.
    """
    if not bills:
        raise ValueError("comparing offers needs at least one bill")
    ranked = tuple(sorted(bills, key=_dollars))
    points = [point for other in ranked[1:] for point in _break_evens(ranked[0], other)]
    return OfferComparison(ranked, tuple(sorted(points, key=lambda point: point.samples)))


def _cost_line(bill: Bill) -> CostLine:
    per_run = ("boot", "download", "queue")
    fixed = sum(item.usd for item in bill.items if item.name in per_run)
    per_work = bill.item("training").usd + bill.item("preemptions").usd
    hour = bill.cards * bill.offer.usd_per_hour
    least = bill.offer.minimum_seconds * hour / SECONDS_PER_HOUR
    return CostLine(fixed, per_work / bill.workload.samples, least)


def _crossings(first: Bill, second: Bill) -> list[Crossing]:
    return crossings(_cost_line(first), _cost_line(second))


def _break_evens(cheapest: Bill, other: Bill) -> list[BreakEven]:
    """Return where two bills change places; nothing where any corner knows of other changes."""
    found = _crossings(cheapest, other)
    corners = [_crossings(*corner) for corner in _corners(cheapest, other)]
    order = [crossing.is_first_below for crossing in found]
    if any([crossing.is_first_below for crossing in corner] != order for corner in corners):
        return []
    points = []
    for crossing, *ends in zip(found, *corners, strict=True):
        bills = (cheapest, other) if crossing.is_first_below else (other, cheapest)
        per_step = {bill.workload.samples_per_step for bill in bills}
        steps = crossing.amount / per_step.pop() if len(per_step) == 1 else None
        amounts = [end.amount for end in ends]
        between = min(amounts), max(amounts)
        points.append(BreakEven(crossing.amount, between, steps, *(b.offer for b in bills)))
    return points


@dataclass(frozen=True)
class CostLine:
    """A cost over an amount of work: a fixed part, a part per unit, and a least charge."""

    fixed: float
    per_unit: float
    least: float = 0.0

    def at(self, amount: float) -> float:
        """Return the cost of ``amount``."""
        return max(self.least, self.fixed + self.per_unit * amount)

    @property
    def bend(self) -> float:
        """Amount from which on the least charge is exceeded."""
        return max(0.0, (self.least - self.fixed) / self.per_unit)


@dataclass(frozen=True)
class Crossing:
    """An amount at which two costs change places."""

    amount: float
    is_first_below: bool
    """Whether the first of the two is the cheaper one for smaller amounts."""


def crossings(first: CostLine, second: CostLine) -> list[Crossing]:
    """Return where two costs change places, by amount; as each bends once, there may be two."""
    edges = sorted({0.0, first.bend, second.bend})
    pieces = zip(edges, [*edges[1:], math.inf], strict=True)
    roots = [root for piece in pieces if (root := _root(first, second, *piece)) is not None]
    probes = [(low + high) / 2 for low, high in zip([0.0, *roots], roots, strict=False)]
    probes.append(2 * roots[-1] if roots else 1.0)
    gaps = [first.at(amount) - second.at(amount) for amount in probes]
    return [
        Crossing(root, is_first_below=gaps[index] < 0)
        for index, root in enumerate(roots)
        # Two costs may touch and part again without changing places.
        if gaps[index] * gaps[index + 1] < 0
    ]


def _root(first: CostLine, second: CostLine, start: float, end: float) -> float | None:
    """Return where both are equal between two bends, ``start`` excluded."""
    probe = end if end < math.inf else start + 1.0
    gap = first.at(start) - second.at(start)
    slope = (first.at(probe) - second.at(probe) - gap) / (probe - start)
    if slope == 0.0:
        return None
    root = start - gap / slope
    return root if start < root <= end and root < math.inf else None
