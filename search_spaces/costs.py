"""What a training costs: an amount of work, its bill under an offer, and several bills compared.

A step's time lies between two ends, as do a bill and the ratio of two. No order is claimed where
that ratio's ends have 1 between them. Two offers of one GPU share its step: it may be longer or
shorter than predicted, but for both alike. The steps of two GPUs are taken as independent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple, TypeVar

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError, quote
from qlora_sweep.search_spaces.estimates import Estimate
from qlora_sweep.search_spaces.linears import parameters
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.prices import Offer

T = TypeVar("T")
ItemName = Literal["training", "boot", "download", "queue", "preemptions", "rounding", "minimum"]
SECONDS_PER_HOUR = 3600.0
SHORTEST_SHARE = 0.01
"""A step takes some time, however uncertain its prediction is."""
STEPS = 1000
"""Optimizer steps where nothing else is asked."""
AMOUNT_MAX = 1e15
"""More steps, samples or tokens than this is a slip."""


def checkpoint_bytes(model: ModelSpec) -> float:
    """Return the size of a model as it is published, in 16 bits a parameter."""
    return 2.0 * (parameters(model) or 0)


def usd_per_hour(offer: Offer, gpus: int = 1) -> float:
    """Return dollars an hour of the whole machines that ``gpus`` GPUs take."""
    return -(-gpus // offer.gpus) * offer.gpus * offer.usd_per_hour


def usd_per_training_second(offer: Offer, gpus: int = 1) -> float:
    """Return dollars of one more second of training, with the interruptions that it brings."""
    interrupted = offer.preemptions_per_hour * offer.restart_seconds / SECONDS_PER_HOUR
    return usd_per_hour(offer, gpus) / SECONDS_PER_HOUR * (1.0 + interrupted)


def usd_per_million_tokens(offer: Offer, gpus: int, tokens_per_second: float) -> float:
    """Return what a million tokens cost while it trains: what comes before is in a bill alone."""
    return 1e6 * usd_per_training_second(offer, gpus) / tokens_per_second


def ties(ranked: Sequence[T], ratio: Callable[[T, T], Estimate | None]) -> tuple[T, ...]:
    """Return the first of what is ranked by a prediction, and all that is statistically
    indistinguishable from it: the ends of their ratio have 1 between them, or are not known."""
    tied = list(ranked[:1])
    for other in ranked[1:]:
        times = ratio(ranked[0], other)
        if times is None or times.low <= 1.0 <= times.high:
            tied.append(other)
    return tuple(tied)


@dataclass(frozen=True)
class Workload:
    """An amount of training."""

    steps: int
    """Optimizer steps."""
    samples_per_step: int
    """Sequences, or pairs, per optimizer step: the effective batch."""
    tokens_per_sample: float
    """Tokens of one that carry loss; padding is not among them."""
    dataset_samples: float | None = None
    """Sequences of one epoch; None where no dataset is named."""
    download_bytes: float = 0.0
    """Size of the model that has to arrive before the first step."""
    noun: str = "sample"
    """What one is called: a pair has two sequences."""

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

    A sample, of a dataset too, is one sequence of the length that a configuration trains at.

    Raises:
        InputError: in more than one way, an amount out of range, or epochs of nothing.
    """

    train_steps: int | None = None
    samples: float | None = None
    tokens: float | None = None
    dataset_samples: float | None = None
    epochs: float | None = None
    """Of the dataset, or of the tokens where those are given."""
    has_dataset: bool = False
    """Whether there are texts, of which an epoch is asked about where nothing else is."""

    def __post_init__(self) -> None:
        keys = ("train_steps", "samples", "tokens", "dataset_samples", "epochs")
        given = []
        for key in keys:
            value = getattr(self, key)
            option = f"--work {key.replace('_', '-')}"
            if value is None:
                continue
            if not 0 < value <= AMOUNT_MAX:
                raise InputError(
                    f"{option} must be greater than 0 and at most {AMOUNT_MAX:g}, "
                    f"got {quote(value)}"
                )
            if key != "epochs":
                given.append(option)
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} both say how much to train: keep one")
        if self.epochs is not None and self.has_dataset and given:
            raise InputError(f"--work epochs is of the dataset, and {given[0]} says how much")
        sized = self.has_dataset or self.tokens is not None or self.dataset_samples is not None
        if self.epochs is not None and not sized:
            raise InputError("--work epochs needs tokens or dataset-samples, or in a plan --data")

    @property
    def is_asked(self) -> bool:
        """Whether an amount was given."""
        return any((self.train_steps, self.samples, self.tokens, self.dataset_samples))

    def workload(
        self,
        config: TrialConfig,
        *,
        tokens_per_sample: float | None = None,
        epoch_steps: float | None = None,
        download_bytes: float = 0.0,
    ) -> Workload:
        """Return the work for ``config``: the fewest whole steps of its effective batch.

        Args:
            config: what trains.
            tokens_per_sample: those that carry loss; None where all of its sequences do.
            epoch_steps: steps of an epoch of the texts; None where there are none.
            download_bytes: of the model that has to arrive.
        """
        per_step = config.samples_per_step
        per_sample = tokens_per_sample or config.tokens_per_step / per_step
        epochs = self.epochs or 1.0
        steps = float(self.train_steps or STEPS)
        if self.samples is not None:
            steps = self.samples / per_step
        elif self.tokens is not None:
            steps = epochs * self.tokens / per_sample / per_step
        elif self.dataset_samples is not None:
            steps = epochs * self.dataset_samples / per_step
        elif epoch_steps is not None and self.train_steps is None:
            steps = epochs * epoch_steps
        # A product of floats a hair above a whole number of steps is that number.
        whole = max(1, math.ceil(steps * (1 - 1e-12)))
        noun = "sample"
        if config.is_on_pairs:
            noun = "pair"
        return Workload(whole, per_step, per_sample, self.dataset_samples, download_bytes, noun)


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
    step_ends: tuple[float, float] | None = None
    """The shortest and the longest that a step may be; None where it is known exactly."""
    gpus: int = 1
    """That take each step together; all of the machines that have them are paid for."""

    @cached_property
    def usd_per_hour(self) -> float:
        """Dollars an hour of all that is rented."""
        return usd_per_hour(self.offer, self.gpus)

    @cached_property
    def items(self) -> tuple[BillItem, ...]:
        """What it is made of; the items' dollars add up to the total.

        Interruptions are expected values: their rate times the training's hours, each costing the
        offer's restart time. Rounding up to the billing unit and the minimum are items of their
        own.
        """
        offer = self.offer
        training = self.workload.steps * self.step_seconds
        download = offer.download_seconds or 0.0
        rate = offer.download_bytes_per_second
        if offer.download_seconds is None and rate is not None:
            download = self.workload.download_bytes / rate
        hours = training / SECONDS_PER_HOUR
        seconds: dict[ItemName, float] = {
            "training": training,
            "boot": offer.boot_seconds,
            "download": download,
            "queue": offer.queue_seconds,
            "preemptions": hours * offer.preemptions_per_hour * offer.restart_seconds,
        }
        used = sum(seconds.values())
        if not offer.is_queue_billed:
            used -= offer.queue_seconds
        # A sum of floats a hair above a whole number of units is that number of units.
        units = math.ceil(used / offer.billing_seconds - 1e-9)
        rounded = max(units * offer.billing_seconds, used)
        seconds["rounding"] = rounded - used
        seconds["minimum"] = max(0.0, offer.minimum_seconds - rounded)
        usd_per_second = self.usd_per_hour / SECONDS_PER_HOUR
        items = []
        for name, of_item in seconds.items():
            usd = of_item * usd_per_second
            if name == "queue" and not offer.is_queue_billed:
                usd = 0.0
            items.append(BillItem(name, of_item, usd))
        return tuple(items)

    @cached_property
    def extremes(self) -> tuple[Bill, Bill]:
        """The bills of the shortest and of the longest step."""
        low, high = self.step_ends or (self.step_seconds, self.step_seconds)
        known = replace(self, step_ends=None)
        return replace(known, step_seconds=low), replace(known, step_seconds=high)

    def range_of(self, measure: Callable[[Bill], float]) -> Estimate:
        """Return a number of this bill with its ends."""
        return Estimate(measure(self), *map(measure, self.extremes))

    @property
    def usd(self) -> float:
        """Total in dollars."""
        return sum(item.usd for item in self.items)

    @property
    def billed_hours(self) -> float:
        """Hours that are paid for."""
        return self.usd / self.usd_per_hour

    @property
    def wall_hours(self) -> float:
        """Hours from asking for the GPU to the last step, paid for or not."""
        waited = 0.0
        for item in self.items:
            if item.name not in ("rounding", "minimum"):
                waited += item.seconds
        return waited / SECONDS_PER_HOUR

    @property
    def usd_per_1000_steps(self) -> float:
        """Dollars per 1,000 optimizer steps, everything included."""
        return self.usd / self.workload.steps * 1000.0

    @property
    def usd_per_million_tokens(self) -> float:
        """Dollars per million tokens that carry loss while it trains."""
        seconds = self.workload.steps * self.step_seconds
        return usd_per_million_tokens(self.offer, self.gpus, self.workload.tokens / seconds)

    @property
    def usd_per_sample(self) -> float:
        """Dollars per sequence, everything included."""
        return self.usd / self.workload.samples

    @property
    def usd_per_epoch(self) -> float | None:
        """Dollars per pass over the dataset; None where no dataset is named."""
        size = self.workload.dataset_samples
        if size is None:
            return None
        return self.usd_per_sample * size

    @property
    def dominant(self) -> BillItem:
        """The largest item."""
        return max(self.items, key=lambda item: item.usd)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        shortest, longest = self.extremes
        return {
            "gpu": self.offer.gpu,
            "provider": self.offer.provider,
            "is_spot": self.offer.is_spot,
            "usd_per_hour": self.offer.usd_per_hour,
            "source": self.offer.source,
            "step_seconds": self.step_seconds,
            "billed_hours": self.billed_hours,
            "wall_hours": self.wall_hours,
            "usd_per_1000_steps": self.usd_per_1000_steps,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "usd_per_sample": self.usd_per_sample,
            "usd_per_epoch": self.usd_per_epoch,
            "gpus": self.gpus,
            "usd": self.usd,
            "date": self.offer.date.isoformat(),
            "steps": self.workload.steps,
            "usd_range": [shortest.usd, longest.usd],
            "usd_per_million_tokens_range": [
                shortest.usd_per_million_tokens,
                longest.usd_per_million_tokens,
            ],
            "wall_hours_range": [shortest.wall_hours, longest.wall_hours],
            "dominant": self.dominant.name,
            "items": list(map(asdict, self.items)),
        }


