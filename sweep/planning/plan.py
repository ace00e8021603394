"""A plan: everything there is to know of one GPU, what that costs, and what changes would do."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from operator import attrgetter
from typing import Any

from qlora_sweep.search_spaces.config import CAPACITY_KEYS, MICRO_BATCH_MAX, TrialConfig
from qlora_sweep.search_spaces.costs import (
    AskedWork,
    Bill,
    OfferComparison,
    Workload,
    checkpoint_bytes,
    compare_offers,
    ties,
)
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.estimates import Estimate
from qlora_sweep.search_spaces.feasibility import obstacles
from qlora_sweep.search_spaces.gpus import GpuSpec
from qlora_sweep.search_spaces.linears import nearest_capacity
from qlora_sweep.search_spaces.loading import with_fixed
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.search_spaces.recurrent import needs_words
from qlora_sweep.search_spaces.rules import Setting, fp16_caveat, torch_for
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.search_spaces.trainers import trainer_of
from qlora_sweep.sweep.export.grpo import grpo_config
from qlora_sweep.sweep.planning.candidates import (
    NOT_ASKED,
    PlanOptions,
    is_faster,
    recommended,
    single_changes,
    speed_order,
    speed_ratio,
)
from qlora_sweep.sweep.planning.images import ImagePlan, plan_images
from qlora_sweep.sweep.planning.survey import (
    LargestBatch,
    ShapeTable,
    Size,
    Survey,
    class_of,
    fitting,
)
from qlora_sweep.sweep.predict.forecast import (
    UNBUILDABLE,
    Forecast,
    Forecaster,
    Progress,
    silent,
)
from qlora_sweep.sweep.predict.memory.prediction import Fit

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LENGTHS = (512, 1024, 2048, 4096)
"""Rows and columns of the table of one structure."""
WORTH_MEMORY = 0.01
"""Nor is a smaller saving of memory, relative to the peak."""
SHOWN_OF_EACH = 4
"""Changes of one use that are worth a line."""
TASK_KEYS = CAPACITY_KEYS + ("seq_len", "effective_batch_size", "lora_dropout", "compute_dtype")
"""Settings that change what is trained, or the class of numerics, which is a matter of the task and
no advice about a GPU."""


GENERATION = "is not in these numbers: neither its time nor its memory (the KV cache, or vLLM's)"
"""What the plan of GRPO's training step leaves out."""


def bill_offers(
    forecast: Forecast, *, work: AskedWork, offers: Sequence[Offer]
) -> tuple[Bill, ...]:
    """Return the work's bills, the cheapest first; none where the speed is unknown, or where what
    generation takes is."""
    seconds = forecast.step_seconds
    estimate = forecast.step_estimate
    config = forecast.config
    if seconds is None or config.method_kind.generates:
        return ()
    ends = None
    if estimate is not None:
        ends = estimate.ends
    workload = workload_of(forecast, work)
    bills = [Bill(workload, offer, seconds, ends, gpus=config.data_parallel) for offer in offers]
    return tuple(sorted(bills, key=lambda bill: bill.usd))


def workload_of(forecast: Forecast, work: AskedWork) -> Workload:
    """Return the work as a configuration does it; of a dataset a sample is a row as trained."""
    config = forecast.config
    shapes = forecast.forecaster.shapes
    size = checkpoint_bytes(forecast.forecaster.model)
    if shapes is None:
        return work.workload(config, download_bytes=size)
    epoch = shapes.epochs.record(config)
    return work.workload(
        config,
        tokens_per_sample=shapes.loss_tokens_per_step(config) / config.samples_per_step,
        epoch_steps=None if epoch is None else epoch.steps,
        download_bytes=size,
    )


class Use(IntEnum):
    """What a change is good for, the best first."""

    FASTER = 0
    LEANER = 1
    FASTER_WHERE_IT_FITS = 2
    """It would be faster on a GPU with more memory."""
    NONE = 3


@dataclass(frozen=True)
class WhatIf:
    """One setting turned."""

    key: str
    """The setting."""
    forecast: Forecast
    """Of the configuration with the change."""
    speed_change: float | None
    """In tokens/s, relative: both are the same GPU's, so that its error is in neither. None
    where no speed is known."""
    memory_change_bytes: int
    """In the allocated peak."""
    use: Use

    @property
    def value(self) -> Any:
        """What the setting is turned to."""
        return getattr(self.forecast.config, self.key)


