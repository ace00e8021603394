"""What fits of a space, what is fastest of each class and size, and how long a study takes."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.kinds import Numerics
from qlora_sweep.search_spaces.linears import CapacityClass, nearest_capacity
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import MICRO_STEPS_TIMED, SearchSpace
from qlora_sweep.sweep.planning.candidates import (
    VALUES_SHOWN,
    alternative,
    best_of_each_numerics,
    evenly_spaced,
    recommended,
    shown_batches,
    speed_order,
)
from qlora_sweep.sweep.predict.contributions import contributed_speed
from qlora_sweep.sweep.predict.forecast import (
    UNBUILDABLE,
    Forecast,
    Forecaster,
    Forecasts,
    Progress,
    nothing_known,
    silent,
)
from qlora_sweep.sweep.predict.memory.prediction import Fit
from qlora_sweep.sweep.predict.memory.profile_store import (
    source_digest,
    tracing_fingerprint,
    write_cache,
)
from qlora_sweep.sweep.predict.memory.profiles import Untraceable
from qlora_sweep.sweep.predict.memory.shipped import is_as_committed, read
from qlora_sweep.sweep.predict.shortlist import Pick, Shortlist
from qlora_sweep.sweep.predict.speed.layers import layers_of
from qlora_sweep.sweep.predict.speed.predictor import within

STEPS_SAMPLED = 64
"""Fitting configurations whose step times tell how long a study takes."""
START_SECONDS = 25.0
"""A worker's start: imports and the model's build."""
TRIAL_SECONDS = 2.0
"""What a trial takes beside its training steps: attach, first kernels, detach, storage."""
STEPS_OVER_FEWEST = 1.25
"""Steps of a trial that runs to its end, over the fewest that its budget allows."""
STEPS_TO_STOP = 3
"""Measured steps after which a trial that is too slow is stopped, and no sooner."""
STOPPED_SHARE = 0.7
"""Share of a study's trials that are stopped as too slow, where speed is all it is after.

These four are those of the study in ``tests/bench/results/a10_rank16_study.txt``.
"""
COMPILE_SECONDS = 7.0
"""What the first step of a compiled configuration takes longer, its shape being new.

As measured on an H200, the first of a process apart, which takes ten: see
``tests/bench/results/compile_cost.json``.
"""
SURVEYED_BY = ("search_spaces", "sweep/data", "sweep/predict", "sweep/planning")
"""Directories whose code decides what a survey holds."""
SURVEYS = Path(__file__).with_name("surveys.zip")
"""Those of the presets, each of its own model; `make surveys` writes them."""

_FAULT = re.compile(r"(module '[^']*'|model type '[^']*'): .*", re.DOTALL)

ClassKey = tuple[CapacityClass, int]
"""Capacity class and length: what a configuration can learn, and from how much context."""
Picked = tuple[TrialConfig, Fit]
"""A configuration and whether it fits, which takes longest to find."""
Size = tuple[int, int]
"""Micro-batch and sequence length."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest micro-batches at one length; 0 where none does."""

    sure: int
    """That fits surely."""
    possible: int
    """That is not surely too large."""


@dataclass(frozen=True)
class ShapeTable:
    """What fits by micro-batch and sequence length."""

    base: TrialConfig | None
    """What every cell has in common, beside its size; None where each has the fastest structure."""
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    cells: Mapping[Size, Forecast]
    largest: Mapping[int, LargestBatch]
    """By length: of any micro-batch for one structure, else of the micro-batches of the space."""


