"""Owns the view over a whole space: how much of it fits, what is fastest, how long a study takes.

Pure. Memory only grows with the micro-batch and speed never falls with it, so each row (everything
but the micro-batch) is settled by a few predictions instead of one for each configuration.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.space import Dimension, FloatRange, SearchSpace
from sweep.planning.forecast import Forecast, Forecaster
from sweep.planning.settling import settle
from sweep.predict.memory import Fit

ROWS_MAX = 6_000
CONFIGURATIONS_MAX = 60_000
"""Spaces with more of either, or with a continuous dimension, are judged by a sample of rows."""
ROWS_SAMPLED = 1_500
BATCHES_MAX = 256
"""Micro-batches that are looked at in one row."""
STEPS_SAMPLED = 64
"""Fitting configurations whose step times make the mean that a study's length follows from."""
START_SECONDS = 25.0
"""A worker's start: imports and the model's build."""
TRIAL_SECONDS = 1.5
"""What a trial takes beside its training steps: attach, detach, storage."""
COMPILE_SECONDS = 10.0
"""The first shape of a compiled configuration."""

ClassKey = tuple[int, str | tuple[str, ...], int]
"""Rank, target modules, length: what a configuration can learn, and from how much context."""


@dataclass(frozen=True)
class Counts:
    """Configurations by what is expected of them."""

    fit: int
    uncertain: int
    too_large: int
    invalid: Mapping[str, int]
    """By the rule that forbids them."""

    @property
    def looked_at(self) -> int:
        """All of them."""
        return self.fit + self.uncertain + self.too_large + sum(self.invalid.values())


@dataclass(frozen=True)
class Survey:
    """What a space holds for one card."""

    space: SearchSpace
    total: int | None
    """Configurations of the space; None where a dimension is continuous."""
    counts: Counts
    """Of the configurations looked at: all, or a sample where there are too many."""
    fastest_by_class: Mapping[ClassKey, Forecast]
    """The fastest that surely fits; where none does, of those that perhaps do."""
    least_bytes: int | None
    """The smallest peak of those that cannot fit whatever the micro-batch; None without any."""
    mean_step_seconds: float | None
    """Over configurations that fit; None where none does, or speed has no prediction."""
    compiled_share: float = 0.0
    """Share of the fitting configurations whose layers are compiled."""

    @property
    def is_sampled(self) -> bool:
        """Whether the counts are a sample's."""
        return self.total != self.counts.looked_at

    @property
    def recommended(self) -> Forecast | None:
        """The fastest of all; the one with most tokens where no speed is known."""
        return max(self.fastest_by_class.values(), key=merit, default=None)

    @property
    def trials(self) -> int:
        """Trials of a study: what the space asks for, or all that may fit where those are fewer."""
        if self.is_sampled:
            return self.space.trials
        return min(self.space.trials, self.counts.fit + self.counts.uncertain)

    def study_seconds(self) -> tuple[float, float] | None:
        """Return how long a study of this space takes, at least and at most; None where unknown."""
        space, step, trials = self.space, self.mean_step_seconds, self.trials
        if step is None:
            return None
        budget = space.steps
        shortest = (budget.warmup_min + budget.measured_min) * step
        measured = max(budget.measured_min * step, budget.seconds_max)
        longest = budget.warmup_max * step + min(budget.measured_max * step, measured)
        overhead = TRIAL_SECONDS + self.compiled_share * COMPILE_SECONDS
        limit = space.time_budget_seconds or math.inf
        low, high = (START_SECONDS + trials * (overhead + one) for one in (shortest, longest))
        return min(low, limit), min(high, limit)


def class_of(config: TrialConfig) -> ClassKey:
    """Return a configuration's capacity class."""
    return config.lora_rank, config.target_modules, config.seq_len


def merit(forecast: Forecast) -> tuple[bool, float, int]:
    """Return what makes a forecast better than another: sure first, then speed, then tokens."""
    speed = forecast.tokens_per_second or 0.0
    return forecast.fit is Fit.YES, speed, forecast.config.tokens_per_micro_batch


def survey(space: SearchSpace, forecaster: Forecaster) -> Survey:
    """Return what ``space`` holds for the forecaster's card.

    Raises:
        InputError: memory cannot be predicted.
        EnvironmentFault: the tracing process does not answer.
    """
    tally = _Tally()
    for row in rows(space):
        tally.take(row, forecaster)
    return Survey(
        space=space,
        total=space.size(),
        counts=Counts(len(tally.sure), tally.uncertain, tally.too_large, tally.invalid),
        fastest_by_class=tally.fastest,
        least_bytes=tally.least_bytes,
        mean_step_seconds=_mean_step_seconds(tally.sure, forecaster),
        compiled_share=sum(config.compile for config in tally.sure) / max(1, len(tally.sure)),
    )


