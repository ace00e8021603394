"""Plans read backwards: the GPUs that do a job, and the longest sequences that fit."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.costs import SECONDS_PER_HOUR, AskedWork, Bill, Workload, ratio, ties
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.feasibility import obstacles
from qlora_sweep.search_spaces.gpus import GpuSpec
from qlora_sweep.search_spaces.linears import CapacityClass, nearest_capacity
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.search_spaces.rules import Setting
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.search_spaces.vision import least_length, seen_image
from qlora_sweep.sweep.planning.candidates import NOT_ASKED, PlanOptions, recommended, shown_batches
from qlora_sweep.sweep.planning.plan import BATCHES, bill_offers, reshaped
from qlora_sweep.sweep.planning.survey import forecasts_of
from qlora_sweep.sweep.predict.forecast import Forecast, Forecaster, Forecasts, Progress, silent
from qlora_sweep.sweep.predict.memory.prediction import Fit
from qlora_sweep.sweep.predict.shortlist import Shortlist, structures

EFFECTIVE_BATCH = 16
"""Default sequences of a step: QLoRA's for 7 B and 13 B (arXiv 2305.14314, B.2)."""
JOB_KEYS = ("lora_rank", "target_modules", "seq_len")
"""What makes a training the same on every GPU, beside the effective batch."""

LEANEST = 12
"""Structures by which the longest length is looked for."""
LENGTH_STEP = 64
"""The longest sequences are multiples of this."""
POSITIONS_MAX = 1_048_576
"""Lengths end here where a model's config names no last position."""

NOTHING: Mapping[str, Any] = {}


def job(
    fixed_settings: Mapping[str, Any],
    *,
    fixed: Mapping[str, Any] = NOTHING,
    spaces: Sequence[SearchSpace] = (),
) -> dict[str, Any]:
    """Return settings that are fixed on every GPU: what was typed, and the standard recipe's rank,
    modules, length and effective batch.

    Args:
        fixed_settings: what was typed.
        fixed: what the space that was named has no other value of.
        spaces: what would be searched; none where one configuration is asked about.
    """
    given: dict[str, Any] = {}
    for key, value in {**fixed, **fixed_settings}.items():
        if value is not None:
            given[key] = value
    standard = TrialConfig()
    made_same: dict[str, Any] = {}
    for key in JOB_KEYS:
        made_same[key] = given.get(key, getattr(standard, key))
    effective = whole_step(EFFECTIVE_BATCH, fixed_settings=given, spaces=spaces)
    made_same["effective_batch_size"] = given.get("effective_batch_size", effective)
    return {**made_same, **fixed_settings}