def usd_per_token(bill: Bill) -> float:
    """Return dollars per token that carries loss, everything included."""
    return bill.usd / bill.workload.tokens


def hours_per_token(bill: Bill) -> float:
    """Return hours per token that carries loss, waiting included."""
    return bill.wall_hours / bill.workload.tokens


def ratio(bill: Bill, to: Bill, measure: Callable[[Bill], float] = usd_per_token) -> Estimate:
    """Return how many times as much a bill is as another, with the ends of that."""
    ends = [measure(one) / measure(other) for one, other in _corners(bill, to)]
    if len(ends) > len(bill.extremes):
        # Of two forecasts: hardly ever is each as far off as may be.
        return bill.range_of(measure).over(to.range_of(measure))
    return Estimate(measure(bill) / measure(to), min(ends), max(ends))


def _corners(first: Bill, second: Bill) -> list[tuple[Bill, Bill]]:
    """Return two bills at the ends of what their steps may take; one forecast's go together."""
    forecast = attrgetter("offer.gpu", "workload", "step_seconds", "step_ends")
    if forecast(first) == forecast(second):
        return list(zip(first.extremes, second.extremes, strict=True))
    return list(itertools.product(first.extremes, second.extremes))


@dataclass(frozen=True)
class BreakEven:
    """An amount of work at which the cheaper of two bills changes, wherever their steps are."""

    tokens: Estimate
    below: Bill
    """The cheaper one for less work."""
    above: Bill

    @property
    def samples(self) -> Estimate:
        """The same in sequences."""
        each = self.below.workload.tokens_per_sample
        return Estimate(self.tokens.value / each, self.tokens.low / each, self.tokens.high / each)

    @property
    def steps(self) -> float | None:
        """The same in optimizer steps; None where the two have different effective batches."""
        per_step = self.below.workload.samples_per_step
        if per_step != self.above.workload.samples_per_step:
            return None
        return self.samples.value / per_step


