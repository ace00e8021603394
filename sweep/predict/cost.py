"""Amounts of training, and what they cost: a bill under an offer, and bills beside each other.

A step's time is known within an uncertainty, and no order of two bills is claimed inside it. Two
offers of one GPU share its step: it may be longer or shorter than predicted, but for both alike.
Two GPUs share nothing that could be relied on: each step may be anywhere in its own interval.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, quote
from search_spaces.linears import parameters
from search_spaces.models import ModelSpec
from search_spaces.prices import Offer
from sweep.predict.on_texts import ShapesOnTexts

ItemName = Literal["training", "boot", "download", "queue", "preemptions", "rounding", "minimum"]
SECONDS_PER_HOUR = 3600.0
SHORTEST_SHARE = 0.01
"""A step takes some time, however uncertain its prediction is."""
STEPS = 1000
"""Optimizer steps where nothing else is asked."""
AMOUNT_MAX = 1e15
"""More steps, samples or tokens than this is a slip."""
CHECKPOINT_BYTES = 2
"""Bytes of a parameter as models are published: bf16."""


@dataclass(frozen=True)
class Workload:
    """An amount of training."""

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

    @property
    def samples(self) -> int:
        """Sequences seen."""
        return self.steps * self.samples_per_step

    @property
    def tokens(self) -> float:
        """Tokens seen that carry loss."""
        return self.samples * self.tokens_per_sample


@dataclass(frozen=True)
class AskedWork:
    """How much training is asked about, in one of four ways; 1,000 steps where in none.

    Raises:
        InputError: in more than one way, an amount out of range, or epochs of no dataset.
    """

    train_steps: int | None = None
    samples: int | None = None
    tokens: int | None = None
    dataset_samples: int | None = None
    epochs: float | None = None
    has_texts: bool = False
    """Whether there are texts, of which an epoch is asked about where nothing else is."""

    def __post_init__(self) -> None:
        keys = ("train_steps", "samples", "tokens", "dataset_samples", "epochs")
        typed = {f"--{key.replace('_', '-')}": getattr(self, key) for key in keys}
        for option, value in typed.items():
            if value is not None and not 0 < value <= AMOUNT_MAX:
                raise InputError(
                    f"{option} must be greater than 0 and at most {AMOUNT_MAX:g}, "
                    f"got {quote(value)}"
                )
        amounts = [option for option, value in typed.items() if value is not None]
        given = [option for option in amounts if option != "--epochs"]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} both say how much to train: keep one")
        if self.epochs is not None and self.dataset_samples is None and not self.has_texts:
            raise InputError(
                "--epochs needs --dataset-samples, how many samples an epoch has, or --data"
            )
        if self.epochs is not None and self.has_texts and given:
            raise InputError(f"--epochs is of the texts, and {given[0]} says how much to train")

    def workload(
        self, config: TrialConfig, *, model: ModelSpec, shapes: ShapesOnTexts | None = None
    ) -> Workload:
        """Return the work for ``config``: the fewest whole steps of its effective batch.

        A sample of texts is a row as it is trained on, and its tokens are those that carry loss.
        """
        per_step, per_sample = config.samples_per_step, float(config.seq_len)
        if shapes is not None:
            per_sample = shapes.loss_tokens_per_step(config) / per_step
        epochs = 1.0 if self.epochs is None else self.epochs
        steps = float(self.train_steps or STEPS)
        samples: float | None = self.samples
        if self.tokens is not None:
            samples = self.tokens / per_sample
        elif self.dataset_samples is not None:
            samples = epochs * self.dataset_samples
        elif shapes is not None and self.train_steps is None:
            epoch = shapes.epochs.record(config)
            steps = steps if epoch is None else epochs * epoch.steps
        return Workload(
            steps=math.ceil(steps if samples is None else samples / per_step),
            samples_per_step=per_step,
            tokens_per_sample=per_sample,
            dataset_samples=self.dataset_samples,
            download_bytes=float((parameters(model) or 0) * CHECKPOINT_BYTES),
        )


@dataclass(frozen=True)
class BillItem:
    """One line of a bill."""

    name: ItemName
    seconds: float
    usd: float


@dataclass(frozen=True)
class Bill:
    """What a workload costs under an offer, as one billed session."""

    workload: Workload
    offer: Offer
    step_seconds: float
    uncertainty: float = 0.0
    """Relative, of ``step_seconds``: it is expected within 1 - this and 1 + this times that."""
    cards: int = 1
    """That take each step together: rented for the same time, each at the offer's price."""

    @cached_property
    def items(self) -> tuple[BillItem, ...]:
        """What it is made of; the items' dollars add up to the total.

        Interruptions are expected values: their rate times the training's hours, each costing the
        offer's restart time. Rounding up to the billing unit and the minimum are items of their
        own.
        """
        offer, training = self.offer, self.workload.steps * self.step_seconds
        download = offer.download_seconds
        if download is None:
            rate = offer.download_bytes_per_second
            download = 0.0 if rate is None else self.workload.download_bytes / rate
        hours = training / SECONDS_PER_HOUR
        seconds: dict[ItemName, float] = {
            "training": training,
            "boot": offer.boot_seconds,
            "download": download,
            "queue": offer.queue_seconds,
            "preemptions": hours * offer.preemptions_per_hour * offer.restart_seconds,
        }
        used = sum(seconds.values()) - (0.0 if offer.is_queue_billed else offer.queue_seconds)
        # A sum of floats a hair above a whole number of units is that number of units.
        units = math.ceil(used / offer.billing_seconds - 1e-9)
        rounded = max(units * offer.billing_seconds, used)
        seconds["rounding"] = rounded - used
        seconds["minimum"] = max(0.0, offer.minimum_seconds - rounded)
        usd = self.cards * offer.usd_per_hour / SECONDS_PER_HOUR
        unpaid = () if offer.is_queue_billed else ("queue",)
        return tuple(BillItem(n, s, 0.0 if n in unpaid else s * usd) for n, s in seconds.items())

    @cached_property
    def extremes(self) -> tuple[Bill, Bill]:
        """The bills of the shortest and of the longest step that the uncertainty leaves."""
        shortest, longest = max(SHORTEST_SHARE, 1.0 - self.uncertainty), 1.0 + self.uncertainty
        known = replace(self, uncertainty=0.0)
        return (
            replace(known, step_seconds=self.step_seconds * shortest),
            replace(known, step_seconds=self.step_seconds * longest),
        )

    @property
    def usd(self) -> float:
        """Total in dollars."""
        return sum(item.usd for item in self.items)

    @property
    def billed_hours(self) -> float:
        """Hours that are paid for, of each GPU."""
        return self.usd / self.offer.usd_per_hour / self.cards

    @property
    def wall_hours(self) -> float:
        """Hours from asking for the GPU to the last step, paid for or not."""
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

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        offer = ("gpu", "provider", "is_spot", "usd_per_hour", "source")
        time = ("cards", "step_seconds", "billed_hours", "wall_hours")
        price = ("1000_steps", "million_tokens", "sample", "epoch")
        return {
            **{key: getattr(self.offer, key) for key in offer},
            **{key: getattr(self, key) for key in time},
            **{key: getattr(self, key) for key in (f"usd_per_{unit}" for unit in price)},
            "usd": self.usd,
            "date": self.offer.date.isoformat(),
            "steps": self.workload.steps,
            "usd_range": [end.usd for end in self.extremes],
            "wall_hours_range": [end.wall_hours for end in self.extremes],
            "dominant": self.dominant.name,
            "items": [{"name": i.name, "seconds": i.seconds, "usd": i.usd} for i in self.items],
        }


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
        """The other GPUs' bills that may end as soon; of each GPU the soonest."""
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
    """Yield two bills at the ends of what their steps may take; one GPU's go together."""
    if first.offer.gpu == second.offer.gpu:
        yield from zip(first.extremes, second.extremes, strict=True)
    else:
        yield from itertools.product(first.extremes, second.extremes)


