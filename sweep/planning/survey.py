"""Owns the view over a whole space: how much of it fits, what is fastest, how long a study takes.

Pure. Memory only grows with the micro-batch and speed never falls with it, so that a few
predictions for each row (everything but the micro-batch) tell of all its configurations.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.knobs import Numerics
from search_spaces.linears import CapacityClass
from search_spaces.models import ModelSpec
from search_spaces.space import MICRO_STEPS_TIMED, SearchSpace
from sweep.planning.forecast import UNBUILDABLE, Forecast, Forecaster, Progress, silent
from sweep.planning.recommendation import (
    Certainty,
    alternative,
    certainty_of,
    nearest_capacity,
    preferred,
    speed_order,
)
from sweep.planning.spaces import VALUES_SHOWN, evenly_spaced, rows
from sweep.planning.table import FitRow, ShapeTable, Size, fastest_table, fit_row
from sweep.predict.memory.profiles import Untraceable

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

ClassKey = tuple[CapacityClass, int]
"""Capacity class and length: what a configuration can learn, and from how much context."""


SpeedOrder = tuple[float, int]
"""Tokens/s, and tokens of a micro-batch for where no speed is known."""


@dataclass(frozen=True)
class Counts:
    """Configurations by what is expected of them."""

    fit: int
    uncertain: int
    too_large: int
    invalid: Mapping[str, int]
    """By the rule that forbids them."""
    unpredicted: Mapping[str, int] = field(default_factory=dict)
    """By the reason why nothing is predicted of them."""

    @property
    def looked_at(self) -> int:
        """All of them."""
        predicted = self.fit + self.uncertain + self.too_large
        return predicted + sum(self.invalid.values()) + sum(self.unpredicted.values())


@dataclass(frozen=True)
class Survey:
    """What a space holds for one card."""

    space: SearchSpace
    model: ModelSpec
    total: int | None
    """Configurations of the space; None where a dimension is continuous."""
    counts: Counts
    """Of the configurations looked at: all, or a sample where there are too many."""
    candidates: Mapping[ClassKey, Sequence[Forecast]]
    """Of each class, the fastest that surely fits and the fastest of those that are less sure, of
    every class of numerics."""
    table: ShapeTable | None
    """The fastest at each size of the space; None where nothing may fit at any."""
    least_bytes: int | None
    """The smallest peak of those that cannot fit whatever the micro-batch; None without any."""
    step_seconds: float | None
    """Median over configurations that fit; None where none does, or speed has no prediction."""
    step_uncertainty: float = 0.0
    """Of that: the mean of the predictions' own."""
    compiled_share: float = 0.0
    """Share of the fitting configurations whose layers are compiled."""

    @property
    def is_sampled(self) -> bool:
        """Whether the counts are a sample's."""
        return self.total != self.counts.looked_at

    @cached_property
    def fastest_by_class(self) -> Mapping[ClassKey, Forecast]:
        """The one to prefer of each class; classes of which nothing may fit are left out."""
        chosen = {key: preferred(candidates) for key, candidates in self.candidates.items()}
        return {key: best for key, best in chosen.items() if best is not None}

    @cached_property
    def capacity(self) -> CapacityClass | None:
        """The capacity class that is recommended from: the standard one, or the nearest to it."""
        return nearest_capacity({capacity for capacity, _ in self.candidates}, model=self.model)

    @cached_property
    def fastest_by_numerics(self) -> Mapping[Numerics, Forecast]:
        """The one to prefer of each class of numerics, of that capacity, the fastest first."""
        able = sorted(self._able(), key=speed_order, reverse=True)
        classes = dict.fromkeys(forecast.config.numerics for forecast in able)
        chosen = {n: preferred(f for f in able if f.config.numerics == n) for n in classes}
        return {numerics: best for numerics, best in chosen.items() if best is not None}

    @property
    def recommended(self) -> Forecast | None:
        """The one to prefer of that class, whatever its length; None where nothing may fit."""
        return preferred(self._able())

    @property
    def alternative(self) -> Forecast | None:
        """What is worth naming beside the recommended one, if anything is."""
        best = self.recommended
        return None if best is None else alternative(self._able(), best)

    def _able(self) -> list[Forecast]:
        classes = [key for key in self.candidates if key[0] == self.capacity]
        return [candidate for key in classes for candidate in self.candidates[key]]

    @property
    def trials(self) -> int:
        """Trials of a study: what the space asks for, or all that may fit where those are fewer."""
        if self.is_sampled:
            return self.space.trials
        return min(self.space.trials, self.counts.fit + self.counts.uncertain)

    def study_seconds(self) -> tuple[float, float] | None:
        """Return how long a study of this space takes on the card itself; None where unknown.

        The first is with as many trials stopped early as is usual and a card as fast as may be, the
        second with none stopped and a card as slow as may be.
        """
        space, step, error = self.space, self.step_seconds, min(self.step_uncertainty, 0.9)
        if step is None:
            return None
        budget = space.steps
        fewest = budget.warmup_min + budget.measured_min
        stopped = budget.warmup_min + min(STEPS_TO_STOP, budget.measured_min)
        share = STOPPED_SHARE if "tokens_per_second" in space.objectives else 0.0
        low = (share * stopped + (1.0 - share) * fewest) * step * (1.0 - error)
        high = STEPS_OVER_FEWEST * fewest * step * (1.0 + error)
        overhead = TRIAL_SECONDS + self.compiled_share * COMPILE_SECONDS
        limit = space.time_budget_seconds or math.inf
        low, high = (START_SECONDS + self.trials * (overhead + steps) for steps in (low, high))
        return min(low, limit), min(high, limit)


