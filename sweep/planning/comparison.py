"""Several GPUs side by side: which do a job in time, and what the same training costs on each.

Which of two is faster, cheaper or in time is claimed only where it holds wherever the speeds are in
their intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec
from search_spaces.knobs import CAPACITY_KEYS
from search_spaces.loading import with_fixed
from search_spaces.models import ModelSpec
from search_spaces.prices import Offer
from search_spaces.space import SearchSpace
from sweep.planning.plan import AskedWork, CardPlan, bill_offers
from sweep.planning.recommendation import (
    Certainty,
    certainty,
    is_surely_faster,
    nearest_capacity,
    preferred,
)
from sweep.planning.spaces import rows
from sweep.planning.survey import ClassKey, Survey, class_of
from sweep.predict.cost import SECONDS_PER_HOUR, Bill, Workload
from sweep.predict.forecast import Forecast, Forecaster, Forecasts, Progress, silent
from sweep.predict.memory.prediction import Fit
from sweep.predict.offers import OfferComparison, compare_offers, is_surely_less

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


ABLE = Outcome.IN_TIME, Outcome.PERHAPS_LATE


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
        return self.outcome in ABLE

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
    forecasts = forecaster.forecast(valid, progress=progress)
    if len(forecasts.refused) == len(valid):
        raise forecasts.refused[0]
    best = preferred(_fastest_of_each_certainty(forecasts))
    if best is None:
        least = int(forecasts.least_bytes[forecasts.least_bytes >= 0].min())
        return JobCard(gpu, Outcome.TOO_SMALL, None, least_bytes=least)
    bills = bill_offers(best, work=work, offers=offers)
    if not bills:
        why = best.notes[0] if best.speed is None and best.notes else ""
        return JobCard(gpu, Outcome.NO_PRICE, best, reason=why)
    return _in_time(gpu, best, bills, deadline_seconds)


def _fastest_of_each_certainty(forecasts: Forecasts) -> Iterator[Forecast]:
    """Yield the fastest at every certainty, down to the first that surely fits.

    Asked from the fastest on: most of what is faster is ruled out by its peak alone, so that few
    steps are ever replayed.
    """
    found: set[Certainty] = set()
    tokens = np.array([config.tokens_per_micro_batch for config in forecasts.configs])
    for at in np.lexsort((-tokens, -forecasts.tokens_per_second)).tolist():
        if at in forecasts.refused or forecasts.fit(at) is Fit.NO:
            continue
        forecast = forecasts.few([at])[0]
        level = certainty(forecast)
        if level not in found:
            found.add(level)
            yield forecast
        if level is Certainty.SURE:
            return


def _in_time(
    gpu: GpuSpec, best: Forecast, bills: tuple[Bill, ...], deadline_seconds: float | None
) -> JobCard:
    """Return the GPU with the offers that are in time; of those that may be, the surest kind."""
    if deadline_seconds is None:
        return JobCard(gpu, Outcome.IN_TIME, best, bills)
    judged = [(bill, _outcome(bill, deadline_seconds)) for bill in bills]
    for kind in (ABLE, (Outcome.PERHAPS_IN_TIME,), (Outcome.TOO_SLOW,)):
        if held := [(bill, outcome) for bill, outcome in judged if outcome in kind]:
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


@dataclass(frozen=True)
class CardComparison:
    """The same training on several cards: as many tokens, in steps of one effective batch."""

    chosen: Mapping[str, Forecast]
    """The configuration of each card, by its name."""
    workload: Workload
    """What each of them does."""
    bills: OfferComparison | None
    """None where no price of any of them is known."""

    @property
    def fastest(self) -> str:
        """The card of most tokens/s, by what is predicted."""
        return max(self.chosen, key=lambda gpu: self.chosen[gpu].tokens_per_second or 0.0)

    @property
    def perhaps_fastest(self) -> tuple[str, ...]:
        """The other cards that the uncertainty of the speeds leaves as fast, the faster first."""
        first = self.chosen[self.fastest]
        others = {gpu: forecast for gpu, forecast in self.chosen.items() if forecast is not first}
        tied = [gpu for gpu, other in others.items() if not is_surely_faster(first, other)]
        return tuple(sorted(tied, key=lambda gpu: -(others[gpu].tokens_per_second or 0.0)))

    @property
    def effective_batch_size(self) -> int:
        """Sequences per optimizer step, on every card."""
        return self.workload.samples_per_step

    @property
    def seq_len(self) -> int:
        """Tokens in every sequence, on every card."""
        return next(iter(self.chosen.values())).config.seq_len


Look = Callable[[CardPlan, SearchSpace | TrialConfig], Forecast | None]
"""Returns what to prefer of a space on the card of a plan; a configuration's own forecast."""