class Found(BaseModel, frozen=True):
    """What looking over a space found, as it is kept in the cache.

    Counted are the configurations looked at: all, or those that bounds did not rule out.
    """

    is_whole: bool
    """Whether all were."""
    fit: int
    uncertain: int
    too_large: int
    invalid: dict[str, int]
    """By the rule that forbids them."""
    unpredicted: dict[str, int] = {}
    """By the reason why nothing is predicted of them."""
    candidates: list[Picked] = []
    """Of each class and class of numerics the fastest that surely fits and the plainest that is as
    fast; and the fastest that may fit, where that is faster."""
    batches: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    cells: list[Picked] = []
    """By micro-batch, and then by length: the fastest at each size."""
    largest: dict[int, LargestBatch] = {}
    least_bytes: int | None = None
    """The smallest peak of those that cannot fit whatever the micro-batch; None without any."""
    step_seconds: float | None = None
    """Median over configurations that fit; None where none does, or speed has no prediction."""
    step_log_spread: float = 0.0
    """Of that: the mean of the predictions' own."""
    compiled_share: float = 0.0
    """Share of the fitting configurations whose layers are compiled."""

    @property
    def looked_at(self) -> int:
        """How many configurations were."""
        predicted = self.fit + self.uncertain + self.too_large
        return predicted + sum(self.invalid.values()) + sum(self.unpredicted.values())


@dataclass(frozen=True)
class Survey:
    """What a space holds for one GPU."""

    space: SearchSpace
    found: Found
    forecaster: Forecaster

    @property
    def model(self) -> ModelSpec:
        """The model that is trained."""
        return self.forecaster.model

    @cached_property
    def total(self) -> int | None:
        """Configurations of the space; None where a dimension is continuous."""
        return self.space.size()

    def _forecasts(self, picked: Sequence[Picked]) -> Forecasts:
        return forecasts_of(itertools.starmap(Pick, picked), self.forecaster)

    @cached_property
    def candidates(self) -> Mapping[ClassKey, Sequence[Forecast]]:
        """What was found of each class, of every class of numerics."""
        candidates: dict[ClassKey, list[Forecast]] = {}
        for forecast in self._forecasts(self.found.candidates):
            candidates.setdefault(class_of(forecast.config, self.model), []).append(forecast)
        return candidates

    @cached_property
    def table(self) -> ShapeTable | None:
        """The fastest at each size, of the recommended class; None where nothing may fit at any."""
        found = self.found
        if not found.candidates:
            return None
        cells: dict[Size, Forecast] = {}
        for cell in self._forecasts(found.cells):
            cells[cell.config.micro_batch_size, cell.config.seq_len] = cell
        return ShapeTable(None, found.batches, found.lengths, cells, found.largest)

    @cached_property
    def fastest_by_class(self) -> Mapping[ClassKey, Forecast]:
        """The one to recommend of each class; classes of which nothing may fit are left out."""
        fastest: dict[ClassKey, Forecast] = {}
        for key, of_class in self.candidates.items():
            best = recommended(of_class)
            if best is not None:
                fastest[key] = best
        return fastest

    @cached_property
    def capacity(self) -> CapacityClass | None:
        """The capacity class that is recommended from: the standard one, or the nearest to it."""
        return nearest_capacity({capacity for capacity, _ in self.candidates}, model=self.model)

    @cached_property
    def fastest_by_numerics(self) -> Mapping[Numerics, Forecast]:
        """The one to recommend of each class of numerics, of that capacity and of the recommended
        length, the fastest first."""
        chosen = self.recommended
        if chosen is None:
            return {}
        of_length = self.candidates[class_of(chosen.config, self.model)]
        best = best_of_each_numerics(of_length)
        ordered = sorted(best.values(), key=speed_order, reverse=True)
        return {forecast.config.numerics: forecast for forecast in ordered}

    @cached_property
    def recommended(self) -> Forecast | None:
        """The one to recommend of that class, whatever its length; None where nothing may fit."""
        of_capacity: list[Forecast] = []
        for (capacity, _), of_class in self.candidates.items():
            if capacity == self.capacity:
                of_capacity += of_class
        return recommended(of_capacity)

    @cached_property
    def alternative(self) -> Forecast | None:
        """What is worth naming beside the recommended one, if anything is."""
        chosen = self.recommended
        if chosen is None:
            return None
        return alternative(self.candidates[class_of(chosen.config, self.model)], chosen)

    @property
    def trials(self) -> int:
        """Trials of a study: what the space asks for, or all that may fit where those are fewer."""
        if not self.found.is_whole:
            return self.space.trials
        return min(self.space.trials, self.found.fit + self.found.uncertain)

    def study_seconds(self) -> tuple[float, float] | None:
        """Return how long a study of this space takes on the GPU itself; None where unknown.

        The first is with as many trials stopped early as is usual and a GPU as fast as may be, the
        second with none stopped and a GPU as slow as may be.
        """
        step_seconds = self.found.step_seconds
        if step_seconds is None:
            return None
        shortest, longest = within(step_seconds, self.found.step_log_spread).ends
        budget = self.space.steps
        fewest = budget.warmup_min + budget.measured_min
        stopped = budget.warmup_min + min(STEPS_TO_STOP, budget.measured_min)
        share = STOPPED_SHARE if "tokens_per_second" in self.space.objectives else 0.0
        overhead = TRIAL_SECONDS + self.found.compiled_share * COMPILE_SECONDS
        limit = self.space.time_budget_seconds or math.inf

        def whole(trial_seconds: float) -> float:
            return min(limit, START_SECONDS + self.trials * (overhead + trial_seconds))

        low = (share * stopped + (1.0 - share) * fewest) * shortest
        high = STEPS_OVER_FEWEST * fewest * longest
        return whole(low), whole(high)


