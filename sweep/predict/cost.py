"""Owns what a fine-tune costs under an offer, item by item, and which offer is the cheapest when.

A step's time is known within an uncertainty, and no order of two bills is claimed inside it. Two
offers of one card share its step: it may be longer or shorter than predicted, but for both alike.
Two cards share nothing that could be relied on: each step may be anywhere in its own interval.

Pure: step times, amounts of work and offers in, bills out. Knows nothing of price files, clocks or
GPUs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from search_spaces.errors import InputError
from search_spaces.prices import Offer

ItemName = Literal["training", "boot", "download", "queue", "preemptions", "rounding", "minimum"]
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Workload:
    """An amount of training.

    Raises:
        InputError: a figure that is not positive.
    """

    steps: int
    """Optimizer steps."""
    samples_per_step: int
    """Sequences per optimizer step: the effective batch."""
    tokens_per_sample: float
    """Tokens of a sequence that carry loss; padding is not among them."""
    dataset_samples: int | None = None
    """Sequences of one epoch; None where no dataset is named."""
    download_bytes: float = 0.0
    """Size of the model that has to arrive before the first step."""

    def __post_init__(self) -> None:
        for key in ("steps", "samples_per_step", "tokens_per_sample", "dataset_samples"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{key} must be greater than 0, got {value!r}")
        if not 0 <= self.download_bytes < math.inf:
            raise InputError(f"download_bytes must be at least 0, got {self.download_bytes!r}")

    @classmethod
    def of_samples(cls, samples: float, *, samples_per_step: int, **rest: Any) -> Self:
        """Return the fewest whole steps that see ``samples`` sequences; the rest as the fields."""
        if not 0 < samples < math.inf:
            raise InputError(f"samples must be greater than 0, got {samples!r}")
        return cls(math.ceil(samples / samples_per_step), samples_per_step, **rest)

    @classmethod
    def of_tokens(cls, tokens: float, *, tokens_per_sample: float, **rest: Any) -> Self:
        """Return the fewest whole steps that see ``tokens`` tokens that carry loss."""
        return cls.of_samples(
            tokens / tokens_per_sample, tokens_per_sample=tokens_per_sample, **rest
        )

    @classmethod
    def of_epochs(cls, epochs: float, *, dataset_samples: int, **rest: Any) -> Self:
        """Return the fewest whole steps that see a dataset ``epochs`` times."""
        return cls.of_samples(epochs * dataset_samples, dataset_samples=dataset_samples, **rest)

    @property
    def samples(self) -> int:
        """Sequences seen."""
        return self.steps * self.samples_per_step

    @property
    def tokens(self) -> float:
        """Tokens seen that carry loss."""
        return self.samples * self.tokens_per_sample


@dataclass(frozen=True)
class BillItem:
    """One line of a bill."""

    name: ItemName
    seconds: float
    usd: float


@dataclass(frozen=True)
class Bill:
    """What a workload costs under an offer. The items' dollars add up to the total."""

    offer: Offer
    workload: Workload
    step_seconds: float
    items: tuple[BillItem, ...]
    uncertainty: float = 0.0
    """Relative, of ``step_seconds``: it is expected within 1 - this and 1 + this times that."""

    def of_step(self, step_seconds: float) -> Bill:
        """Return the bill of the same work if a step took exactly so long."""
        return bill(self.workload, step_seconds=step_seconds, offer=self.offer)

    @property
    def extremes(self) -> tuple[Bill, Bill]:
        """The bills of the shortest and of the longest step that the uncertainty leaves."""
        shortest, longest = (self.of_step(self.step_seconds * end) for end in _ends(self))
        return shortest, longest

    @property
    def usd(self) -> float:
        """Total in dollars."""
        return sum(item.usd for item in self.items)

    @property
    def billed_hours(self) -> float:
        """Hours that are paid for."""
        return self.usd / self.offer.usd_per_hour

    @property
    def wall_hours(self) -> float:
        """Hours from asking for the card to the last step, paid for or not."""
        waited = (item.seconds for item in self.items if item.name not in ("rounding", "minimum"))
        return sum(waited) / SECONDS_PER_HOUR

    @property
    def usd_per_1000_steps(self) -> float:
        """Dollars per 1,000 optimizer steps, everything included."""
        return self.usd / self.workload.steps * 1000.0

    @property
    def usd_per_million_tokens(self) -> float:
        """Dollars per million tokens that carry loss."""
        return self.usd / self.workload.tokens * 1e6

    @property
    def usd_per_sample(self) -> float:
        """Dollars per sequence."""
        return self.usd / self.workload.samples

    @property
    def usd_per_epoch(self) -> float | None:
        """Dollars per pass over the dataset; None where no dataset is named."""
        size = self.workload.dataset_samples
        return None if size is None else self.usd_per_sample * size

    @property
    def dominant(self) -> BillItem:
        """The largest item."""
        return max(self.items, key=lambda item: item.usd)

    def item(self, name: ItemName) -> BillItem:
        """Return the item of that name."""
        return next(item for item in self.items if item.name == name)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "gpu": self.offer.gpu,
            "provider": self.offer.provider,
            "is_spot": self.offer.is_spot,
            "usd_per_hour": self.offer.usd_per_hour,
            "date": self.offer.date.isoformat(),
            "source": self.offer.source,
            "steps": self.workload.steps,
            "step_seconds": self.step_seconds,
            "usd": self.usd,
            "usd_range": [end.usd for end in self.extremes],
            "wall_hours_range": [end.wall_hours for end in self.extremes],
            "billed_hours": self.billed_hours,
            "wall_hours": self.wall_hours,
            "usd_per_1000_steps": self.usd_per_1000_steps,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "usd_per_sample": self.usd_per_sample,
            "usd_per_epoch": self.usd_per_epoch,
            "dominant": self.dominant.name,
            "items": [{"name": i.name, "seconds": i.seconds, "usd": i.usd} for i in self.items],
        }