def whole_step(
    least: int, *, fixed_settings: Mapping[str, Any], spaces: Sequence[SearchSpace] = ()
) -> int:
    """Return the fewest samples of an optimizer step, so many at least, that the GPUs of a trial
    make of whole micro-batches: of those that are fixed, else of each space's smallest, or of the
    standard recipe's where there is no space.
    """
    multiples: list[int] = []
    for space in spaces or (None,):
        micro_batches = _values("micro_batch_size", fixed_settings, space)
        gpus = _values("data_parallel", fixed_settings, space)
        multiples.append(min(micro_batches) * math.lcm(*gpus))
    multiple = math.lcm(*multiples)
    return -(-least // multiple) * multiple


def _values(
    key: str, fixed_settings: Mapping[str, Any], space: SearchSpace | None
) -> tuple[int, ...]:
    """Return the values of a setting that are asked about."""
    if fixed_settings.get(key) is not None:
        return (fixed_settings[key],)
    if space is None:
        return (getattr(TrialConfig(), key),)
    return space.values_of(key)


class Outcome(Enum):
    """What becomes of the job on one GPU."""

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


ABLE = frozenset({Outcome.IN_TIME, Outcome.PERHAPS_LATE})
_KINDS = (ABLE, frozenset({Outcome.PERHAPS_IN_TIME}), frozenset({Outcome.TOO_SLOW}))
"""Of offers with a price, the surest first."""


@dataclass(frozen=True)
class GpuForJob:
    """The job on one GPU."""

    gpu: GpuSpec
    outcome: Outcome
    forecast: Forecast | None
    """The configuration to prefer there; None where nothing fits."""
    bills: tuple[Bill, ...] = ()
    """The offers that may be in time, the cheapest first; all of them where none may."""
    reason: str = ""
    """Why it is not possible, or has no price."""
    least_bytes: int | None = None
    """The least that any configuration needs, where the GPU is too small."""
    fault: InputError | None = None
    """Why memory is predicted of no configuration."""

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
    """What a job costs on every GPU."""

    model: ModelSpec
    workload: Workload | None
    """None where no GPU can do it."""
    fixed_settings: Mapping[str, Any]
    deadline_seconds: float | None
    gpus: tuple[GpuForJob, ...]
    """Those that do the job, the cheapest first, then the others by name."""

    @property
    def able(self) -> tuple[GpuForJob, ...]:
        """The GPUs that do the job in time, as predicted, the cheapest first."""
        return self.that(*ABLE)

    @property
    def fits(self) -> bool:
        """Whether any GPU does the job in time."""
        return bool(self.able)

    @property
    def cheapest(self) -> GpuForJob | None:
        """The cheapest of them, by what is predicted."""
        return self.able[0] if self.able else None

    @property
    def perhaps_cheapest(self) -> tuple[GpuForJob, ...]:
        """The GPUs that may be the cheapest, by what is predicted; one where that is sure."""
        return ties(self.able, lambda one, other: ratio(one.bill, other.bill))

    @property
    def smallest(self) -> GpuForJob | None:
        """Of the able GPUs the one with least memory; of several the cheapest."""
        return min(self.able, key=lambda for_job: for_job.gpu.memory_bytes, default=None)

    def that(self, *outcomes: Outcome) -> tuple[GpuForJob, ...]:
        """Return the GPUs with one of these outcomes."""
        return tuple(for_job for for_job in self.gpus if for_job.outcome in outcomes)


def on_gpu(
    about: SearchSpace | TrialConfig,
    forecaster: Forecaster,
    *,
    work: AskedWork,
    offers: Sequence[Offer],
    deadline_seconds: float | None,
    progress: Progress = silent,
) -> GpuForJob:
    """Return what becomes of the job on one GPU, in the configuration to recommend there.

    Raises:
        EnvironmentFault: the tracing process does not answer.
    """
    gpu = forecaster.gpu
    try:
        if isinstance(about, TrialConfig):
            best, least = _of_one(about, forecaster, progress)
        else:
            best, least = _of_space(about, forecaster, progress)
    except InputError as fault:
        return GpuForJob(gpu, Outcome.FORBIDDEN, None, reason=str(fault), fault=fault)
    except _Forbidden as rule:
        return GpuForJob(gpu, Outcome.FORBIDDEN, None, reason=str(rule))
    if best is None:
        return GpuForJob(gpu, Outcome.TOO_SMALL, None, least_bytes=least)
    bills = bill_offers(best, work=work, offers=offers)
    if not bills:
        reason = ""
        if best.speed is None and best.notes:
            reason = best.notes[0]
        return GpuForJob(gpu, Outcome.NO_PRICE, best, reason=reason)
    return _in_time(gpu, best, bills, deadline_seconds)


class _Forbidden(Exception):  # noqa: N818 - the name says what happened
    """A rule forbids every configuration."""


def _of_one(
    config: TrialConfig, forecaster: Forecaster, progress: Progress
) -> tuple[Forecast | None, int | None]:
    """Return what is expected of a configuration; of one that cannot fit, the least it needs."""
    broken = forecaster.violation(config)
    if broken is not None:
        raise _Forbidden(broken.reason)
    forecasts = forecaster.forecast([config], progress=progress)
    if forecasts.unpredicted:
        raise forecasts.unpredicted[0]
    if forecasts.fit(0) is Fit.NO:
        return None, int(forecasts.least_bytes[0])
    return forecasts[0], None


def _of_space(
    space: SearchSpace, forecaster: Forecaster, progress: Progress
) -> tuple[Forecast | None, int | None]:
    """Return what is recommended of a space; where nothing fits, the least that anything needs."""
    shortlist = Shortlist(space, forecaster, progress=progress)
    picks = shortlist.picks()
    if not picks and shortlist.least_bytes is None:
        setting = Setting(
            forecaster.model,
            "cuda",
            forecaster.gpu.compute_capability,
            forecaster.shapes is not None,
        )
        for violation in obstacles(space, setting):
            raise _Forbidden(violation.reason)
        raise _Forbidden("no configuration")
    return recommended(forecasts_of(picks, forecaster)), shortlist.least_bytes


def _in_time(
    gpu: GpuSpec, best: Forecast, bills: tuple[Bill, ...], deadline_seconds: float | None
) -> GpuForJob:
    """Return the GPU with the offers that are in time; of those that may be, the surest kind."""
    hours = math.inf
    if deadline_seconds is not None:
        hours = deadline_seconds / SECONDS_PER_HOUR
    for kind in _KINDS:
        of_kind = [bill for bill in bills if _outcome(bill, hours) in kind]
        if of_kind:
            return GpuForJob(gpu, _outcome(of_kind[0], hours), best, tuple(of_kind))
    raise AssertionError("each outcome is of a kind")


def _outcome(bill: Bill, hours: float) -> Outcome:
    """Return whether an offer does the job within so many hours."""
    soonest, latest = bill.extremes
    if bill.wall_hours <= hours:
        return Outcome.IN_TIME if latest.wall_hours <= hours else Outcome.PERHAPS_LATE
    return Outcome.TOO_SLOW if soonest.wall_hours > hours else Outcome.PERHAPS_IN_TIME


def ranked(gpus: Sequence[GpuForJob]) -> tuple[GpuForJob, ...]:
    """Return the GPUs that do the job, the cheapest first, then the others by name."""
    able: list[GpuForJob] = []
    others: list[GpuForJob] = []
    for for_job in gpus:
        if for_job.is_able:
            able.append(for_job)
        else:
            others.append(for_job)
    able.sort(key=lambda for_job: for_job.bill.usd)
    others.sort(key=lambda for_job: for_job.gpu.name)
    return tuple(able + others)


@dataclass(frozen=True)
class LongestRow:
    """The longest sequences at one micro-batch."""

    micro_batch_size: int
    seq_len: int
    """The longest that surely fits; 0 where none does."""
    possible: int
    """The longest that is not surely too long."""
    forecast: Forecast | None
    """The fastest that surely fits at ``seq_len``; None where none does."""


@dataclass(frozen=True)
class Longest:
    """The longest sequences on one GPU."""

    forecaster: Forecaster
    """What was asked about the GPU."""
    asked: PlanOptions
    shortest: int
    """The shortest that was asked about: an image has to go into it."""
    limit: int
    """The longest that was asked about: what the model has positions for."""
    configurations: int
    """Structures that were tried at each size, all of one capacity class."""
    rows: tuple[LongestRow, ...]
    """By micro-batch, up to the first at which nothing fits."""

    @property
    def best(self) -> LongestRow | None:
        """The longest of all that surely fit; None where nothing does."""
        sure = [row for row in self.rows if row.seq_len]
        return max(sure, key=lambda row: (row.seq_len, row.micro_batch_size), default=None)


def longest_rows(
    about: SearchSpace | TrialConfig,
    forecaster: Forecaster,
    *,
    asked: PlanOptions = NOT_ASKED,
    progress: Progress = silent,
) -> Longest:
    """Return how long sequences may be at each micro-batch, whichever structure that takes.

    Lengths beyond those of any space are asked about. Of several capacity classes it is the one
    that is nearest to the standard recipe's.

    Raises:
        InputError: memory can be predicted of no structure.
        EnvironmentFault: the tracing process does not answer.
    """
    positions = forecaster.model.max_positions or POSITIONS_MAX
    tried = _of_one_class(about, forecaster)
    # At the last position, so that what only long sequences need is traced as well.
    last = _resized(tried, 1, positions)
    forecasts = forecaster.forecast(last + tried, progress=progress)
    if len(tried) in forecasts.unpredicted:
        raise forecasts.unpredicted[len(tried)]
    batches: Sequence[int] = BATCHES
    if isinstance(about, SearchSpace):
        batches = shown_batches(about)
    elif "micro_batch_size" in asked.fixed_settings:
        batches = [about.micro_batch_size]
    able_of: dict[int, list[TrialConfig]] = {}
    for batch in batches:
        able = [config for config in tried if config.takes_micro_batch(batch)]
        if able:
            able_of[batch] = able
    tell = progress("micro-batches tried")
    rows: list[LongestRow] = []
    least = min((_least_steps(config, forecaster.model) for config in tried), default=1)
    steps = positions // LENGTH_STEP
    for done, (batch, able) in enumerate(able_of.items()):
        tell(done, len(able_of))
        rows.append(_longest_row(forecaster, able, batch, least=least, most=steps))
        if not rows[-1].possible:
            break
    tell(len(able_of), len(able_of))
    return Longest(
        forecaster=forecaster,
        asked=asked,
        shortest=least * LENGTH_STEP,
        limit=steps * LENGTH_STEP,
        configurations=len(tried),
        rows=tuple(rows),
    )


def _of_one_class(about: SearchSpace | TrialConfig, forecaster: Forecaster) -> list[TrialConfig]:
    """Return the valid structures of the class that is recommended from, at the smallest size."""
    model = forecaster.model
    every = [about] if isinstance(about, TrialConfig) else structures(about)
    tried = dict.fromkeys(
        reshaped(config, 1, _least_steps(config, model) * LENGTH_STEP) for config in every
    )
    capacities = {
        config: CapacityClass.of(config, model) for config in filter(forecaster.is_valid, tried)
    }
    nearest = nearest_capacity(set(capacities.values()), model=model)
    return [config for config, capacity in capacities.items() if capacity == nearest]


def _least_steps(config: TrialConfig, model: ModelSpec) -> int:
    """Return the shortest length to ask about, in steps: an image has to go into it."""
    image = seen_image(config, model)
    if image is None:
        return 1
    return math.ceil(least_length(image) / LENGTH_STEP)


def _resized(configs: Iterable[TrialConfig], batch: int, length: int) -> list[TrialConfig]:
    return [reshaped(config, batch, length) for config in configs]


def _longest_row(
    forecaster: Forecaster, tried: Sequence[TrialConfig], batch: int, *, least: int, most: int
) -> LongestRow:
    def sized(steps: int, some: Sequence[TrialConfig]) -> Forecasts:
        return forecaster.forecast(_resized(some, batch, steps * LENGTH_STEP))

    # What needs least at one length needs about the least at others.
    peaks = sized(max(least, most // 2), tried).least_bytes
    by_peak = peaks.argsort(kind="stable").tolist()
    leanest = [tried[row] for row in by_peak if peaks[row] >= 0][:LEANEST]

    def last(most: int, *wanted: Fit) -> int:
        """Return the last length, in steps, at which anything fits as is wanted; 0 for none."""

        def is_too_long(steps: int) -> bool:
            forecasts = sized(steps, leanest)
            # The smallest first: hardly more than one is replayed to see that it fits.
            for row in forecasts.least_bytes.argsort(kind="stable").tolist():
                if forecasts.fit(row) in wanted:
                    return False
            return True

        # Of none it is 0.
        lengths: list[int] = [0, *range(least, most + 1)]
        first_too_long = bisect_left(lengths, True, lo=1, key=is_too_long)
        return lengths[first_too_long - 1]

    possible = last(most, Fit.YES, Fit.UNCERTAIN)
    sure = last(possible, Fit.YES)
    fastest: Forecast | None = None
    if sure:
        forecasts = sized(sure, tried)
        for row in (-forecasts.tokens_per_second).argsort(kind="stable").tolist():
            if forecasts.fit(row) is Fit.YES:
                fastest = forecasts[row]
                break
    return LongestRow(
        batch,
        seq_len=sure * LENGTH_STEP,
        possible=possible * LENGTH_STEP,
        forecast=fastest,
    )