def class_of(config: TrialConfig, model: ModelSpec) -> ClassKey:
    """Return a configuration's capacity class and its length."""
    return CapacityClass.of(config, model), config.seq_len


def survey(space: SearchSpace, forecaster: Forecaster, *, progress: Progress = silent) -> Survey:
    """Return what ``space`` holds for the forecaster's card.

    Args:
        space: what is looked over.
        forecaster: tells speed and memory.
        progress: told of what takes its time.

    Raises:
        InputError: memory can be predicted of no configuration.
        EnvironmentFault: the tracing process does not answer.
    """
    tally = _Tally()
    valid = [tally.valid(row, forecaster) for row in rows(space)]
    forecaster.foresee(list(itertools.chain.from_iterable(valid)), progress=progress)
    for row in filter(None, valid):
        tally.take(row, forecaster)
    counts = tally.counts()
    if tally.refused is not None and not counts.fit + counts.uncertain + counts.too_large:
        raise tally.refused
    step, uncertainty = _step_seconds(tally.sure, forecaster)
    return Survey(
        space=space,
        model=forecaster.model,
        total=space.size(),
        counts=counts,
        candidates={
            key: tuple(forecaster.forecast(config) for _, config in best.values())
            for key, best in tally.best.items()
        },
        table=_table(space, tally, forecaster) if tally.best else None,
        least_bytes=tally.least_bytes,
        step_seconds=step,
        step_uncertainty=uncertainty,
        compiled_share=sum(config.compile for config in tally.sure) / max(1, len(tally.sure)),
    )


def _table(space: SearchSpace, tally: _Tally, forecaster: Forecaster) -> ShapeTable:
    batches, lengths = (
        evenly_spaced({size[axis] for size in tally.sizes}, most=VALUES_SHOWN) for axis in (0, 1)
    )
    return fastest_table(
        forecaster, tally.rows, batches=batches, lengths=lengths, spare=tally.sizes
    )