def forecasts_of(picks: Iterable[Pick], forecaster: Forecaster) -> Forecasts:
    """Return what is expected of configurations of which is known whether they fit."""
    known = list(picks)
    fits = [pick.fit for pick in known]
    return forecaster.forecast([pick.config for pick in known], fits=fits)


def class_of(config: TrialConfig, model: ModelSpec) -> ClassKey:
    """Return a configuration's capacity class and its length."""
    return CapacityClass.of(config, model), config.seq_len


def survey(
    space: SearchSpace,
    forecaster: Forecaster,
    *,
    directory: Path | None = None,
    progress: Progress = silent,
) -> Survey:
    """Return what ``space`` holds for the forecaster's GPU.

    Args:
        space: what is looked over.
        forecaster: of the GPU. A study's evidence changes with every trial, and surveys with it:
            those are not cached.
        directory: cache, whose entries hold for one space, model, GPU, budget and version of the
            code that predicts.
        progress: told of what takes its time.

    Raises:
        InputError: memory can be predicted of no configuration.
        EnvironmentFault: the tracing process does not answer.
    """
    if directory is None or forecaster.evidence.study is not None:
        return Survey(space, _found(space, forecaster, progress), forecaster)
    is_shipped = is_as_committed(*SURVEYED_BY)
    shipped = read(SURVEYS, shipped_name(space, forecaster)) if is_shipped else None
    path = directory / f"{_digest(space, forecaster, source_digest(*SURVEYED_BY))}.json"
    try:
        found = Found.model_validate(shipped or json.loads(path.read_bytes()))
    except (OSError, ValueError):
        found = _found(space, forecaster, progress)
        write_cache(path, found.model_dump(mode="json", exclude_defaults=True))
    return Survey(space, found, forecaster)


def shipped_name(space: SearchSpace, forecaster: Forecaster) -> str:
    """Return the name under which a survey ships, if it does."""
    return _digest(space, forecaster)


