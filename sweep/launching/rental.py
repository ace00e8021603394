"""What is rented: the GPU, the files that go along, and what it may cost."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from search_spaces.costs import SECONDS_PER_HOUR, Bill, Workload, usd_per_hour
from search_spaces.errors import InputError, listed
from search_spaces.gpus import GpuSpec
from search_spaces.prices import Offer
from sweep.launching.parcel import Parcel
from sweep.request import REQUEST

HOURS_MAX = 24.0
"""Modal ends a function after a day, and no study is known to take so long."""
HOURS_LEAST = 1.0
RESULTS = "rented"
"""Directory that results are fetched to, where no database takes the place of a local one."""
BUCKETS = ("s3://", "gs://")
"""What the address of a bucket begins with."""
SLACK = 2.0
"""Of the longest that a study is predicted to take, where nobody says what it may cost."""


@dataclass(frozen=True)
class Machine:
    """What is asked of a provider."""

    card: GpuSpec
    cards: int = 1
    cloud: str | None = None
    """Where the provider is a broker; None leaves the choice to it."""
    is_spot: bool = False


@dataclass(frozen=True)
class Cost:
    """What a study costs on a machine, and what it may cost at most."""

    machine: Offer
    """The whole machine's: dollars an hour of all of its GPUs."""
    hours: tuple[float, float] | None
    """Billed, the least and the most that are expected; None where no time can be predicted."""
    usd: tuple[float, float] | None
    usd_per_hour_most: float
    """The machine's at most, with what a provider bills beside the GPU."""
    limit_seconds: int
    """Of the machine, after which it is stopped."""

    @property
    def usd_max(self) -> float:
        """What is spent at most."""
        return self.limit_seconds / SECONDS_PER_HOUR * self.usd_per_hour_most

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; dollars and hours are the most that is expected."""
        return {
            "usd": None if self.usd is None else self.usd[1],
            "usd_range": None if self.usd is None else list(self.usd),
            "usd_max": self.usd_max,
            "hours": None if self.hours is None else self.hours[1],
            "hours_max": self.limit_seconds / SECONDS_PER_HOUR,
            "usd_per_hour": self.machine.usd_per_hour,
            "usd_per_hour_max": self.usd_per_hour_most,
            "provider": self.machine.provider,
            "date": self.machine.date.isoformat(),
            "source": self.machine.source,
        }


@dataclass(frozen=True)
class Rental:
    """A study on a rented machine."""

    study: str
    machine: Machine
    parcel: Parcel
    cost: Cost
    volume: str
    secrets: tuple[str, ...] = ()
    """Names of variables that are handed on and stand in no file."""

    def words(self, inputs: str) -> list[str]:
        """Return what `sweep` is given where the files that go along are in ``inputs``."""
        return ["run", f"{inputs}/{REQUEST}"]


class Provider(Protocol):
    """Writes a rental's file, and says how it is started."""

    name: str
    """As typed: ``modal``."""
    title: str
    """As it calls itself."""
    tool: str
    """Its own command."""
    package: str
    """What brings that command, for pip."""
    file_name: str
    idle_seconds: float
    """Paid for after the end, until the machine is gone."""

    def check(self, machine: Machine) -> None:
        """Raise an `InputError` where it has no such machine."""
        ...

    def offers(self, machine: Machine, offers: Sequence[Offer]) -> list[Offer]:
        """Return those of a GPU's offers that are its own."""
        ...

    def dearest(self, machine: Machine, usd_per_hour: float) -> float:
        """Return what an hour may cost at most, where the machine is listed at so much."""
        ...

    def volume(self, machine: Machine, typed: str | None = None) -> str:
        """Return the name of the volume that keeps studies: what was typed, or one of its own.

        Raises:
            InputError: somebody has to name one, or it can have none of this name.
        """
        ...

    def text(self, rental: Rental) -> str:
        """Return the file."""
        ...

    def start(self, rental: Rental, file: Path) -> list[str]:
        """Return the command that starts it."""
        ...

    def stop(self, rental: Rental) -> str:
        """Return the command that ends it before its time."""
        ...

    def results(self, rental: Rental) -> str:
        """Return the command that fetches what came of it."""
        ...

    def login(self, machine: Machine) -> list[str]:
        """Return the command of its tool that says whether somebody is logged in."""
        ...

    def is_logged_in(self, machine: Machine, code: int, said: str) -> bool:
        """Whether that command, by its exit code and what it said, knows an account."""
        ...

    def how_to_log_in(self, machine: Machine) -> str:
        """Return what a person does about it."""
        ...


