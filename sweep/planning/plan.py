"""A plan: everything there is to know of one GPU, what that costs, and what changes would do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
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
from qlora_sweep.search_spaces.rules import Setting, fp16_caveat
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.search_spaces.trainers import trainer_of
from qlora_sweep.sweep.planning.candidates import (
    NOT_ASKED,
    Asked,
    is_faster,
    recommended,
    single_changes,
    speed_order,
    speed_ratio,
)
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
TASK_KEYS = (*CAPACITY_KEYS, "seq_len", "effective_batch_size", "lora_dropout", "compute_dtype")
"""Settings that change what is trained, or the class of numerics, which is a matter of the task and
no advice about a GPU."""


def bill_offers(
    forecast: Forecast, *, work: AskedWork, offers: Sequence[Offer]
) -> tuple[Bill, ...]:
    """Return the work's bills, the cheapest first; none where the speed is unknown, or where what
    generation takes is."""
    step = forecast.step_seconds
    estimate = forecast.step_estimate
    ends = None if estimate is None else estimate.ends
    if step is None or forecast.config.method_kind.generates:
        return ()
    workload = workload_of(forecast, work)
    bills = [Bill(workload, o, step, ends, gpus=forecast.config.data_parallel) for o in offers]
    return tuple(sorted(bills, key=lambda bill: bill.usd))


def workload_of(forecast: Forecast, work: AskedWork) -> Workload:
    """Return the work as a configuration does it; of texts a sample is a row as it is trained."""
    config, shapes = forecast.config, forecast.forecaster.shapes
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
class CardPlan:
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
    asked: Asked = NOT_ASKED
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
        wide = None if self.survey is None else self.survey.fastest_by_numerics.get("16-bit")
        return None if wide is None else speed_ratio(forecast, wide)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing, and why, and what may come to nothing."""
        shown = self.obstacles if self.shown is None else self.shown.notes
        caveats = filter(None, [self.fp16_caveat, self.about_trainer])
        return (*self.forecaster.evidence.notes, *shown, *caveats)

    @property
    def fp16_caveat(self) -> str | None:
        """Why what is shown may come to nothing in fp16; None where nothing says so."""
        shown = self.shown
        return None if shown is None else fp16_caveat(shown.config, self.forecaster.model)

    @property
    def about_trainer(self) -> str | None:
        """What is predicted where another trainer is named, and how sure that is; None elsewhere,
        or where nothing is shown."""
        return None if self.shown is None else trainer_of(self.shown.config).about

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why the space has no configuration that the model and the GPU can run, where that is."""
        if self.survey is None or self.survey.found.least_bytes is not None:
            return ()
        has_texts = self.forecaster.shapes is not None
        setting = Setting(self.forecaster.model, "cuda", self.gpu.compute_capability, has_texts)
        broken = obstacles(self.survey.space, setting)
        return tuple(violation.reason for violation in broken)


def plan_card(
    looked_at: Survey | Forecast,
    *,
    work: AskedWork,
    offers: Sequence[Offer],
    asked: Asked = NOT_ASKED,
    progress: Progress = silent,
) -> CardPlan:
    """Return the plan of a space that was looked over, and what is recommended of it; or that of
    one configuration, whether it fits or not.

    Raises:
        InputError: the configuration's memory cannot be predicted.
        EnvironmentFault: the tracing process does not answer.
    """
    forecaster = looked_at.forecaster
    if isinstance(looked_at, Survey):
        survey, shown, table = looked_at, looked_at.recommended, looked_at.table
    else:
        survey, shown, table = None, looked_at, None
        if shown.memory is None and shown.violation is None:
            raise InputError(shown.notes[0])
        if shown.violation is not None and shown.violation.rule == UNBUILDABLE:
            raise InputError(shown.violation.reason)
        if shown.memory is not None:
            table = shape_table(forecaster, shown.config)
    return CardPlan(
        forecaster=forecaster,
        shown=shown,
        bills=() if shown is None else bill_offers(shown, work=work, offers=offers),
        table=table,
        survey=survey,
        what_ifs=() if shown is None else what_ifs(shown, progress=progress),
        asked=asked,
    )


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
    found = (_what_if(key, shown, forecasts[at]) for at, key in enumerate(changed.values()))
    return tuple(sorted(filter(None, found), key=_order))


def few(changes: Sequence[WhatIf]) -> list[WhatIf]:
    """Return the changes that are worth a line: useful ones that leave the task what it is.

    Of each use a few, every setting before a second value of any.
    """
    shown: list[WhatIf] = []
    for use in (Use.FASTER, Use.LEANER, Use.FASTER_WHERE_IT_FITS):
        turned: Counter[str] = Counter()
        ranked: list[tuple[int, WhatIf]] = []
        for one in changes:
            if one.use is use and one.key not in TASK_KEYS:
                ranked.append((turned[one.key], one))
                turned[one.key] += 1
        shown += [one for _, one in sorted(ranked, key=lambda pair: pair[0])[:SHOWN_OF_EACH]]
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
    lengths = sorted({base.seq_len, *(length for length in LENGTHS if length <= positions)})
    batches = [b for b in sorted({base.micro_batch_size, *BATCHES}) if base.takes_micro_batch(b)]
    sizes = [(batch, length) for batch in batches for length in lengths]
    forecasts = forecaster.forecast([reshaped(base, *size) for size in sizes])
    cells: dict[Size, Forecast] = {}
    for batch in batches:
        row = {size: forecasts[at] for at, size in enumerate(sizes) if size[0] == batch}
        cells |= row
        if batch >= base.micro_batch_size and all(cell.fit is Fit.NO for cell in row.values()):
            break
    shown = tuple(dict.fromkeys(batch for batch, _ in cells))
    largest = {length: _largest_batch(forecaster, base, length) for length in lengths}
    return ShapeTable(base, shown, tuple(lengths), cells, largest)


def reshaped(base: TrialConfig, batch: int, length: int) -> TrialConfig:
    """Return ``base`` at another size."""
    return base.changed(micro_batch_size=batch, seq_len=length)


def _largest_batch(forecaster: Forecaster, base: TrialConfig, length: int) -> LargestBatch:
    most = min(base.effective_batch_size or MICRO_BATCH_MAX, MICRO_BATCH_MAX)
    allowed = [batch for batch in range(1, most + 1) if base.takes_micro_batch(batch)]
    first = forecaster.forecast([reshaped(base, allowed[0], length)])[0]
    if first.violation is not None or first.memory is None:
        return LargestBatch(sure=0, possible=0)
    counts = fitting(
        allowed, lambda batch: forecaster.forecast([reshaped(base, batch, length)]).fit(0)
    )
    return LargestBatch(*(allowed[count - 1] if count else 0 for count in counts))


@dataclass(frozen=True)
class CardComparison:
    """The same training on several GPUs, or in several ways: as many tokens, in steps of one
    effective batch."""

    chosen: Mapping[str, Forecast]
    """The configuration of each, by `CardPlan.name`."""
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


def compare_cards(
    plans: Sequence[CardPlan],
    *,
    work: AskedWork,
    offers: Mapping[str, Sequence[Offer]],
    look: Look,
) -> CardComparison | None:
    """Return what the same training costs on several GPUs; None where fewer than two can do it.

    The same training means the same samples, of one length, in steps of one effective batch, for
    adapters of one capacity class. Each GPU does it with its own fastest configuration whose
    micro-batch goes into that batch, and accumulates the rest.
    """
    able = [plan for plan in plans if plan.fits]
    chosen = _rivals(able, look) if len(able) > 1 else {}
    if len(chosen) < 2:
        return None
    bills = [
        bill
        for gpu, forecast in chosen.items()
        for bill in bill_offers(forecast, work=work, offers=offers.get(gpu, ()))
    ]
    workload = workload_of(next(iter(chosen.values())), work)
    return CardComparison(chosen, workload, compare_offers(bills) if bills else None)


def _rivals(able: Sequence[CardPlan], look: Look) -> dict[str, Forecast]:
    """Return the forecast of each GPU that can do the same training."""
    surveys = {plan.name: plan.survey for plan in able if plan.survey is not None}
    if len(surveys) < len(able):
        return {plan.name: plan.shown for plan in able if plan.shown is not None}
    first, *others = (survey.fastest_by_class for survey in surveys.values())
    common = set(first).intersection(*others)
    # Of the class nearest to the standard one, the length that is fastest on the first GPU.
    model = able[0].forecaster.model
    capacity = nearest_capacity({key[0] for key in common}, model=model)
    best = recommended(first[key] for key in common if key[0] == capacity)
    if best is None:
        return {}
    shared = class_of(best.config, model)
    own = {gpu: survey.fastest_by_class[shared] for gpu, survey in surveys.items()}
    steps = [forecast.config.samples_per_step for forecast in own.values()]
    # The largest step of any of them hardly accumulates; what all their micro-batches go into
    # leaves each with its fastest configuration.
    for whole in (max(steps), math.lcm(*steps)):
        chosen = {
            gpu: own[gpu]
            if own[gpu].config.samples_per_step == whole
            else _accumulating(survey, own[gpu].config, whole, look)
            for gpu, survey in surveys.items()
        }
        fitting = {gpu: choice for gpu, choice in chosen.items() if choice and choice.fits}
        if len(fitting) == len(chosen):
            return fitting
    return {}


def _accumulating(survey: Survey, shared: TrialConfig, whole: int, look: Look) -> Forecast | None:
    """Return a GPU's preferred way to make an effective batch, in the class and at the length of
    ``shared``; None where it has none.
    """
    forecaster = survey.forecaster
    same = (*CAPACITY_KEYS, "seq_len", *(() if forecaster.shapes is None else ("packing",)))
    held = {key: getattr(shared, key) for key in same}
    try:
        return look(forecaster, with_fixed(survey.space, {**held, "effective_batch_size": whole}))
    except InputError:
        return None
