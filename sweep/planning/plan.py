"""Owns a plan: everything there is to know of one card, and of several side by side.

Also how much training is asked about, and what it costs by offer. Pure: space or configuration,
forecaster and offers in, a plan out. Billing itself is `sweep.predict.cost`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, quote
from search_spaces.gpus import GpuSpec
from search_spaces.knobs import CAPACITY_KEYS
from search_spaces.linears import parameters
from search_spaces.loading import with_fixed
from search_spaces.models import ModelSpec
from search_spaces.prices import Offer
from search_spaces.space import SearchSpace
from sweep.planning.evidence import Evidence
from sweep.planning.forecast import UNBUILDABLE, Forecast, Forecaster
from sweep.planning.recommendation import nearest_capacity, preferred
from sweep.planning.survey import ClassKey, Survey, class_of
from sweep.planning.table import ShapeTable, shape_table
from sweep.predict.cost import Bill, OfferComparison, Workload, bill, compare_offers

STEPS = 1000
"""Optimizer steps where nothing else is asked."""
AMOUNT_MAX = 1e15
"""More steps, samples or tokens than this is a slip."""
CHECKPOINT_BYTES = 2
"""Bytes of a parameter as models are published: bf16."""

SpaceKind = Literal["preset", "file", "standard"]
"""Where a space comes from: shipped under its name, written by the user, or made for a card."""


@dataclass(frozen=True)
class AskedWork:
    """How much training is asked about, in one of four ways; 1,000 steps where in none.

    Raises:
        InputError: in more than one way, an amount out of range, or epochs of no dataset.
    """

    steps: int | None = None
    samples: int | None = None
    tokens: int | None = None
    dataset_samples: int | None = None
    epochs: float | None = None

    def __post_init__(self) -> None:
        amounts = {
            "--steps": self.steps,
            "--samples": self.samples,
            "--tokens": self.tokens,
            "--dataset-samples": self.dataset_samples,
        }
        for option, value in {**amounts, "--epochs": self.epochs}.items():
            if value is not None and not 0 < value <= AMOUNT_MAX:
                raise InputError(
                    f"{option} must be greater than 0 and at most {AMOUNT_MAX:g}, "
                    f"got {quote(value)}"
                )
        given = [option for option, value in amounts.items() if value is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} both say how much to train: keep one")
        if self.epochs is not None and self.dataset_samples is None:
            raise InputError("--epochs needs --dataset-samples: how many samples an epoch has")

    def workload(self, config: TrialConfig, *, model: ModelSpec) -> Workload:
        """Return the work for ``config``: the fewest whole steps of its effective batch."""
        per_step, per_sample = config.samples_per_step, float(config.seq_len)
        download = float((parameters(model) or 0) * CHECKPOINT_BYTES)
        if self.samples is not None:
            return Workload.of_samples(
                self.samples,
                samples_per_step=per_step,
                tokens_per_sample=per_sample,
                download_bytes=download,
            )
        if self.tokens is not None:
            return Workload.of_tokens(
                self.tokens,
                samples_per_step=per_step,
                tokens_per_sample=per_sample,
                download_bytes=download,
            )
        if self.dataset_samples is not None:
            return Workload.of_epochs(
                1.0 if self.epochs is None else self.epochs,
                dataset_samples=self.dataset_samples,
                samples_per_step=per_step,
                tokens_per_sample=per_sample,
                download_bytes=download,
            )
        steps = STEPS if self.steps is None else self.steps
        return Workload(steps, per_step, per_sample, download_bytes=download)


def bill_offers(
    forecast: Forecast, *, work: AskedWork, offers: Sequence[Offer], model: ModelSpec
) -> tuple[Bill, ...]:
    """Return the work's bills, the cheapest first; none where the speed is unknown."""
    if forecast.step_seconds is None:
        return ()
    workload = work.workload(forecast.config, model=model)
    bills = (bill(workload, step_seconds=forecast.step_seconds, offer=offer) for offer in offers)
    return tuple(sorted(bills, key=lambda bill: bill.usd))


@dataclass(frozen=True)
class Asked:
    """What was asked of a card, for the answer to say."""

    kind: SpaceKind | None = None
    """None where one configuration is asked about, and no space."""
    held: Mapping[str, Any] = field(default_factory=dict)
    """Knobs that were typed: they are fixed, and the rest of the space is searched."""


