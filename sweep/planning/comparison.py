"""Owns several cards side by side: the same training on each, its costs, and who is the fastest.

Pure: the plans of the cards and their offers in, a comparison out. Billing itself, and which order
of two bills the speeds' uncertainty allows to claim, is `sweep.predict.cost`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.knobs import CAPACITY_KEYS
from search_spaces.loading import with_fixed
from search_spaces.prices import Offer
from search_spaces.space import SearchSpace
from sweep.planning.forecast import Forecast
from sweep.planning.plan import AskedWork, CardPlan, bill_offers
from sweep.planning.recommendation import is_surely_faster, nearest_capacity, preferred
from sweep.planning.survey import ClassKey, Survey, class_of
from sweep.predict.cost import Workload
from sweep.predict.offers import OfferComparison, compare_offers


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
            chosen[plan.gpu.name],
            work=work,
            offers=offers.get(plan.gpu.name, ()),
            model=plan.model,
            shapes=plan.shapes,
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
