"""What a fine-tune costs under an offer, item by item, and between which bounds."""

from __future__ import annotations

import math
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
    cards: int = 1
    """Rented together for the same time, each at the offer's price."""

    def of_step(self, step_seconds: float) -> Bill:
        """Return the bill of the same work if a step took exactly so long."""
        return bill(self.workload, step_seconds=step_seconds, offer=self.offer, cards=self.cards)

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
        """Hours that are paid for, of each card."""
        return self.usd / self.offer.usd_per_hour / self.cards

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
            "cards": self.cards,
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
    workload: Workload,
    *,
    step_seconds: float,
    offer: Offer,
    uncertainty: float = 0.0,
    cards: int = 1,
) -> Bill:
    """Return what ``workload`` costs under ``offer``, as one billed session.

    ``uncertainty`` is that of ``step_seconds``, relative; ``cards`` take each step together, and
    each is paid for. Interruptions are expected values: their
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
    rate = cards * offer.usd_per_hour / SECONDS_PER_HOUR
    unpaid = () if offer.is_queue_billed else ("queue",)
    items = (BillItem(n, s, 0.0 if n in unpaid else s * rate) for n, s in seconds.items())
    return Bill(offer, workload, step_seconds, tuple(items), uncertainty, cards)


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
