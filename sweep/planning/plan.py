"""Owns a plan: everything there is to know of one card.

Also how much training is asked about, and what it costs by offer. Pure: space or configuration,
forecaster and offers in, a plan out. Billing itself is `sweep.predict.cost`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, quote
from search_spaces.feasibility import obstacles
from search_spaces.gpus import GpuSpec
from search_spaces.linears import parameters
from search_spaces.models import ModelSpec
from search_spaces.prices import Offer
from storage.records import EpochRecord
from sweep.planning.evidence import Evidence
from sweep.planning.forecast import UNBUILDABLE, Forecast, Forecaster, Progress, silent
from sweep.planning.spaces import SpaceKind
from sweep.planning.survey import Survey
from sweep.planning.table import ShapeTable, shape_table
from sweep.planning.whatif import WhatIf, single_changes, what_ifs
from sweep.predict.cost import Bill, Workload, bill
from sweep.predict.on_texts import ShapesOnTexts
from sweep.predict.speed.calibration import NINE_IN_TEN
from sweep.predict.speed.log_factors import ratio_spread

STEPS = 1000
"""Optimizer steps where nothing else is asked."""
AMOUNT_MAX = 1e15
"""More steps, samples or tokens than this is a slip."""
CHECKPOINT_BYTES = 2
"""Bytes of a parameter as models are published: bf16."""


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
    has_texts: bool = False
    """Whether there are texts, of which an epoch is asked about where nothing else is."""

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
        download = float((parameters(model) or 0) * CHECKPOINT_BYTES)
        each: dict[str, Any] = {
            "samples_per_step": per_step,
            "tokens_per_sample": per_sample,
            "download_bytes": download,
        }
        if self.samples is not None:
            return Workload.of_samples(self.samples, **each)
        if self.tokens is not None:
            return Workload.of_tokens(self.tokens, **each)
        if self.dataset_samples is not None:
            epochs = 1.0 if self.epochs is None else self.epochs
            return Workload.of_epochs(epochs, dataset_samples=self.dataset_samples, **each)
        steps = STEPS if self.steps is None else self.steps
        epoch = None if shapes is None else shapes.epochs.record(config)
        if epoch is not None and self.steps is None:
            steps = math.ceil(epoch.steps * (self.epochs or 1.0))
        return Workload(steps, **each)


def epoch_of(forecast: Forecast | None, shapes: ShapesOnTexts | None) -> EpochRecord | None:
    """Return one pass over the texts as a configuration trains on them; None without texts."""
    if forecast is None or shapes is None:
        return None
    return shapes.epochs.record(forecast.config)


def bill_offers(
    forecast: Forecast,
    *,
    work: AskedWork,
    offers: Sequence[Offer],
    model: ModelSpec,
    shapes: ShapesOnTexts | None = None,
) -> tuple[Bill, ...]:
    """Return the work's bills, the cheapest first; none where the speed is unknown."""
    if forecast.step_seconds is None:
        return ()
    workload = work.workload(forecast.config, model=model, shapes=shapes)
    bills = (
        bill(
            workload,
            step_seconds=forecast.step_seconds,
            offer=offer,
            uncertainty=forecast.step_uncertainty,
            cards=forecast.config.data_parallel,
        )
        for offer in offers
    )
    return tuple(sorted(bills, key=lambda bill: bill.usd))


@dataclass(frozen=True)
class Asked:
    """What was asked of a card, for the answer to say."""

    kind: SpaceKind | None = None
    """None where one configuration is asked about, and no space."""
    held: Mapping[str, Any] = field(default_factory=dict)
    """Settings that were typed: they are fixed, and the rest of the space is searched."""
    run_command: str = ""
    """What to type to measure on the GPU what is searched here."""