@dataclass
class _Tally:
    """What the rows so far hold."""

    sure: list[TrialConfig] = field(default_factory=list)
    uncertain: int = 0
    too_large: int = 0
    invalid: Counter[str] = field(default_factory=Counter)
    fastest: dict[ClassKey, Forecast] = field(default_factory=dict)
    least_bytes: int | None = None
    near: int = 1
    """How many of the last row fitted: neighbours are alike."""

    def take(self, row: Sequence[TrialConfig], forecaster: Forecaster) -> None:
        """Count one row, the smallest micro-batch first."""
        valid = self._valid(row, forecaster)
        if not valid:
            return
        certain, possible = settle(
            len(valid), valid.__getitem__, forecaster=forecaster, near=self.near
        )
        self.near = max(1, possible)
        self.sure += valid[:certain]
        self.uncertain += possible - certain
        self.too_large += len(valid) - possible
        if possible:
            # The largest micro-batch is the fastest of its row.
            self._keep(forecaster.forecast(valid[(certain or possible) - 1]))
        else:
            least = forecaster.memory(valid[0]).peak_allocated_bytes
            self.least_bytes = min(least, self.least_bytes or least)

    def _valid(self, row: Sequence[TrialConfig], forecaster: Forecaster) -> list[TrialConfig]:
        """Return the configurations that no rule forbids, and count the others."""
        broken = [forecaster.broken(config) for config in row]
        self.invalid.update(one.rule for one in broken if one is not None)
        return [config for config, one in zip(row, broken, strict=True) if one is None]

    def _keep(self, candidate: Forecast) -> None:
        key = class_of(candidate.config)
        if key not in self.fastest or merit(candidate) > merit(self.fastest[key]):
            self.fastest[key] = candidate


def rows(space: SearchSpace) -> Iterator[list[TrialConfig]]:
    """Yield configurations that differ in their micro-batch alone, the smallest first.

    All of the space where that is little enough, else a sample that is the same every time.
    """
    others = {key: d for key, d in space.dimensions.items() if key != "micro_batch_size"}
    batches = _batches(space)
    for values in _row_values(others, batches=len(batches), seed=space.seed):
        params = dict(zip(others, values, strict=True))
        yield [space.config({**params, **batch}) for batch in batches]


def _batches(space: SearchSpace) -> list[dict[str, Any]]:
    dimension = space.dimensions.get("micro_batch_size")
    if dimension is None:
        return [{}]
    batches = thinned(dimension.values() or (), most=BATCHES_MAX)
    return [{"micro_batch_size": batch} for batch in batches]


def thinned(values: Iterable[Any], *, most: int) -> list[Any]:
    """Return at most ``most`` of the values in order, evenly spread, both ends among them."""
    every = sorted(set(values))
    if len(every) <= most:
        return every
    return [every[round(i * (len(every) - 1) / (most - 1))] for i in range(most)]


def _row_values(
    dimensions: Mapping[str, Dimension], *, batches: int, seed: int
) -> Iterator[tuple[Any, ...]]:
    columns = [dimension.values() for dimension in dimensions.values()]
    known = [column for column in columns if column is not None]
    most = min(ROWS_MAX, CONFIGURATIONS_MAX // batches)
    if len(known) == len(columns) and math.prod(map(len, known)) <= most:
        yield from itertools.product(*known)
        return
    draw = random.Random(seed)
    for _ in range(min(ROWS_SAMPLED, most)):
        yield tuple(_drawn(dimension, draw) for dimension in dimensions.values())


def _drawn(dimension: Dimension, draw: random.Random) -> Any:
    values = dimension.values()
    if values is not None:
        return draw.choice(values)
    assert isinstance(dimension, FloatRange)
    return draw.uniform(dimension.low, dimension.high)


def _mean_step_seconds(sure: Sequence[TrialConfig], forecaster: Forecaster) -> float | None:
    some = random.Random(0).sample(sure, min(STEPS_SAMPLED, len(sure)))
    predicted = [forecaster.speed(config)[0] for config in some]
    known = [speed.step_seconds for speed in predicted if speed is not None]
    return sum(known) / len(known) if known else None