@dataclass
class _Tally:
    """What the rows so far hold."""

    rows: list[FitRow] = field(default_factory=list)
    invalid: Counter[str] = field(default_factory=Counter)
    unpredicted: Counter[str] = field(default_factory=Counter)
    refused: InputError | None = None
    """Why the first of those rows was not predicted, of which nothing can be."""
    best: dict[ClassKey, dict[tuple[Numerics, Certainty], tuple[SpeedOrder, TrialConfig]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """Of each class, the fastest of each class of numerics at every certainty."""
    sizes: dict[Size, TrialConfig] = field(default_factory=dict)
    """A configuration of each size, whatever becomes of it."""
    least_bytes: int | None = None
    near: int = 1
    """How many of the last row fitted: neighbours are alike."""

    @cached_property
    def sure(self) -> list[TrialConfig]:
        """What surely fits, once every row has been taken."""
        return [config for row in self.rows for config in row.configurations[: row.sure]]

    @property
    def uncertain(self) -> int:
        return sum(row.possible - row.sure for row in self.rows)

    @property
    def too_large(self) -> int:
        return sum(len(row.configurations) - row.possible for row in self.rows)

    def take(self, valid: Sequence[TrialConfig], forecaster: Forecaster) -> None:
        """Count what is valid of one row, the smallest micro-batch first."""
        try:
            row = fit_row(valid, forecaster=forecaster, near=self.near)
        except InputError as error:
            self._refuse(len(valid), error)
            return
        self.rows.append(row)
        self.near = max(1, row.possible)
        # The largest micro-batch is the fastest of its row: of the sure ones, and of the others. Of
        # texts a larger one may be padded more than it gains.
        counts = range(row.possible + 1) if forecaster.shapes else (row.sure, row.possible)
        for count in {*counts} - {0}:
            self._keep(valid[count - 1], forecaster)
        if not row.possible:
            self._note_least(valid[0], forecaster)

    def counts(self) -> Counts:
        """Return how many there are of each kind."""
        return Counts(
            len(self.sure), self.uncertain, self.too_large, self.invalid, self.unpredicted
        )

    def _refuse(self, count: int, error: InputError) -> None:
        """Count a row whose structure cannot be traced, or that the model has no modules for."""
        self.refused = self.refused or error
        if isinstance(error, Untraceable):
            self.unpredicted[str(error)] += count
        else:
            self.invalid[UNBUILDABLE] += count

    def valid(self, row: Sequence[TrialConfig], forecaster: Forecaster) -> list[TrialConfig]:
        """Return the configurations of a row that no rule forbids, and count the others."""
        for config in row:
            self.sizes.setdefault((config.micro_batch_size, config.seq_len), config)
        broken = [forecaster.broken(config) for config in row]
        self.invalid.update(violation.rule for violation in broken if violation is not None)
        return [config for config, rule in zip(row, broken, strict=True) if rule is None]

    def _note_least(self, config: TrialConfig, forecaster: Forecaster) -> None:
        if self.least_bytes is None or forecaster.least_bytes(config) < self.least_bytes:
            least = forecaster.memory(config).peak_allocated_bytes
            self.least_bytes = min(least, self.least_bytes or least)

    def _keep(self, config: TrialConfig, forecaster: Forecaster) -> None:
        # Counting the row asked for all that decides; a forecast in doubt would replay the step.
        is_measured = forecaster.evidence.trial(config) is not None
        certainty = certainty_of(
            forecaster.fit(config),
            uncertainty=0.0 if is_measured else forecaster.memory_uncertainty(config),
        )
        level = config.numerics, certainty
        order = forecaster.tokens_per_second(config) or 0.0, config.tokens_per_micro_batch
        best = self.best[class_of(config, forecaster.model)]
        if level not in best or order > best[level][0]:
            best[level] = order, config


def _timed(config: TrialConfig) -> TrialConfig:
    """Return the part of an optimizer step that a trial runs."""
    micro_steps = min(config.accumulation_steps, MICRO_STEPS_TIMED)
    return config.model_copy(update={"effective_batch_size": micro_steps * config.micro_batch_size})


def _step_seconds(
    sure: Sequence[TrialConfig], forecaster: Forecaster
) -> tuple[float | None, float]:
    """Return the median step of a trial and its uncertainty.

    A median, as samplers are drawn to what is fast, and the few longest steps would make a mean.
    Of an accumulation a trial times the first micro-steps alone.
    """
    timed = map(_timed, random.Random(0).sample(sure, min(STEPS_SAMPLED, len(sure))))
    predicted = [speed for config in timed for speed in [forecaster.speed(config)[0]] if speed]
    if not predicted:
        return None, 0.0
    return (
        statistics.median(speed.step_seconds for speed in predicted),
        statistics.fmean(speed.uncertainty for speed in predicted),
    )
