"""Owns what a study, or a plan, says of a GPU: how fast each capacity class trains, at what price.

Pure: a snapshot or the document of `sweep plan --json` in, one value out that both are compared as.
Knows nothing of verdicts, words or pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from search_spaces.config import TrialConfig, parse_config
from search_spaces.errors import InputError, words_of
from search_spaces.linears import CapacityClass, parameters
from search_spaces.models import ModelSpec, shipped_models
from search_spaces.prices import Offer
from storage.definition import StudySnapshot, TargetSpeed
from storage.ranking import measured_of, rank_study

_BYTES_PER_PARAMETER = 2
"""Of the weights that arrive: 16 bits each."""


@dataclass(frozen=True)
class Range:
    """A number and the ends between which it surely lies; endless where nothing bounds it."""

    value: float
    low: float
    high: float

    def over(self, other: Range) -> Range:
        """Return this number over another."""
        return Range(self.value / other.value, self.low / other.high, _ratio(self.high, other.low))

    def is_below(self, other: Range) -> bool:
        """Whether it is surely less than another."""
        return self.high < other.low

    @property
    def is_bounded(self) -> bool:
        """Whether both ends are known."""
        return self.low > 0 and self.high < math.inf


def _ratio(over: float, under: float) -> float:
    return over / under if under > 0 else math.inf


@dataclass(frozen=True)
class Rent:
    """At what a GPU can be had."""

    provider: str
    usd_per_hour: float
    date: str
    """Day on which the price was read, ISO 8601."""
    fixed_seconds: float
    """Billed before the first step: the GPU starts, and the model arrives."""


@dataclass(frozen=True)
class Ground:
    """What two configurations must have in common for their speeds to compare."""

    model: str
    """The fingerprint of its architecture; of a plan of a model that no study has, its name."""
    model_name: str
    capacity: CapacityClass
    seq_len: int


@dataclass(frozen=True)
class Option:
    """One configuration on a GPU."""

    ground: Ground
    config: TrialConfig
    tokens_per_second: Range
    basis: Literal["measured", "predicted"]
    peak_bytes: int | None
    number: int | None
    """Of the trial; None in a plan."""
    fits_surely: bool = True
    """False where a plan is not sure that it fits."""


@dataclass(frozen=True)
class Card:
    """One GPU, as a study or a plan knows it."""

    label: str
    """What it is called in a comparison; no two are called alike."""
    gpu: str
    source: str
    """Where the numbers are from, in words."""
    budget_bytes: int
    rent: Rent | None
    options: tuple[Option, ...]
    """In the order in which they are recommended."""

    def best(self, ground: Ground) -> Option | None:
        """Return what is recommended on a ground; None where it has nothing there."""
        return next((option for option in self.options if option.ground == ground), None)


def card_of_study(snapshot: StudySnapshot) -> Card:
    """Return the GPU that a study is for, with all that was measured to fit on it.

    Speeds are the target GPU's, predicted where another stood in. Which configuration stands for
    a GPU is the study's own answer: a prediction tells neighbours apart worse than it measured.
    """
    target, model = snapshot.definition.target, ModelSpec.from_json(snapshot.definition.model)
    options = tuple(_measured_options(snapshot, model))
    stood_in = target.emulated_on
    return Card(
        label=snapshot.name,
        gpu=target.gpu,
        source=f"study {snapshot.name}" + (f", run on {stood_in}" if stood_in else ""),
        budget_bytes=target.budget_bytes,
        rent=None if snapshot.offer is None else _rent(snapshot.offer, model),
        options=options,
    )


def _measured_options(snapshot: StudySnapshot, model: ModelSpec) -> Iterator[Option]:
    for record in rank_study(snapshot).ranked:
        speed = snapshot.target_speed(record)
        if speed is None:
            continue
        yield Option(
            ground=Ground(
                snapshot.definition.model_fingerprint,
                model.name,
                CapacityClass.of(record.config, model),
                record.config.seq_len,
            ),
            config=record.config,
            tokens_per_second=_range_of(speed),
            basis=speed.basis,
            peak_bytes=measured_of(record).peak_allocated_bytes,
            number=record.number,
        )


def _range_of(speed: TargetSpeed) -> Range:
    low = 0.0 if speed.low is None else speed.low
    return Range(speed.tokens_per_second, low, math.inf if speed.high is None else speed.high)


def _rent(offer: Offer, model: ModelSpec) -> Rent:
    """Return an offer with the time that is paid before the first step."""
    arriving = offer.download_seconds
    if arriving is None:
        size = (parameters(model) or 0) * _BYTES_PER_PARAMETER
        rate = offer.download_bytes_per_second
        arriving = 0.0 if rate is None else size / rate
    waiting = offer.queue_seconds if offer.is_queue_billed else 0.0
    fixed = offer.boot_seconds + arriving + waiting
    provider = f"{offer.provider}{' spot' if offer.is_spot else ''}"
    return Rent(provider, offer.usd_per_hour, offer.date.isoformat(), fixed)


def cards_of_plan(
    document: Mapping[str, Any], *, where: str, models: Sequence[tuple[str, ModelSpec]] = ()
) -> tuple[Card, ...]:
    """Return the GPUs of a plan.

    Args:
        document: what `sweep plan --json` prints.
        where: what it came from, for the message.
        models: fingerprints with their architectures, of the studies beside it.

    Raises:
        InputError: it is no such document.
    """
    plans = document.get("plans", [document])
    if not isinstance(plans, list) or not plans or not all(isinstance(p, Mapping) for p in plans):
        raise InputError(f"{where}: plans must be a list of plans, as `sweep plan --json` prints")
    try:
        return tuple(_card_of_plan(plan, where=where, models=models) for plan in plans)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{where}: is not what `sweep plan --json` prints: {words_of(error)}"
        ) from error


def _card_of_plan(
    plan: Mapping[str, Any], *, where: str, models: Sequence[tuple[str, ModelSpec]]
) -> Card:
    answer = plan.get("recommended", plan)
    name, gpu = str(plan["model"]), plan["gpu"]
    known = next(((print_, model) for print_, model in models if model.name == name), None)
    shipped = next(((name, model) for model in shipped_models() if model.name == name), None)
    fingerprint, model = known or shipped or (name, None)
    documents = [answer, *plan.get("fastest_by_class", ())]
    options = [
        _planned(one, fingerprint, name, model, where=where)
        for one in documents
        if one is not None and one.get("tokens_per_second")
    ]
    return Card(
        label=f"{gpu['name']} (plan)",
        gpu=str(gpu["name"]),
        source=f"plan {where}",
        budget_bytes=int(gpu["budget_bytes"]),
        rent=_planned_rent(plan.get("bills") or ()),
        options=tuple(_once(options)),
    )


def _planned(
    one: Mapping[str, Any], fingerprint: str, name: str, model: ModelSpec | None, *, where: str
) -> Option:
    config = parse_config(one["config"], where=where)
    capacity = (
        CapacityClass(config.lora_rank, (str(config.target_modules),))
        if model is None
        else CapacityClass.of(config, model)
    )
    low, high = one.get("tokens_per_second_range") or (None, None)
    peak = one.get("peak_allocated_bytes")
    speed = TargetSpeed(float(one["tokens_per_second"]), low, high, "predicted")
    ground = Ground(fingerprint, name, capacity, config.seq_len)
    return Option(
        ground,
        config,
        _range_of(speed),
        "predicted",
        peak,
        None,
        fits_surely=one.get("fits_certainty", "sure") == "sure",
    )


def _once(options: Sequence[Option]) -> list[Option]:
    """Return each configuration once: what is recommended comes first, and knows its range."""
    first: dict[TrialConfig, Option] = {}
    for option in options:
        first.setdefault(option.config, option)
    return list(first.values())


def _planned_rent(bills: Sequence[Mapping[str, Any]]) -> Rent | None:
    """Return the offer of a plan's cheapest bill; None where no price is known."""
    if not bills:
        return None
    bill = bills[0]
    fixed = sum(i["seconds"] for i in bill["items"] if i["name"] in ("boot", "download", "queue"))
    provider = f"{bill['provider']}{' spot' if bill['is_spot'] else ''}"
    return Rent(provider, float(bill["usd_per_hour"]), str(bill["date"]), float(fixed))