def break_evens(first: Bill, second: Bill) -> list[BreakEven]:
    """Return where two bills change places; nothing where any corner knows of other changes.

    They are of exact costs, minimum charges included; rounding up to billing units blurs each by
    about a unit's worth of training.
    """
    predicted = _crossings(first, second)
    corners = [_crossings(one, other) for one, other in _corners(first, second)]
    for crossings in corners:
        if list(map(_is_first_below, crossings)) != list(map(_is_first_below, predicted)):
            return []
    points = []
    for number, (amount, is_first_below) in enumerate(predicted):
        ends = [crossings[number][0] for crossings in corners]
        tokens = Estimate(amount, min(ends), max(ends))
        if is_first_below:
            points.append(BreakEven(tokens, first, second))
        else:
            points.append(BreakEven(tokens, second, first))
    return points


_is_first_below = itemgetter(1)
"""Of a crossing."""


class _CostLine(NamedTuple):
    """What a bill comes to by tokens: a fixed part and so much a token, or the minimum charge."""

    fixed: float
    per_token: float
    least: float

    @classmethod
    def of(cls, bill: Bill) -> _CostLine:
        usd = {item.name: item.usd for item in bill.items}
        return cls(
            fixed=usd["boot"] + usd["download"] + usd["queue"],
            per_token=(usd["training"] + usd["preemptions"]) / bill.workload.tokens,
            least=bill.offer.minimum_seconds * bill.usd_per_hour / SECONDS_PER_HOUR,
        )

    @property
    def bend(self) -> float:
        """The tokens from which on it is more than the minimum charge."""
        return max(0.0, (self.least - self.fixed) / self.per_token)

    def at(self, tokens: float) -> float:
        return max(self.least, self.fixed + self.per_token * tokens)