@dataclass(frozen=True)
class CardPlan:
    """The plan of one card."""

    gpu: GpuSpec
    budget_bytes: int
    model: ModelSpec
    shown: Forecast | None
    """The configuration that is asked about, or the recommended one; None where nothing fits."""
    table: ShapeTable | None
    """Other sizes of that configuration; the fastest of the space at each where one is searched."""
    survey: Survey | None
    """Of the space; None where one configuration is asked about."""
    bills: tuple[Bill, ...]
    """Of the shown configuration, the cheapest first."""
    evidence: Evidence
    asked: Asked = Asked()

    @property
    def fits(self) -> bool:
        """Whether anything fits, by the best guess."""
        return self.shown is not None and bool(self.shown.fits)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing, and why."""
        return (*self.evidence.notes, *(self.shown.notes if self.shown is not None else ()))


def plan_space(
    survey: Survey,
    *,
    forecaster: Forecaster,
    work: AskedWork,
    offers: Sequence[Offer],
    asked: Asked = Asked("file"),
) -> CardPlan:
    """Return the plan of a space that was looked over: what it holds, and what is recommended."""
    plan = _card_plan(survey.recommended, forecaster, table=survey.table, work=work, offers=offers)
    return replace(plan, survey=survey, asked=asked)


def plan_configuration(
    config: TrialConfig, *, forecaster: Forecaster, work: AskedWork, offers: Sequence[Offer]
) -> CardPlan:
    """Return the plan of one configuration, whether it fits or not.

    Raises:
        InputError: memory cannot be predicted.
        EnvironmentFault: the tracing process does not answer.
    """
    asked = forecaster.forecast(config)
    if asked.memory is None and asked.broken is None:
        raise InputError(asked.notes[0])
    if asked.broken is not None and asked.broken.rule == UNBUILDABLE:
        raise InputError(asked.broken.reason)
    table = None if asked.memory is None else shape_table(forecaster, config)
    return _card_plan(asked, forecaster, table=table, work=work, offers=offers)


def _card_plan(
    shown: Forecast | None,
    forecaster: Forecaster,
    *,
    table: ShapeTable | None,
    work: AskedWork,
    offers: Sequence[Offer],
) -> CardPlan:
    model = forecaster.model
    return CardPlan(
        gpu=forecaster.gpu,
        budget_bytes=forecaster.budget_bytes,
        model=model,
        shown=shown,
        table=table,
        survey=None,
        bills=() if shown is None else bill_offers(shown, work=work, offers=offers, model=model),
        evidence=forecaster.evidence,
    )


@dataclass(frozen=True)
class CardComparison:
    """The same training on several cards: as many tokens, in steps of one effective batch."""

    chosen: Mapping[str, Forecast]
    """The configuration of each card, by its name."""
    workload: Workload
    """What each of them does."""
    bills: OfferComparison

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
        )
    ]
    if not bills:
        return None
    return CardComparison(chosen, bills[0].workload, compare_offers(bills))


def _rivals(able: Sequence[CardPlan], look: Look) -> dict[str, Forecast]:
    """Return the forecast of each card that can do the same training."""
    surveys = [(plan, plan.survey) for plan in able if plan.survey is not None]
    if len(surveys) < len(able):
        return {plan.gpu.name: plan.shown for plan in able if plan.shown is not None}
    shared = _shared_class([survey for _, survey in surveys])
    if shared is None:
        return {}
    own = {plan.gpu.name: survey.fastest_by_class[shared] for plan, survey in surveys}
    for whole in _effective_batches([forecast.config for forecast in own.values()]):
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


def _effective_batches(fastest: Sequence[TrialConfig]) -> Iterator[int]:
    """Yield effective batches that the cards may have in common, the better ones first.

    The largest step of any of them hardly accumulates; what all their micro-batches go into leaves
    each with its fastest configuration.
    """
    yield max(config.samples_per_step for config in fastest)
    yield math.lcm(*(config.samples_per_step for config in fastest))


def _accumulating(
    plan: CardPlan, space: SearchSpace, shared: TrialConfig, whole: int, look: Look
) -> Forecast | None:
    """Return a card's preferred way to make an effective batch, in the class and at the length of
    ``shared``; None where it has none.
    """
    held = {key: getattr(shared, key) for key in (*CAPACITY_KEYS, "seq_len")}
    try:
        return look(plan, with_fixed(space, {**held, "effective_batch_size": whole}))
    except InputError:
        return None