@dataclass(frozen=True)
class CardPlan:
    """The plan of one card."""

    gpu: GpuSpec
    budget_bytes: int
    model: ModelSpec
    shown: Forecast | None
    """The configuration that is asked about, or the recommended one; None where nothing fits."""
    bills: tuple[Bill, ...]
    """Of the shown configuration, the cheapest first."""
    evidence: Evidence
    table: ShapeTable | None = None
    """Other sizes of that configuration; the fastest of the space at each where one is searched."""
    survey: Survey | None = None
    """Of the space; None where one configuration is asked about."""
    what_ifs: tuple[WhatIf, ...] = ()
    """Single changes of the shown configuration, the most useful first."""
    asked: Asked = Asked()
    shapes: ShapesOnTexts | None = None
    """What configurations come to on the texts; None without texts."""

    @property
    def epoch(self) -> EpochRecord | None:
        """One pass over the texts, as the shown configuration trains on them."""
        return epoch_of(self.shown, self.shapes)

    @property
    def fits(self) -> bool:
        """Whether anything fits, by the best guess."""
        return self.shown is not None and bool(self.shown.fits)

    def times_16_bit(self, forecast: Forecast) -> tuple[float, float, float] | None:
        """Return how many times as fast as the fastest in 16 bits a forecast of the space is, and
        between what nine in ten such ratios are; None where either has no prediction."""
        wide = None if self.survey is None else self.survey.fastest_by_numerics.get("16-bit")
        if wide is None or wide.speed is None or forecast.speed is None:
            return None
        times = forecast.speed.tokens_per_second / wide.speed.tokens_per_second
        spread = ratio_spread(forecast.config, wide.config, model=self.model, gpu=self.gpu)
        doubt = math.exp(NINE_IN_TEN * spread)
        return times, times / doubt, times * doubt

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing, and why."""
        shown = self.obstacles if self.shown is None else self.shown.notes
        return (*self.evidence.notes, *shown)

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why the space has no configuration that the model and the GPU can run, where that is."""
        if self.survey is None or self.survey.least_bytes is not None:
            return ()
        broken = obstacles(
            self.survey.space,
            model=self.model,
            compute_capability=self.gpu.compute_capability,
            device="cuda",
            has_texts=self.shapes is not None,
        )
        return tuple(violation.reason for violation in broken)


def plan_space(
    survey: Survey,
    *,
    forecaster: Forecaster,
    work: AskedWork,
    offers: Sequence[Offer],
    asked: Asked = Asked("file"),
    progress: Progress = silent,
) -> CardPlan:
    """Return the plan of a space that was looked over: what it holds, and what is recommended."""
    made = _plan_of(survey.recommended, forecaster, work=work, offers=offers, progress=progress)
    return replace(made, table=survey.table, survey=survey, asked=asked)


def plan_configuration(
    config: TrialConfig,
    *,
    forecaster: Forecaster,
    work: AskedWork,
    offers: Sequence[Offer],
    progress: Progress = silent,
) -> CardPlan:
    """Return the plan of one configuration, whether it fits or not.

    Raises:
        InputError: memory cannot be predicted.
        EnvironmentFault: the tracing process does not answer.
    """
    # Together with what is asked next, as starting to trace takes longer than tracing it.
    changes = () if forecaster.broken(config) else single_changes(config, forecaster)
    forecaster.prepare([config, *changes], progress=progress)
    shown = forecaster.forecast(config)
    if shown.memory is None and shown.broken is None:
        raise InputError(shown.notes[0])
    if shown.broken is not None and shown.broken.rule == UNBUILDABLE:
        raise InputError(shown.broken.reason)
    made = _plan_of(shown, forecaster, work=work, offers=offers, progress=progress)
    return replace(made, table=None if shown.memory is None else shape_table(forecaster, config))


def _plan_of(
    shown: Forecast | None,
    forecaster: Forecaster,
    *,
    work: AskedWork,
    offers: Sequence[Offer],
    progress: Progress,
) -> CardPlan:
    model, shapes = forecaster.model, forecaster.shapes
    return CardPlan(
        gpu=forecaster.gpu,
        budget_bytes=forecaster.budget_bytes,
        model=model,
        shown=shown,
        bills=()
        if shown is None
        else bill_offers(shown, work=work, offers=offers, model=model, shapes=shapes),
        evidence=forecaster.evidence,
        shapes=shapes,
        what_ifs=() if shown is None else what_ifs(shown, forecaster, progress=progress),
    )