def _crossings(first: Bill, second: Bill) -> list[tuple[float, bool]]:
    """Return the tokens at which two costs change places, and whether the first is less below.

    A cost is a fixed part and so much a token, and never less than the minimum charge: as each
    bends once, there may be two.
    """
    line = _CostLine.of(first)
    other_line = _CostLine.of(second)
    gaps = []
    for tokens in sorted({0.0, line.bend, other_line.bend, AMOUNT_MAX}):
        gaps.append((tokens, line.at(tokens) - other_line.at(tokens)))
    found = []
    before = 0.0
    # Between the bends the gap is straight. Two costs may touch and part without changing places.
    for (start, gap), (end, gap_at_end) in itertools.pairwise(gaps):
        before = gap or before
        if before * gap_at_end < 0.0:
            found.append((start + (end - start) * gap / (gap - gap_at_end), before < 0.0))
    return found


@dataclass(frozen=True)
class OfferComparison:
    """Bills of the same work under several offers."""

    bills: tuple[Bill, ...]
    """The cheapest per token first."""
    break_evens: tuple[BreakEven, ...]
    """Where the cheapest and another one change places for sure, by amount of work."""

    @property
    def cheapest(self) -> Bill:
        """The bill with the least dollars per token, by the predicted steps."""
        return self.bills[0]

    @property
    def perhaps_cheapest(self) -> tuple[Bill, ...]:
        """All bills that may be the cheapest, by what is predicted; one where that is sure."""
        return ties(self.bills, ratio)

    @property
    def perhaps_soonest(self) -> tuple[Bill, ...]:
        """The bills that may end first, waiting included: the soonest of each GPU; one where that
        is sure."""
        of_gpu: dict[str, Bill] = {}
        for bill in sorted(self.bills, key=hours_per_token):
            of_gpu.setdefault(bill.offer.gpu, bill)
        return ties(list(of_gpu.values()), partial(ratio, measure=hours_per_token))


def compare_offers(bills: Sequence[Bill]) -> OfferComparison:
    """Return the bills from cheap to dear, and where the cheapest one would surely not be that."""
    ranked = sorted(bills, key=usd_per_token)
    points: list[BreakEven] = []
    for other in ranked[1:]:
        points += break_evens(ranked[0], other)
    points.sort(key=attrgetter("tokens.value"))
    return OfferComparison(tuple(ranked), tuple(points))