SHORTEST_SHARE = 0.01
"""A step takes some time, however uncertain its prediction is."""


def _ends(bill: Bill) -> tuple[float, float]:
    """Return the least and the most that a bill's step may take, over what is predicted."""
    return max(SHORTEST_SHARE, 1.0 - bill.uncertainty), 1.0 + bill.uncertainty


def bill(
    workload: Workload, *, step_seconds: float, offer: Offer, uncertainty: float = 0.0
) -> Bill:
    """Return what ``workload`` costs under ``offer``, as one billed session.

    ``uncertainty`` is that of ``step_seconds``, relative. Interruptions are expected values: their
    rate times the training's hours, each costing the offer's restart time. Rounding up to the
    billing unit and the minimum are items of their own.

    Raises:
        InputError: ``step_seconds`` is not positive.
    """
    if not 0 < step_seconds < math.inf:
        raise InputError(f"step_seconds must be greater than 0, got {step_seconds!r}")
    training = workload.steps * step_seconds
    seconds: dict[ItemName, float] = {
        "training": training,
        "boot": offer.boot_seconds,
        "download": _download_seconds(workload, offer),
        "queue": offer.queue_seconds,
        "preemptions": training
        / SECONDS_PER_HOUR
        * offer.preemptions_per_hour
        * offer.restart_seconds,
    }
    used = sum(seconds.values()) - (0.0 if offer.is_queue_billed else offer.queue_seconds)
    rounded = _round_up(used, unit=offer.billing_seconds)
    seconds["rounding"] = rounded - used
    seconds["minimum"] = max(0.0, offer.minimum_seconds - rounded)
    rate = offer.usd_per_hour / SECONDS_PER_HOUR
    unpaid = () if offer.is_queue_billed else ("queue",)
    items = (BillItem(n, s, 0.0 if n in unpaid else s * rate) for n, s in seconds.items())
    return Bill(offer, workload, step_seconds, tuple(items), uncertainty)


def _download_seconds(workload: Workload, offer: Offer) -> float:
    if offer.download_seconds is not None:
        return offer.download_seconds
    if offer.download_bytes_per_second is None:
        return 0.0
    return workload.download_bytes / offer.download_bytes_per_second


def _round_up(seconds: float, *, unit: float) -> float:
    # A sum of floats a hair above a whole number of units is that number of units.
    units = math.ceil(seconds / unit - 1e-9)
    return max(units * unit, seconds)


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
    least = bill.offer.minimum_seconds * bill.offer.usd_per_hour / SECONDS_PER_HOUR
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
