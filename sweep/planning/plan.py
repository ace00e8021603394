"""A plan: everything there is to know of one GPU, what that costs, and what changes would do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, get_args

from search_spaces.config import TrialConfig, canonical
from search_spaces.errors import InputError, quote
from search_spaces.feasibility import obstacles
from search_spaces.gpus import GpuSpec
from search_spaces.knobs import CAPACITY_KEYS, KNOBS, TARGET_SETS
from search_spaces.linears import parameters
from search_spaces.models import ModelSpec
from search_spaces.prices import Offer
from storage.records import EpochRecord
from sweep.planning.sizes import ShapeTable, shape_table
from sweep.planning.spaces import NOT_ASKED, Asked
from sweep.planning.survey import Survey
from sweep.predict.cost import Bill, Workload, bill
from sweep.predict.forecast import (
    TRACED,
    UNBUILDABLE,
    Evidence,
    Forecast,
    Forecaster,
    Progress,
    silent,
)
from sweep.predict.memory.prediction import Fit
from sweep.predict.on_texts import ShapesOnTexts
from sweep.predict.speed.calibration import NINE_IN_TEN, ratio_spread

STEPS = 1000
"""Optimizer steps where nothing else is asked."""
AMOUNT_MAX = 1e15
"""More steps, samples or tokens than this is a slip."""
CHECKPOINT_BYTES = 2
"""Bytes of a parameter as models are published: bf16."""
WORTH_SPEED = 0.005
"""A smaller gain in speed, relative, is none."""
WORTH_MEMORY = 0.01
"""Nor is a smaller saving of memory, relative to the peak."""
SHOWN_OF_EACH = 4
"""Changes of one use that are worth a line."""
TASK_KEYS = (*CAPACITY_KEYS, "seq_len", "effective_batch_size", "lora_dropout", "compute_dtype")
"""Settings that change what is trained, or the class of numerics, which is a matter of the task and
no advice about a GPU."""


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


def bill_offers(
    forecast: Forecast, *, work: AskedWork, offers: Sequence[Offer]
) -> tuple[Bill, ...]:
    """Return the work's bills, the cheapest first; none where the speed is unknown."""
    if forecast.step_seconds is None:
        return ()
    config, asked = forecast.config, forecast.forecaster
    workload = work.workload(config, model=asked.model, shapes=asked.shapes)
    bills = [
        bill(
            workload,
            step_seconds=forecast.step_seconds,
            offer=offer,
            uncertainty=forecast.step_uncertainty,
            cards=config.data_parallel,
        )
        for offer in offers
    ]
    return tuple(sorted(bills, key=lambda bill: bill.usd))


class Use(IntEnum):
    """What a change is good for, the best first."""

    FASTER = 0
    LEANER = 1
    FASTER_WHERE_IT_FITS = 2
    """It would be faster on a card with more memory."""
    NONE = 3


@dataclass(frozen=True)
class WhatIf:
    """One knob turned."""

    key: str
    """The knob."""
    forecast: Forecast
    """Of the configuration with the change."""
    speed_change: float | None
    """In tokens/s, relative: both are the same card's, so that its error is in neither. None
    where no speed is known."""
    memory_change_bytes: int
    """In the allocated peak."""
    use: Use

    @property
    def value(self) -> Any:
        """What the knob is turned to."""
        return getattr(self.forecast.config, self.key)


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
    asked: Asked = NOT_ASKED
    shapes: ShapesOnTexts | None = None
    """What configurations come to on the texts; None without texts."""

    @property
    def epoch(self) -> EpochRecord | None:
        """One pass over the texts, as the shown configuration trains on them."""
        return None if self.shown is None else self.shown.epoch

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
        if self.survey is None or self.survey.found.least_bytes is not None:
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
    asked: Asked = NOT_ASKED,
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
    forecaster.prepare([config, *changes], on_progress=progress(TRACED))
    shown = forecaster.expect(config)
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
    bills = () if shown is None else bill_offers(shown, work=work, offers=offers)
    return CardPlan(
        gpu=forecaster.gpu,
        budget_bytes=forecaster.budget_bytes,
        model=forecaster.model,
        shown=shown,
        bills=bills,
        evidence=forecaster.evidence,
        shapes=forecaster.shapes,
        what_ifs=() if shown is None else what_ifs(shown, forecaster, progress=progress),
    )