@dataclass(frozen=True)
class GpuPlan:
    """The plan of one GPU."""

    forecaster: Forecaster
    """What was asked about the GPU."""
    shown: Forecast | None
    """The configuration that is asked about, or the recommended one; None where nothing fits."""
    bills: tuple[Bill, ...]
    """Of the shown configuration, the cheapest first."""
    table: ShapeTable | None = None
    """Other sizes of that configuration; the fastest of the space at each where one is searched."""
    survey: Survey | None = None
    """Of the space; None where one configuration is asked about."""
    what_ifs: tuple[WhatIf, ...] = ()
    """Single changes of the shown configuration, the most useful first."""
    images: ImagePlan | None = None
    """Other sizes of its images; None where it has none."""
    asked: PlanOptions = NOT_ASKED
    way: str = ""
    """How many of the GPU train together, and how, where that is asked."""

    @property
    def gpu(self) -> GpuSpec:
        """The GPU that is asked about."""
        return self.forecaster.gpu

    @property
    def name(self) -> str:
        """What it is called beside other plans."""
        return self.way or self.gpu.name

    @property
    def fits(self) -> bool:
        """Whether anything fits, by the best guess."""
        return self.shown is not None and bool(self.shown.fits)

    def times_16_bit(self, forecast: Forecast) -> Estimate | None:
        """Return how many times as fast as the fastest in 16 bits a forecast of the space is; None
        where either has no prediction."""
        if self.survey is None:
            return None
        wide = self.survey.fastest_by_numerics.get("16-bit")
        return None if wide is None else speed_ratio(forecast, wide)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing and why, and what may fail."""
        notes = list(filter(None, [self.kernels_needed, *self.forecaster.evidence.notes]))
        if self.shown is None:
            notes += self.obstacles
        else:
            notes += self.shown.notes
        notes += filter(None, [self.fp16_caveat, self.about_trainer])
        return tuple(notes)

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Those, and what the GPU needs and the figures leave out."""
        notes = list(self.notes)
        needed = torch_for(self.gpu.compute_capability)
        if needed is not None:
            notes.append(needed)
        if self.grpo_config is not None:
            notes.append(f"generation {GENERATION}")
        return tuple(notes)

    @property
    def kernels_needed(self) -> str | None:
        """What the model's recurrent layers need to be as predicted; None where they need nothing,
        or nothing is shown."""
        return None if self.shown is None else needs_words(self.forecaster.model)

    @property
    def fp16_caveat(self) -> str | None:
        """Why what is shown may fail in fp16; None where nothing says so."""
        if self.shown is None:
            return None
        return fp16_caveat(self.shown.config, self.forecaster.model)

    @property
    def about_trainer(self) -> str | None:
        """What is predicted where another trainer is named, and how sure that is; None elsewhere,
        or where nothing is shown."""
        return None if self.shown is None else trainer_of(self.shown.config).about

    @property
    def grpo_config(self) -> dict[str, Any] | None:
        """What TRL's `GRPOConfig` takes for what is shown; None under other methods."""
        if not self.asked.grpo or self.shown is None:
            return None
        rate = self.shown.learning_rate.value
        return grpo_config(self.shown.config, self.asked.grpo, learning_rate=rate)

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why the space has no configuration that the model and the GPU can run, where that is."""
        if self.survey is None or self.survey.found.least_bytes is not None:
            return ()
        has_dataset = self.forecaster.shapes is not None
        setting = Setting(self.forecaster.model, "cuda", self.gpu.compute_capability, has_dataset)
        broken = obstacles(self.survey.space, setting)
        return tuple(map(attrgetter("reason"), broken))


def plan_gpu(
    looked_at: Survey | Forecast,
    *,
    work: AskedWork,
    offers: Sequence[Offer],
    asked: PlanOptions = NOT_ASKED,
    progress: Progress = silent,
) -> GpuPlan:
    """Return the plan of a space that was looked over, and what is recommended of it; or that of
    one configuration, whether it fits or not.

    Raises:
        InputError: the configuration's memory cannot be predicted.
        EnvironmentFault: the tracing process does not answer.
    """
    survey = None
    table = None
    if isinstance(looked_at, Survey):
        survey = looked_at
        shown = looked_at.recommended
        table = looked_at.table
    else:
        shown = looked_at
        if shown.memory is None and shown.violation is None:
            raise InputError(shown.notes[0])
        if shown.violation is not None and shown.violation.rule == UNBUILDABLE:
            raise InputError(shown.violation.reason)
        if shown.memory is not None:
            table = shape_table(shown.forecaster, shown.config)
    plan = GpuPlan(looked_at.forecaster, shown, (), table=table, survey=survey, asked=asked)
    if shown is None:
        return plan
    bills = bill_offers(shown, work=work, offers=offers)
    changes = what_ifs(shown, progress=progress)
    images = plan_images(shown, is_exact=survey is None, progress=progress)
    return replace(plan, bills=bills, what_ifs=changes, images=images)


def what_ifs(shown: Forecast, *, progress: Progress = silent) -> tuple[WhatIf, ...]:
    """Return every single change of a configuration, the most useful first.

    Empty where its own memory is not known.

    Raises:
        EnvironmentFault: the tracing process does not answer.
    """
    if shown.memory is None or shown.violation is not None:
        return ()
    changed = single_changes(shown.config, shown.forecaster)
    forecasts = shown.forecaster.forecast(list(changed), progress=progress)
    found: list[WhatIf] = []
    for key, forecast in zip(changed.values(), forecasts, strict=True):
        change = _what_if(key, shown, forecast)
        if change is not None:
            found.append(change)
    return tuple(sorted(found, key=_order))


def few(changes: Sequence[WhatIf]) -> list[WhatIf]:
    """Return the changes that are worth a line: useful ones that leave the task what it is.

    Of each use a few, every setting before a second value of any.
    """
    shown: list[WhatIf] = []
    for use in (Use.FASTER, Use.LEANER, Use.FASTER_WHERE_IT_FITS):
        values_of: Counter[str] = Counter()
        rounds: dict[int, list[WhatIf]] = {}
        for change in changes:
            if change.use is use and change.key not in TASK_KEYS:
                rounds.setdefault(values_of[change.key], []).append(change)
                values_of[change.key] += 1
        shown += itertools.islice(itertools.chain(*rounds.values()), SHOWN_OF_EACH)
    return sorted(shown, key=_order)


def _what_if(key: str, shown: Forecast, changed: Forecast) -> WhatIf | None:
    if changed.violation is not None or changed.memory is None or shown.memory is None:
        return None
    speed = None
    if shown.speed is not None and changed.speed is not None:
        # Also where the shown one was measured: a measurement against a prediction would tell more
        # of the prediction than of the change.
        speed = changed.speed.tokens_per_second / shown.speed.tokens_per_second - 1.0
    peak = shown.memory.peak_allocated_bytes
    saved = peak - changed.memory.peak_allocated_bytes
    use = Use.NONE
    if is_faster(changed, shown):
        use = Use.FASTER_WHERE_IT_FITS if changed.fit is Fit.NO else Use.FASTER
    elif changed.fit is not Fit.NO and saved > WORTH_MEMORY * peak:
        use = Use.LEANER
    return WhatIf(key, changed, speed, -saved, use)


def _order(change: WhatIf) -> tuple[Use, float]:
    """Return what sorts changes: by use, then by how much of it."""
    if change.use is Use.LEANER:
        return change.use, float(change.memory_change_bytes)
    return change.use, -(change.speed_change or 0.0)


def shape_table(forecaster: Forecaster, base: TrialConfig) -> ShapeTable:
    """Return ``base`` at every size; its own size is among them.

    Lengths beyond the model's positions are left out, as are micro-batches that the effective batch
    is no multiple of. Batches end with the first one that fits at no length.
    """
    positions = forecaster.model.max_positions or max(base.seq_len, *LENGTHS)
    lengths = sorted({length for length in LENGTHS if length <= positions} | {base.seq_len})
    batches = sorted({base.micro_batch_size}.union(BATCHES))
    batches = list(filter(base.takes_micro_batch, batches))
    sizes = list(itertools.product(batches, lengths))
    forecasts = forecaster.forecast(list(itertools.starmap(partial(reshaped, base), sizes)))
    by_size = dict(zip(sizes, forecasts, strict=True))
    cells: dict[Size, Forecast] = {}
    shown: list[int] = []
    for batch in batches:
        shown.append(batch)
        fits_somewhere = False
        for length in lengths:
            cell = by_size[batch, length]
            cells[batch, length] = cell
            fits_somewhere |= cell.fit is not Fit.NO
        if batch >= base.micro_batch_size and not fits_somewhere:
            break
    largest = {length: _largest_batch(forecaster, base, length) for length in lengths}
    return ShapeTable(base, tuple(shown), tuple(lengths), cells, largest)


def reshaped(base: TrialConfig, batch: int, length: int) -> TrialConfig:
    """Return ``base`` at another size."""
    return base.changed(micro_batch_size=batch, seq_len=length)


def _largest_batch(forecaster: Forecaster, base: TrialConfig, length: int) -> LargestBatch:
    most = min(base.effective_batch_size or MICRO_BATCH_MAX, MICRO_BATCH_MAX)
    allowed = list(filter(base.takes_micro_batch, range(1, most + 1)))
    first = forecaster.forecast([reshaped(base, allowed[0], length)])[0]
    if first.violation is not None or first.memory is None:
        return LargestBatch(sure=0, possible=0)
    sure, possible = fitting(
        allowed, lambda batch: forecaster.forecast([reshaped(base, batch, length)]).fit(0)
    )
    # Of none it is 0.
    allowed.insert(0, 0)
    return LargestBatch(allowed[sure], allowed[possible])


@dataclass(frozen=True)
class PlanComparison:
    """The same training on several GPUs, or in several ways: as many tokens, in steps of one
    effective batch."""

    chosen: Mapping[str, Forecast]
    """The configuration of each, by `GpuPlan.name`."""
    workload: Workload
    """What each of them does."""
    bills: OfferComparison | None
    """None where no price of any of them is known."""

    @property
    def perhaps_fastest(self) -> tuple[str, ...]:
        """The GPUs that may be the fastest, by what is predicted; one where that is sure."""
        return perhaps_fastest(self.chosen)

    @property
    def perhaps_best(self) -> tuple[str, ...]:
        """The GPUs that may be the cheapest, or the fastest where no price is known; the first is
        recommended."""
        if self.bills is None:
            return self.perhaps_fastest
        return tuple(dict.fromkeys(bill.offer.gpu for bill in self.bills.perhaps_cheapest))

    @property
    def effective_batch_size(self) -> int:
        """Sequences per optimizer step, on every GPU."""
        return self.workload.samples_per_step

    @property
    def seq_len(self) -> int:
        """Tokens in every sequence, on every GPU."""
        return next(iter(self.chosen.values())).config.seq_len


def perhaps_fastest(chosen: Mapping[str, Forecast]) -> tuple[str, ...]:
    """Return the names of those that may be the fastest, by what is predicted; one where that is
    sure."""
    ranked = sorted(chosen, key=lambda name: speed_order(chosen[name]), reverse=True)
    return ties(ranked, lambda one, other: speed_ratio(chosen[one], chosen[other]))


Look = Callable[[Forecaster, SearchSpace | TrialConfig], Forecast | None]
"""Returns what to prefer of a space on the GPU of a forecaster; a configuration's own forecast."""