def _digest(space: SearchSpace, forecaster: Forecaster, *code: str) -> str:
    memory = forecaster.tracing
    origin = None if memory is None else memory.origin(space.baseline_config())
    contributed = contributed_speed(forecaster.gpu.name)
    parts = [
        None if forecaster.shapes is None else forecaster.shapes.epochs.digest,
        space.model_dump(mode="json"),
        forecaster.model.fingerprint,
        forecaster.gpu.model_dump(mode="json"),
        contributed and [contributed.mean.tolist(), contributed.covariance.tolist()],
        forecaster.budget_bytes,
        origin or tracing_fingerprint(),
        *code,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _found(space: SearchSpace, forecaster: Forecaster, progress: Progress) -> Found:
    try:
        shortlist = Shortlist(space, forecaster, progress=progress)
    except Untraceable as error:
        if isinstance(layers_of(forecaster.model), InputError):
            raise InputError(nothing_known(forecaster.model, error)) from error
        raise
    chosen = _recommended(shortlist, forecaster)
    if chosen is not None:
        shortlist.look_at_other_capacities(chosen.config.seq_len, chosen.config.numerics)
    fit, uncertain, too_large = shortlist.counts()
    sure = shortlist.surely_fitting()
    step_seconds, step_log_spread = _step_seconds(sure, forecaster)
    invalid, unpredicted = _left_out(shortlist)
    batches = shown_batches(space)
    lengths = tuple(evenly_spaced(shortlist.lengths, most=VALUES_SHOWN))
    cells: Mapping[Size, Pick] = {}
    if chosen is not None:
        cells = shortlist.at_sizes(batches, lengths, chosen.config.numerics)
    largest: dict[int, LargestBatch] = {}
    if cells:
        for length in lengths:
            largest[length] = LargestBatch(*shortlist.largest(length))
    compiled = sum(config.compile for config in sure)
    return Found(
        is_whole=shortlist.is_whole,
        fit=fit,
        uncertain=uncertain,
        too_large=too_large,
        invalid=invalid,
        unpredicted=unpredicted,
        candidates=_picked(shortlist.picks()),
        batches=batches if cells else (),
        lengths=lengths if cells else (),
        cells=_picked(filter(None, map(cells.get, itertools.product(batches, lengths)))),
        largest=largest,
        least_bytes=shortlist.least_bytes,
        step_seconds=step_seconds,
        step_log_spread=step_log_spread,
        compiled_share=compiled / max(1, len(sure)),
    )


def _picked(picks: Iterable[Pick]) -> list[Picked]:
    return [(pick.config, pick.fit) for pick in picks]


def _left_out(shortlist: Shortlist) -> tuple[Counter[str], Counter[str]]:
    """Return how many configurations each rule forbids, and of how many nothing is predicted, by
    the reason."""
    invalid = +shortlist.invalid
    unpredicted: Counter[str] = Counter()
    for reason, count in shortlist.refused:
        if isinstance(reason, Untraceable):
            # One sentence for what libraries say in words of their own, which the plan of one
            # configuration has.
            unpredicted[_FAULT.sub(r"\1 cannot be run without data", str(reason))] += count
        else:
            invalid[UNBUILDABLE] += count
    return invalid, unpredicted


def _recommended(shortlist: Shortlist, forecaster: Forecaster) -> Forecast | None:
    """Return the recommended one of those found; None where nothing may fit."""
    forecasts = forecasts_of(shortlist.picks(), forecaster)
    model = forecaster.model
    return recommended(
        forecast
        for forecast in forecasts
        if CapacityClass.of(forecast.config, model) == shortlist.capacity
    )


def fitting(row: Sequence[int], fit: Callable[[int], Fit]) -> tuple[int, int]:
    """Return how many of a row fit surely, and how many at least perhaps; each needs more memory
    than the one before."""
    possible = bisect_left(row, True, key=lambda size: fit(size) is Fit.NO)
    sure = bisect_left(row, True, hi=possible, key=lambda size: fit(size) is not Fit.YES)
    return sure, possible


def _step_seconds(
    sure: Sequence[TrialConfig], forecaster: Forecaster
) -> tuple[float | None, float]:
    """Return the median step of a trial and the spread of its logarithm.

    A median, as samplers are drawn to what is fast, and the few longest steps would make a mean.
    Of an accumulation a trial times the first micro-steps alone.
    """
    timed: list[TrialConfig] = []
    for config in random.Random(0).sample(sure, min(STEPS_SAMPLED, len(sure))):
        micro_steps = min(config.accumulation_steps, MICRO_STEPS_TIMED)
        samples = micro_steps * config.micro_batch_size * config.data_parallel
        timed.append(config.changed(effective_batch_size=samples))
    times = forecaster.forecast(timed).times
    if not times.is_known.any():
        return None, 0.0
    seconds = np.median(times.seconds[times.is_known])
    return float(seconds), float(times.log_spread[times.is_known].mean())
