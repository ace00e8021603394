"""Owns the question of the card backwards: which cards do a job by a deadline, and for how much.

The job is one training, the same on every card. Which of two cards is cheaper, or in time, is
claimed only where it holds wherever the speeds are in their intervals. Pure: cards with what
answers for them and their offers in, an answer out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from search_spaces.prices import Offer
from search_spaces.space import SearchSpace
from sweep.planning.forecast import Forecast, Forecaster, Progress, silent
from sweep.planning.plan import AskedWork, bill_offers
from sweep.planning.recommendation import Certainty, certainty, preferred
from sweep.planning.spaces import rows
from sweep.predict.cost import SECONDS_PER_HOUR, Bill, Workload
from sweep.predict.memory.prediction import Fit
from sweep.predict.offers import is_surely_less

EFFECTIVE_BATCH = 16
"""Sequences of a step where nobody says: QLoRA's own for 7 B and 13 B (arXiv 2305.14314, B.2)."""
JOB_KEYS = ("lora_rank", "target_modules", "seq_len")
"""What makes a training the same on every card, beside the effective batch."""

NOTHING: Mapping[str, Any] = {}


def job(held: Mapping[str, Any], *, fixed: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """Return knobs that are held on every card: what was typed, and of what makes a training the
    same training the standard recipe's.

    Args:
        held: what was typed.
        fixed: what the space that was named has no other value of.
    """
    given = {key: value for key, value in {**fixed, **held}.items() if value is not None}
    standard = {key: getattr(TrialConfig(), key) for key in JOB_KEYS}
    micro = given.get("micro_batch_size", 1)
    standard["effective_batch_size"] = -(-EFFECTIVE_BATCH // micro) * micro
    made_same = {key: given.get(key, value) for key, value in standard.items()}
    return {**made_same, **held}


class Outcome(Enum):
    """What becomes of the job on one card."""

    IN_TIME = "in time"
    PERHAPS_LATE = "perhaps late"
    """By the prediction it is in time, and the uncertainty of the speed leaves that open."""
    PERHAPS_IN_TIME = "perhaps in time"
    """By the prediction it is late, and that is open too."""
    TOO_SLOW = "too slow"
    TOO_SMALL = "too small"
    FORBIDDEN = "not possible"
    """A rule forbids every configuration, or nothing is predicted of any."""
    NO_PRICE = "no price"


@dataclass(frozen=True)
class JobCard:
    """The job on one card."""

    gpu: GpuSpec
    outcome: Outcome
    forecast: Forecast | None
    """The configuration to prefer there; None where nothing fits."""
    bills: tuple[Bill, ...] = ()
    """The offers that may be in time, the cheapest first; all of them where none may."""
    reason: str = ""
    """Why it is not possible, or has no price."""
    least_bytes: int | None = None
    """The least that any configuration needs, where the card is too small."""

    @property
    def is_able(self) -> bool:
        """Whether it does the job in time, as predicted."""
        return self.outcome in (Outcome.IN_TIME, Outcome.PERHAPS_LATE)

    @property
    def bill(self) -> Bill:
        """The cheapest bill."""
        return self.bills[0]


@dataclass(frozen=True)
class Cheapest:
    """What a job costs on every card."""

    model: ModelSpec
    workload: Workload | None
    """None where no card can do it."""
    held: Mapping[str, Any]
    deadline_seconds: float | None
    cards: tuple[JobCard, ...]
    """Those that do the job, the cheapest first, then the others by name."""

    @property
    def able(self) -> tuple[JobCard, ...]:
        """The cards that do the job in time, as predicted, the cheapest first."""
        return tuple(card for card in self.cards if card.is_able)

    @property
    def cheapest(self) -> JobCard | None:
        """The cheapest of them, by what is predicted."""
        return next(iter(self.able), None)

    @property
    def perhaps_cheapest(self) -> tuple[JobCard, ...]:
        """The other cards that the speeds' uncertainty leaves as cheap as the cheapest."""
        first = self.cheapest
        if first is None:
            return ()
        return tuple(card for card in self.able[1:] if not is_surely_less(first.bill, card.bill))

    @property
    def smallest(self) -> JobCard | None:
        """Of the able cards the one with least memory; of several the cheapest."""
        return min(self.able, key=lambda card: card.gpu.memory_bytes, default=None)

    def that(self, outcome: Outcome) -> tuple[JobCard, ...]:
        """Return the cards with an outcome."""
        return tuple(card for card in self.cards if card.outcome is outcome)


def on_card(
    about: SearchSpace | TrialConfig,
    forecaster: Forecaster,
    *,
    work: AskedWork,
    offers: Sequence[Offer],
    deadline_seconds: float | None,
    progress: Progress = silent,
) -> JobCard:
    """Return what becomes of the job on one card, in the configuration to prefer there.

    Raises:
        InputError: memory can be predicted of no configuration.
        EnvironmentFault: the tracing process does not answer.
    """
    gpu = forecaster.gpu
    asked = [about] if isinstance(about, TrialConfig) else [c for row in rows(about) for c in row]
    broken = {config: forecaster.broken(config) for config in asked}
    valid = [config for config, rule in broken.items() if rule is None]
    if not valid:
        reasons = [rule.reason for rule in broken.values() if rule is not None]
        return JobCard(gpu, Outcome.FORBIDDEN, None, reason=(reasons or ["no configuration"])[0])
    forecaster.foresee(valid, progress=progress)
    predicted = _predicted(valid, forecaster)
    best = preferred(_fastest_of_each_certainty(predicted, forecaster))
    if best is None:
        least = min(map(forecaster.least_bytes, predicted))
        return JobCard(gpu, Outcome.TOO_SMALL, None, least_bytes=least)
    bills = bill_offers(
        best, work=work, offers=offers, model=forecaster.model, shapes=forecaster.shapes
    )
    if not bills:
        why = best.notes[0] if best.speed is None and best.notes else ""
        return JobCard(gpu, Outcome.NO_PRICE, best, reason=why)
    return _in_time(gpu, best, bills, deadline_seconds)


def _predicted(configs: Sequence[TrialConfig], forecaster: Forecaster) -> list[TrialConfig]:
    """Return what memory is predicted of; raises why not, where that is nothing."""
    predicted, refused = [], None
    for config in configs:
        error = forecaster.refusal(config)
        refused = refused or error
        if error is None:
            predicted.append(config)
    if refused is not None and not predicted:
        raise refused
    return predicted


def _fastest_of_each_certainty(
    configs: Sequence[TrialConfig], forecaster: Forecaster
) -> Iterator[Forecast]:
    """Yield the fastest at every certainty, down to the first that surely fits.

    Asked from the fastest on: most of what is faster is ruled out by its peak alone, so that few
    steps are ever replayed.
    """
    found: set[Certainty] = set()

    def order(config: TrialConfig) -> tuple[float, int]:
        return forecaster.tokens_per_second(config) or 0.0, config.tokens_per_micro_batch

    for config in sorted(configs, key=order, reverse=True):
        if forecaster.is_hopeless(config) or forecaster.fit(config) is Fit.NO:
            continue
        forecast = forecaster.forecast(config)
        level = certainty(forecast)
        if level not in found:
            found.add(level)
            yield forecast
        if level is Certainty.SURE:
            return


def _in_time(
    gpu: GpuSpec, best: Forecast, bills: tuple[Bill, ...], deadline_seconds: float | None
) -> JobCard:
    """Return the card with the offers that are in time; of those that may be, the surest kind."""
    if deadline_seconds is None:
        return JobCard(gpu, Outcome.IN_TIME, best, bills)
    judged = [(bill, _outcome(bill, deadline_seconds)) for bill in bills]
    for outcomes in (
        (Outcome.IN_TIME, Outcome.PERHAPS_LATE),
        (Outcome.PERHAPS_IN_TIME,),
        (Outcome.TOO_SLOW,),
    ):
        held = [(bill, outcome) for bill, outcome in judged if outcome in outcomes]
        if held:
            return JobCard(gpu, held[0][1], best, tuple(bill for bill, _ in held))
    raise AssertionError("every bill has an outcome")


def _outcome(bill: Bill, deadline_seconds: float) -> Outcome:
    hours = deadline_seconds / SECONDS_PER_HOUR
    soonest, latest = (end.wall_hours for end in bill.extremes)
    if bill.wall_hours <= hours:
        return Outcome.IN_TIME if latest <= hours else Outcome.PERHAPS_LATE
    return Outcome.TOO_SLOW if soonest > hours else Outcome.PERHAPS_IN_TIME


def ranked(cards: Sequence[JobCard]) -> tuple[JobCard, ...]:
    """Return the cards that do the job, the cheapest first, then the others by name."""
    able = sorted((card for card in cards if card.is_able), key=lambda card: card.bill.usd)
    others = sorted((card for card in cards if not card.is_able), key=lambda card: card.gpu.name)
    return (*able, *others)