def what_ifs(
    shown: Forecast, forecaster: Forecaster, *, progress: Progress = silent
) -> tuple[WhatIf, ...]:
    """Return every single change of a configuration, the most useful first.

    Empty where its own memory is not known.

    Raises:
        EnvironmentFault: the tracing process does not answer.
    """
    if shown.memory is None or shown.broken is not None:
        return ()
    changed = single_changes(shown.config, forecaster)
    forecasts = forecaster.forecast(list(changed), progress=progress)
    found = (_what_if(key, shown, forecasts[at]) for at, key in enumerate(changed.values()))
    return tuple(sorted(filter(None, found), key=_order))


def single_changes(config: TrialConfig, forecaster: Forecaster) -> dict[TrialConfig, str]:
    """Return every valid configuration with one setting changed, and which."""
    changes: dict[TrialConfig, str] = {}
    for key in KNOBS:
        for value in _other_values(key, config):
            try:
                changed = TrialConfig.model_validate({**config.model_dump(), key: value})
            except ValueError:
                continue
            if canonical(changed) != canonical(config) and forecaster.is_valid(changed):
                changes[changed] = key
    return changes


def few(changes: Iterable[WhatIf]) -> list[WhatIf]:
    """Return the changes that are worth a line: useful ones that leave the task what it is.

    Of each use a few, every knob before a second value of any.
    """
    useful = [one for one in changes if one.use is not Use.NONE and one.key not in TASK_KEYS]
    turned: Counter[tuple[Use, str]] = Counter()
    ranked: dict[Use, list[tuple[int, WhatIf]]] = {use: [] for use in Use}
    for change in useful:
        ranked[change.use].append((turned[change.use, change.key], change))
        turned[change.use, change.key] += 1
    shown = (sorted(of_use, key=lambda pair: pair[0]) for of_use in ranked.values())
    kept = [change for of_use in shown for _, change in of_use[:SHOWN_OF_EACH]]
    return sorted(kept, key=_order)


def _other_values(key: str, config: TrialConfig) -> Sequence[Any]:
    value, kind = getattr(config, key), TrialConfig.model_fields[key].annotation
    if key in _VALUES:
        values = _VALUES[key](value)
    elif kind is bool:
        values = (not value,)
    else:
        values = get_args(kind)
    return [other for other in dict.fromkeys(values) if other != value]


def _half_and_double(value: int | None) -> tuple[int, ...]:
    return () if value is None else (max(1, value // 2), value * 2)


_VALUES: Mapping[str, Callable[[Any], Sequence[Any]]] = {
    "lora_rank": _half_and_double,
    # It scales a product and changes neither speed nor memory.
    "lora_alpha": lambda _: (),
    "learning_rate": lambda _: (),
    "lora_dropout": lambda _: (0.0, 0.05),
    "target_modules": lambda _: TARGET_SETS,
    "micro_batch_size": _half_and_double,
    "seq_len": _half_and_double,
    "effective_batch_size": _half_and_double,
    "quantized_fraction": lambda _: (0.5, 1.0),
    "checkpoint_fraction": lambda value: (0.0, value / 2, 0.5, 1.0),
}
"""What numbers and lists are turned to, by key; words and truth values go through all of theirs."""


def _what_if(key: str, shown: Forecast, changed: Forecast) -> WhatIf | None:
    if changed.broken is not None or changed.memory is None or shown.memory is None:
        return None
    speed = None
    if shown.speed is not None and changed.speed is not None:
        # Also where the shown one was measured: a measurement against a prediction would tell more
        # of the prediction than of the change.
        speed = changed.speed.tokens_per_second / shown.speed.tokens_per_second - 1.0
    peak = shown.memory.peak_allocated_bytes
    saved = peak - changed.memory.peak_allocated_bytes
    use = Use.NONE
    if speed is not None and speed > WORTH_SPEED:
        use = Use.FASTER_WHERE_IT_FITS if changed.fit is Fit.NO else Use.FASTER
    elif changed.fit is not Fit.NO and saved > WORTH_MEMORY * peak:
        use = Use.LEANER
    return WhatIf(key, changed, speed, -saved, use)


def _order(change: WhatIf) -> tuple[Use, float]:
    """Return what sorts changes: by use, then by how much of it."""
    if change.use is Use.LEANER:
        return change.use, float(change.memory_change_bytes)
    return change.use, -(change.speed_change or 0.0)