def compare_cards(
    plans: Sequence[CardPlan],
    *,
    work: AskedWork,
    offers: Mapping[str, Sequence[Offer]],
    look: Look,
) -> CardComparison | None:
    """Return what the same training costs on several cards; None where fewer than two can do it.

    The same training means the same samples, of one length, in steps of one effective batch, for
    adapters of one capacity class. Each card does it with its own fastest configuration whose
    micro-batch goes into that batch, and accumulates the rest.
    """
    able = [plan for plan in plans if plan.fits]
    chosen = _rivals(able, look)
    if len(chosen) < 2:
        return None
    bills = [
        bill
        for plan in able
        if plan.gpu.name in chosen
        for bill in bill_offers(
            chosen[plan.gpu.name], work=work, offers=offers.get(plan.gpu.name, ())
        )
    ]
    first = next(iter(chosen.values())).config
    workload = work.workload(first, model=able[0].model, shapes=able[0].shapes)
    return CardComparison(chosen, workload, compare_offers(bills) if bills else None)


def _rivals(able: Sequence[CardPlan], look: Look) -> dict[str, Forecast]:
    """Return the forecast of each card that can do the same training."""
    surveys = [(plan, plan.survey) for plan in able if plan.survey is not None]
    if len(surveys) < len(able):
        return {plan.gpu.name: plan.shown for plan in able if plan.shown is not None}
    shared = _shared_class([survey for _, survey in surveys])
    if shared is None:
        return {}
    own = {plan.gpu.name: survey.fastest_by_class[shared] for plan, survey in surveys}
    steps = [forecast.config.samples_per_step for forecast in own.values()]
    # The largest step of any of them hardly accumulates; what all their micro-batches go into
    # leaves each with its fastest configuration.
    for whole in (max(steps), math.lcm(*steps)):
        chosen = {
            plan.gpu.name: own[plan.gpu.name]
            if own[plan.gpu.name].config.samples_per_step == whole
            else _accumulating(plan, survey.space, own[plan.gpu.name].config, whole, look)
            for plan, survey in surveys
        }
        fitting = {gpu: choice for gpu, choice in chosen.items() if choice and choice.fits}
        if len(fitting) == len(chosen):
            return fitting
    return {}


def _shared_class(surveys: Sequence[Survey]) -> ClassKey | None:
    """Return the class that every card has something of: nearest to the standard one, and of that
    the length that is fastest on the first card.
    """
    if not surveys:
        return None
    common = set.intersection(*(set(survey.fastest_by_class) for survey in surveys))
    model = surveys[0].model
    capacity = nearest_capacity({key[0] for key in common}, model=model)
    fastest = surveys[0].fastest_by_class
    best = preferred(fastest[key] for key in common if key[0] == capacity)
    return None if best is None else class_of(best.config, model)


def _accumulating(
    plan: CardPlan, space: SearchSpace, shared: TrialConfig, whole: int, look: Look
) -> Forecast | None:
    """Return a card's preferred way to make an effective batch, in the class and at the length of
    ``shared``; None where it has none.
    """
    same = (*CAPACITY_KEYS, "seq_len", *(() if plan.shapes is None else ("packing",)))
    held = {key: getattr(shared, key) for key in same}
    try:
        return look(plan, with_fixed(space, {**held, "effective_batch_size": whole}))
    except InputError:
        return None