def machine_offer(
    machine: Machine, offers: Sequence[Offer], *, idle_seconds: float = 0.0
) -> Offer | None:
    """Return the cheapest machine with the GPUs, by the hour of all of them; None without offers.

    The time until it is gone is paid for, as it is the time until it is there.

    Raises:
        InputError: the GPU is rented by more at once alone.
    """
    if offers and (least := min(offer.gpus for offer in offers)) > machine.cards:
        raise InputError(
            f"--devices must be at least {least}: {offers[0].provider} rents {machine.card.name} "
            f"by {least}, got {machine.cards}"
        )
    whole = [
        offer.model_copy(
            update={
                "usd_per_hour": usd_per_hour(offer, machine.cards),
                "gpus": 1,
                "boot_seconds": offer.boot_seconds + idle_seconds,
            }
        )
        for offer in offers
        if offer.gpus <= machine.cards
    ]
    return min(whole, key=lambda offer: offer.usd_per_hour, default=None)


def shared(seconds: tuple[float, float], *, cards: int, start: float) -> tuple[float, float]:
    """Return how long a study takes with its trials spread over GPUs; each starts a worker."""
    low, high = (start + max(0.0, one - start) / cards for one in seconds)
    return low, high


def cost_of(
    seconds: tuple[float, float] | None,
    *,
    offer: Offer,
    usd_per_hour_most: float,
    download_bytes: float,
    max_dollars: float | None,
    least_seconds: float,
) -> Cost:
    """Return what a study costs by the planner's bill.

    Args:
        seconds: the least and the most that the study takes; None where nothing is predicted.
        offer: the whole machine's.
        usd_per_hour_most: what an hour may cost at most.
        download_bytes: of the weights that have to arrive first.
        max_dollars: what it may cost; None limits it by its time.
        least_seconds: what the start and one trial take.

    Raises:
        InputError: the limit does not pay for one trial.
    """
    bills = None if seconds is None else _bills(seconds, offer, download_bytes)
    hours = None if bills is None else (bills[0].billed_hours, bills[1].billed_hours)
    cost = Cost(
        machine=offer,
        hours=hours,
        usd=None if bills is None else (bills[0].usd, bills[1].usd),
        usd_per_hour_most=usd_per_hour_most,
        limit_seconds=_limit(hours, max_dollars, usd_per_hour_most),
    )
    if max_dollars is not None and cost.limit_seconds < least_seconds:
        needed = math.ceil(least_seconds * usd_per_hour_most / SECONDS_PER_HOUR * 100) / 100
        raise InputError(
            f"--max-dollars {max_dollars:g} pays for {cost.limit_seconds} s at "
            f"${usd_per_hour_most:.2f} an hour, and the start, one trial and the end take about "
            f"{math.ceil(least_seconds)} s: give at least {needed:.2f}"
        )
    return cost


def _bills(seconds: tuple[float, float], offer: Offer, download_bytes: float) -> tuple[Bill, Bill]:
    """Return the bills of the shortest and the longest course: its time is one long step."""
    work = Workload(1, 1, 1.0, download_bytes=download_bytes)
    low, high = (Bill(work, step_seconds=one, offer=offer) for one in seconds)
    return low, high


def _limit(
    hours: tuple[float, float] | None, max_dollars: float | None, usd_per_hour: float
) -> int:
    if max_dollars is not None:
        most = max_dollars / usd_per_hour
    else:
        most = HOURS_MAX if hours is None else max(HOURS_LEAST, SLACK * hours[1])
    return int(min(most, HOURS_MAX) * SECONDS_PER_HOUR)


def short_name(name: str, *, of: str, most: int) -> str:
    """Return a name of at most so many characters, which no other study's is.

    Args:
        name: as far as it could be made of the study's.
        of: what the name would be, were every character allowed.
        most: characters.
    """
    if name == of and len(name) <= most:
        return name
    mark = hashlib.sha256(of.encode()).hexdigest()[:8]
    return f"{name[: most - len(mark) - 1].strip('-')}-{mark}"


def card_name(machine: Machine, names: Mapping[str, str], *, where: str) -> str:
    """Return what a provider calls a GPU.

    Raises:
        InputError: it has none such; the message names those that it has.
    """
    name = names.get(machine.card.name)
    if name is None:
        raise InputError(f"--gpu: {where} has no {machine.card.name}; it has {listed(names)}")
    return name