def compare_offers(bills: Sequence[Bill]) -> OfferComparison:
    """Return the bills from cheap to dear, and where the cheapest one would surely not be that.

    Break-evens are of exact costs, minimum charges included; rounding up to billing units blurs
    each by about a unit's worth of training. There is none where one offer is always cheaper, and
    none where the uncertainty of the steps leaves open whether there is one.
    """
    ranked = tuple(sorted(bills, key=_dollars))
    points = [point for other in ranked[1:] for point in _break_evens(ranked[0], other)]
    return OfferComparison(ranked, tuple(sorted(points, key=lambda point: point.samples)))


def _break_evens(cheapest: Bill, other: Bill) -> list[BreakEven]:
    """Return where two bills change places; nothing where any corner knows of other changes."""
    found, *corners = (
        crossings(_cost_line(one), _cost_line(two))
        for one, two in ((cheapest, other), *_corners(cheapest, other))
    )
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


def _cost_line(bill: Bill) -> CostLine:
    usd = {item.name: item.usd for item in bill.items}
    hour = bill.cards * bill.offer.usd_per_hour
    return CostLine(
        fixed=usd["boot"] + usd["download"] + usd["queue"],
        per_unit=(usd["training"] + usd["preemptions"]) / bill.workload.samples,
        least=bill.offer.minimum_seconds * hour / SECONDS_PER_HOUR,
    )


class Crossing(NamedTuple):
    """An amount at which two costs change places."""

    amount: float
    is_first_below: bool
    """Whether the first of the two is the cheaper one for smaller amounts."""


def crossings(first: CostLine, second: CostLine) -> list[Crossing]:
    """Return where two costs change places, by amount; as each bends once, there may be two."""
    amounts = sorted({0.0, first.bend, second.bend, AMOUNT_MAX})
    points = [(amount, first.at(amount) - second.at(amount)) for amount in amounts]
    found, before = [], 0.0
    # Between the bends the gap is straight. Two costs may touch and part without changing places.
    for (start, gap), (end, gap_at_end) in itertools.pairwise(points):
        before = gap or before
        if before * gap_at_end < 0.0:
            root = start + (end - start) * gap / (gap - gap_at_end)
            found.append(Crossing(root, is_first_below=before < 0.0))
    return found