def compare_gpus(
    plans: Sequence[GpuPlan],
    *,
    work: AskedWork,
    offers: Mapping[str, Sequence[Offer]],
    look: Look,
) -> PlanComparison | None:
    """Return what the same training costs on several GPUs; None where fewer than two can do it.

    The same training means the same samples, of one length, in steps of one effective batch, for
    adapters of one capacity class. Each GPU does it with its own fastest configuration whose
    micro-batch goes into that batch, and accumulates the rest.
    """
    able = [plan for plan in plans if plan.fits]
    if len(able) < 2:
        return None
    chosen = _rivals(able, look)
    if len(chosen) < 2:
        return None
    bills: list[Bill] = []
    for gpu, forecast in chosen.items():
        bills += bill_offers(forecast, work=work, offers=offers.get(gpu, ()))
    workload = workload_of(next(iter(chosen.values())), work)
    costs = None
    if bills:
        costs = compare_offers(bills)
    return PlanComparison(chosen, workload, costs)


def _rivals(able: Sequence[GpuPlan], look: Look) -> dict[str, Forecast]:
    """Return the forecast of each GPU that can do the same training."""
    surveys = {plan.name: plan.survey for plan in able if plan.survey is not None}
    if len(surveys) < len(able):
        return {plan.name: plan.shown for plan in able if plan.shown is not None}
    first = next(iter(surveys.values())).fastest_by_class
    common = set(first)
    for survey in surveys.values():
        common &= survey.fastest_by_class.keys()
    # Of the class nearest to the standard one, the length that is fastest on the first GPU.
    model = able[0].forecaster.model
    capacity = nearest_capacity({key[0] for key in common}, model=model)
    best = recommended(first[key] for key in common if key[0] == capacity)
    if best is None:
        return {}
    shared = class_of(best.config, model)
    fastest = {gpu: survey.fastest_by_class[shared] for gpu, survey in surveys.items()}
    steps = [forecast.config.samples_per_step for forecast in fastest.values()]
    # The largest step of any of them hardly accumulates; what all their micro-batches go into
    # leaves each with its fastest configuration.
    for whole in (max(steps), math.lcm(*steps)):
        chosen: dict[str, Forecast] = {}
        for gpu, survey in surveys.items():
            choice: Forecast | None = fastest[gpu]
            if fastest[gpu].config.samples_per_step != whole:
                choice = _accumulating(survey, fastest[gpu].config, whole, look)
            if choice is not None and choice.fits:
                chosen[gpu] = choice
        if len(chosen) == len(surveys):
            return chosen
    return {}


def _accumulating(survey: Survey, shared: TrialConfig, whole: int, look: Look) -> Forecast | None:
    """Return a GPU's preferred way to make an effective batch, in the class and at the length of
    ``shared``; None where it has none.
    """
    forecaster = survey.forecaster
    fixed = {**shared.capacity(), "seq_len": shared.seq_len, "effective_batch_size": whole}
    if forecaster.shapes is not None:
        fixed["packing"] = shared.packing
    try:
        return look(forecaster, with_fixed(survey.space, fixed))
    except InputError:
        return None
