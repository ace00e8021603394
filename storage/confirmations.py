"""What measuring a winner again comes to: its pooled speed, ratios between runs in turns, its soak,
and its loss over several seeds.

The speed that made a trial the winner is the luckiest of many, so it does not count any more once
the configuration was run again: only the runs that confirm it are pooled, and they are those of one
series, run in turns in one process.

The median steps of several runs differ by more than the interval of each says: clocks, memory
layout and neighbours stay as they are within a run and change from one to the next (Georges et al.,
"Statistically rigorous Java performance evaluation", OOPSLA 2007; Kalibera and Jones, "Rigorous
benchmarking in reasonable time", ISMM 2013). So intervals are Student's, over the runs' medians, in
logarithms, as what disturbs a step takes a share of it. Two runs say next to nothing of how far
runs spread, and a configuration whose steps are uneven spreads more than a steady one. So each
run's spread is counted in units of its configuration's `noise`, by what the steps within its runs
say, and in those units the spreads of a series are pooled: of one speed as in a one-way layout, of
a ratio about the rounds as well (Box, Hunter and Hunter, "Statistics for experimenters", ch. 4).
What spread more than that keeps its own spread, and no interval is narrower than what the steps
within its runs say. Losses over seeds are pooled without units.

A confirmation looks after every round whether it is decided, and stops where intervals are narrow.
So that the interval at which it stops holds all the same, each of the possible looks has its share
of the 5 % (Bonferroni): with two looks, 97.5 % intervals.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from statistics import NormalDist
from typing import Any

import numpy as np

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.storage.records import (
    RETRYABLE,
    Measured,
    Measurement,
    QualityReport,
    TrialRecord,
    Verdict,
)

RUNS_TO_CONFIRM = 2
"""The fewest runs between which there is a spread."""
ERRORS_OF_STEPS = 2.5
"""Standard errors of the median in half a run's interval, which holds whenever measuring ends: of
normal steps 2.5 with six or ten of them, 2.9 with 15, 3.3 with 20."""
UNSURE_FROM = 0.10
"""A pooled speed whose interval reaches this far is too unsure to be set against another."""
BETWEEN_RUNS = 0.005
"""Relative: half of 24 pairs of runs of one series in `tests/bench/results` differ by less, however
even their steps are."""


@dataclass(frozen=True)
class Ratio:
    """The speed of one configuration over that of another."""

    value: float
    low: float | None
    """Ends of its 95 % interval; null where nothing bounds it."""
    high: float | None
    is_paired: bool = False
    """Whether both ran in turns; else its ends are those of single runs, which differ by more."""
    is_predicted: bool = False
    """Whether it is of two predictions, with the ends of nine in ten such ratios."""

    @property
    def is_open(self) -> bool:
        """Whether either may be the faster one: the interval holds 1."""
        return self.low is not None and self.high is not None and self.low <= 1 <= self.high


@dataclass(frozen=True)
class Spread:
    """How far runs of one series spread."""

    deviation: float
    """Standard deviation, of speeds that of the logarithm of a run's median step."""
    degrees: int
    """Degrees of freedom: runs less the means about which they spread."""

    def half(self, values: Sequence[float], *, noise: float | None = None, looks: int = 1) -> float:
        """Return half the 95 % interval of the mean of ``values``, each of which is off by as much.

        Args:
            values: with this spread, or more.
            noise: what it is in units of, and the least that each value is off by, as a few may
                agree by chance; None for the values' own unit, and no least.
            looks: how many intervals hold at once.
        """
        # It takes longer to import than most of what reads a study takes.
        from scipy.special import stdtrit

        t = math.inf
        if self.degrees:
            t = float(stdtrit(self.degrees, 1.0 - 0.025 / looks))
        spread = self.deviation
        least = 0.0
        if noise is not None:
            spread *= noise
            least = 1.96 * noise
        off = max(t * max(spread, statistics.stdev(values)), least)
        return off / math.sqrt(len(values))

    @classmethod
    def of(cls, groups: Iterable[Sequence[float]]) -> Spread:
        """Return the spread that several groups have in common, each about the mean of its own."""
        degrees = 0
        squares = 0.0
        for group in groups:
            if len(group) > 1:
                degrees += len(group) - 1
                squares += statistics.variance(group) * (len(group) - 1)
        if not degrees:
            return cls(math.inf, 0)
        return cls(math.sqrt(squares / degrees), degrees)

    @classmethod
    def of_runs(cls, groups: Iterable[Sequence[Measurement]]) -> Spread:
        """Return the spread of the runs of several configurations, in units of each one's noise."""
        return cls.of(list(np.array(logarithms(runs)) / noise(runs)) for runs in groups)


@dataclass(frozen=True)
class Confirmations:
    """Every run of a study that measured a winner again."""

    records: tuple[TrialRecord, ...] = ()
    """By number."""
    looks: int = 1
    """How often it may be looked at whether the runs of a series are enough."""

    @cached_property
    def newest(self) -> int:
        """The newest series; 0 where there is none."""
        return max(map(attrgetter("series"), self.records), default=0)

    @cached_property
    def series(self) -> int:
        """The series that speeds are read from: the newest in which anything ran often enough.

        0 where there is none. A series that was only begun takes nothing from the one before.
        """
        newest = 0
        for (series, _), runs in self._runs.items():
            if len(runs) >= RUNS_TO_CONFIRM:
                newest = max(newest, series)
        return newest

    @cached_property
    def fallen(self) -> Mapping[TrialConfig, TrialRecord]:
        """What did not hold, by canonical configuration, with the run in which it did not.

        A run of a few steps that fits does not take back that a longer one ran out of memory.
        """
        fallen = {}
        for record in self.records:
            if record.verdict not in RETRYABLE | {Verdict.FITS}:
                fallen[canonical(record.config)] = record
        return fallen

    def runs(self, config: TrialConfig, *, series: int) -> Sequence[Measurement]:
        """Return what was measured of a configuration in one series, in order."""
        return self._runs.get((series, canonical(config)), ())

    def soak(self, config: TrialConfig, *, series: int) -> TrialRecord | None:
        """Return the longest soak of a configuration that it stood, in one series."""
        soaks = self.soaks(config, series=series)
        if not soaks:
            return None
        return soaks[0]

    def soaks(self, config: TrialConfig, *, series: int) -> Sequence[TrialRecord]:
        """Return the soaks of a configuration that it stood in one series, the longest first."""
        stood = [
            record
            for record in self.records
            if record.series == series
            and record.purpose == "soak"
            and record.verdict is Verdict.FITS
            and canonical(record.config) == canonical(config)
        ]
        return sorted(stood, key=_soak_seconds, reverse=True)

    def repeat_seconds(self, *, series: int, besides: Collection[TrialConfig] = ()) -> float:
        """Return what the runs of a series took so far; not its soaks, nor the worker's start, nor
        what somebody interrupted, nor the runs of canonical configurations ``besides``."""
        seconds = 0.0
        for record in self.records:
            is_run = record.series == series and record.purpose == "confirm"
            if not is_run or record.is_interrupted or canonical(record.config) in besides:
                continue
            # By the worker's clock where a run came to a measurement.
            seconds += record.run_seconds
        return seconds

    def pooled(self, config: TrialConfig) -> Measurement | None:
        """Return the runs of a configuration as one measurement; None where there are too few."""
        runs = self.runs(config, series=self.series)
        if len(runs) < RUNS_TO_CONFIRM:
            return None
        soak = self.soak(config, series=self.series)
        stood = None
        if soak is not None:
            stood = soak.measurement
        return pool(
            runs,
            spread=self._spread,
            level=self._levels[canonical(config)],
            looks=self.looks,
            soak=stood,
        )

    def ratio(self, config: TrialConfig, over: TrialConfig) -> Ratio | None:
        """Return how much faster ``config`` ran than ``over``, another configuration, by the rounds
        in which both ran; None where those are fewer than two.

        The runs of a round are paired, so that what drifts from round to round cancels: a
        randomized block design, whose residual spread is that of all that ran in these rounds.
        """
        mine = self._rounds.get(canonical(config), {})
        theirs = self._rounds.get(canonical(over), {})
        rounds = sorted(mine.keys() & theirs.keys())
        if len(rounds) < RUNS_TO_CONFIRM:
            return None
        blocks = []
        noises = {}
        for ran_config, ran in self._rounds.items():
            if ran.keys() >= set(rounds):
                blocks.append(logarithms([ran[number] for number in rounds]))
                noises[ran_config] = noise(list(ran.values()))
        gains = []
        for number in rounds:
            faster = mine[number].tokens_per_second / theirs[number].tokens_per_second
            gains.append(math.log(faster))
        residual = _residual(blocks, list(noises.values()))
        of_both = math.hypot(noises[canonical(config)], noises[canonical(over)])
        half = residual.half(gains, noise=of_both, looks=self.looks)
        center = statistics.fmean(gains)
        low = math.exp(center - half)
        high = math.exp(center + half)
        return Ratio(math.exp(center), low, high, is_paired=True)

    def rounds(self, *, series: int) -> Mapping[TrialConfig, Mapping[int, Measurement]]:
        """Return what was measured in a series, by canonical configuration and round: a round is
        over where one of it runs again, so what joined later is paired with what ran beside it."""
        rounds: dict[TrialConfig, dict[int, Measurement]] = {}
        number = 0
        for of, config, measured in self._measured:
            if of == series:
                ran = rounds.setdefault(config, {})
                number += number in ran
                ran[number] = measured
        return rounds

    @cached_property
    def _rounds(self) -> Mapping[TrialConfig, Mapping[int, Measurement]]:
        return self.rounds(series=self.series)

    @cached_property
    def _levels(self) -> Mapping[TrialConfig, float]:
        """The logarithm of each configuration's step in a round that is like the mean of all, by
        least squares: what ran in slow rounds alone is no slower for it."""
        configs = list(self._rounds)
        numbers = sorted(set().union(*self._rounds.values()))
        cells = []
        runs = []
        for column, ran in enumerate(self._rounds.values()):
            for number, measured in ran.items():
                cells.append((column, len(configs) + numbers.index(number)))
                runs.append(measured)
        design = np.zeros((len(cells), len(configs) + len(numbers)))  # (runs, configs + rounds)
        for row, columns in enumerate(cells):
            design[row, columns] = 1.0
        found = np.linalg.lstsq(design, np.array(logarithms(runs)), rcond=None)[0]
        mean = found[len(configs) :].mean()
        # Rounded, so that equal steps stay equal.
        levels = np.round(found[: len(configs)] + mean, 9).tolist()
        return dict(zip(configs, levels, strict=True))

    @cached_property
    def _spread(self) -> Spread:
        of_series = [runs for key, runs in self._runs.items() if key[0] == self.series]
        return Spread.of_runs(of_series)

    @cached_property
    def _runs(self) -> Mapping[tuple[int, TrialConfig], Sequence[Measurement]]:
        """What was measured, by series and canonical configuration."""
        known: dict[tuple[int, TrialConfig], list[Measurement]] = {}
        for series, config, measured in self._measured:
            known.setdefault((series, config), []).append(measured)
        return known

    @cached_property
    def _measured(self) -> Sequence[tuple[int, TrialConfig, Measurement]]:
        """Each run's series, canonical configuration and measurement, in order."""
        return [
            (record.series, canonical(record.config), record.outcome.measurement)
            for record in self.records
            if record.purpose == "confirm" and isinstance(record.outcome, Measured)
        ]


def pool(
    runs: Sequence[Measurement],
    *,
    spread: Spread,
    level: float | None = None,
    looks: int = 1,
    soak: Measurement | None = None,
) -> Measurement:
    """Return several runs of one configuration as one measurement.

    Its step is the geometric mean of their median steps; memory is the most that any took, and what
    was spent on them, in steps and in seconds, adds up.

    Args:
        runs: at least two.
        spread: of all runs of their series, in units of each one's `noise`.
        level: the logarithm of the step where that is known better than by their mean.
        looks: how often it may be looked at whether the runs are enough.
        soak: of the same configuration; what its allocator did counts as well.
    """

    steps = logarithms(runs)
    center = level
    if center is None:
        center = statistics.fmean(steps)
    half = spread.half(steps, noise=noise(runs), looks=looks)
    retries = max(map(attrgetter("allocator_retries"), runs))
    if soak is not None:
        retries = max(retries, soak.allocator_retries)
    flags: dict[str, None] = {}
    for run in runs:
        flags |= dict.fromkeys(run.flags)
    # That the steps of one run were uneven is in the spread.
    flags.pop("noisy", None)
    if retries:
        flags["allocator_retries"] = None
    if half > math.log1p(UNSURE_FROM):
        flags["noisy"] = None
    changes: dict[str, Any] = {
        "step_seconds_ci95": (math.exp(center - half), math.exp(center + half)),
        "allocator_retries": retries,
        "flags": tuple(flags),
    }
    for key, pooled in _POOLED.items():
        values = map(attrgetter(key), runs)
        known = [value for value in values if value is not None]
        changes[key] = None
        if known:
            changes[key] = pooled(known)
    return replaced(scaled(runs[-1], runs[-1].step_seconds / math.exp(center)), **changes)


_POOLED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "steps_measured": sum,
    "steps_warmup": sum,
    "setup_seconds": sum,
    "measured_seconds": sum,
    "training_seconds": sum,
    "compile_seconds": sum,
    "peak_allocated_bytes": max,
    "peak_reserved_bytes": max,
    "peak_device_bytes": max,
    "joules_per_token": statistics.fmean,
}
"""How a figure of several runs becomes one, of those in which it is known."""


def scaled(measured: Measurement, faster: float) -> Measurement:
    """Return a measurement as if every step had been ``faster`` times as fast."""
    ends = measured.step_seconds_ci95
    used = measured.flops_utilization
    return replaced(
        measured,
        tokens_per_second=measured.tokens_per_second * faster,
        samples_per_second=measured.samples_per_second * faster,
        step_seconds=measured.step_seconds / faster,
        step_seconds_ci95=ends and (ends[0] / faster, ends[1] / faster),
        flops_utilization=used and used * faster,
    )


def logarithms(runs: Sequence[Measurement]) -> list[float]:
    """Return the logarithm of each run's median step."""
    return [math.log(run.step_seconds) for run in runs]


def noise(runs: Sequence[Measurement]) -> float:
    """Return how far a single run of a configuration may be off by what its steps show, a
    logarithm's standard deviation; no less than runs differ by anyway."""
    within = [BETWEEN_RUNS]
    for run in runs:
        if run.step_seconds_ci95 is not None:
            low, high = run.step_seconds_ci95
            within.append(math.log(high / low) / 2.0 / ERRORS_OF_STEPS / math.sqrt(len(runs)))
    return math.hypot(*within)


def _residual(blocks: Sequence[Sequence[float]], noises: Sequence[float]) -> Spread:
    """Return how far runs spread that neither the configuration (a row) nor the round (a column)
    explains, in units of each row's noise."""
    units = np.array(noises)[:, None]
    away = np.array(blocks) / units
    away -= away.mean(axis=1, keepdims=True)
    degrees = (away.shape[0] - 1) * (away.shape[1] - 1)
    if degrees == 1:
        # t is 12.7 with one degree of freedom. Drift that is left in can only widen the interval.
        degrees = 2
    else:
        # A round's own is a share of every step: in units, so much the more where steps are even.
        away -= (away / units).sum(axis=0) / (units**-2.0).sum() / units
    return Spread(math.sqrt((away**2).sum() / degrees), degrees)


def _soak_seconds(record: TrialRecord) -> float:
    measured = record.measurement
    if measured is None or measured.soak is None:
        return 0.0
    return measured.soak.seconds


def soaked_long_enough(record: TrialRecord, *, seconds: float, steps: int) -> bool:
    """Whether a soak that ended lasted as long as is asked for now, in seconds or in steps."""
    measured = record.measurement
    if measured is None or measured.soak is None:
        return measured is not None
    return measured.soak.seconds >= seconds or measured.soak.steps >= steps


FEW_ROWS = 50
"""Of fewer held-out examples a loss says little, and its interval too."""
_RESAMPLES = 2000


def binomial_ci95(wins: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, of which so many were found among so many."""
    share = wins / count
    z = NormalDist().inv_cdf(0.975)
    shrunk = 1 + z * z / count
    middle = (share + z * z / (2 * count)) / shrunk
    half = z / shrunk * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return middle - half, middle + half


def loss_difference(one: QualityReport, other: QualityReport) -> tuple[float, float] | None:
    """Return the 95 % interval of how much larger one held-out loss is than another: by a paired
    bootstrap over the blocks of held-out examples, the same draws each time. None where they are
    not of the same examples.
    """
    if not one.eval_blocks or not other.eval_blocks:
        return None
    losses, tokens = np.array(one.eval_blocks).T  # (blocks,)
    other_losses, other_tokens = np.array(other.eval_blocks).T
    if not np.array_equal(tokens, other_tokens):
        return None
    if len(tokens) == 1:
        return -math.inf, math.inf
    drawn = np.random.default_rng(0).integers(len(tokens), size=(_RESAMPLES, len(tokens)))
    counts = tokens[drawn]  # (resamples, blocks)
    differences = ((losses - other_losses)[drawn] * counts).sum(1) / counts.sum(1)
    low, high = np.quantile(differences, (0.025, 0.975))
    return float(low), float(high)


def is_told_apart(one: QualityReport, other: QualityReport) -> bool:
    """Whether two held-out losses differ by more than the choice of examples explains; where that
    is not known, whether they differ."""
    difference = loss_difference(one, other)
    if difference is None:
        return one.eval_loss != other.eval_loss
    return difference[0] > 0 or difference[1] < 0


def pooled_qualities(
    records: Iterable[TrialRecord], confirmations: Iterable[TrialRecord]
) -> Mapping[TrialConfig, QualityReport]:
    """Return what each canonical configuration learned, over all seeds that it was trained with.

    A loss depends on the adapters that a training began with and on the order of the examples, and
    so on its seed; of several it is the mean, with Student's 95 % interval.

    Args:
        records: trials of the search, each trained with the study's own seed.
        confirmations: what trained some of them with further ones.
    """
    trained = list(records)
    for record in confirmations:
        if record.purpose == "quality":
            trained.append(record)
    reports: dict[TrialConfig, dict[int, QualityReport]] = {}
    for record in trained:
        if isinstance(record.outcome, Measured) and record.outcome.measurement.quality:
            report = record.outcome.measurement.quality
            reports.setdefault(canonical(record.config), {})[report.seed] = report
    losses = {}
    for config, by_seed in reports.items():
        losses[config] = list(map(attrgetter("eval_loss"), by_seed.values()))
    spread = Spread.of(losses.values())
    pooled = {}
    for config, by_seed in reports.items():
        half = math.inf
        if len(by_seed) > 1:
            half = spread.half(losses[config])
        pooled[config] = _pooled_quality(list(by_seed.values()), half)
    return pooled


def _pooled_quality(runs: Sequence[QualityReport], half: float) -> QualityReport:
    """Return what trainings with several seeds learned, as one report.

    Args:
        runs: one of each seed.
        half: half the 95 % interval of their mean loss.
    """
    if len(runs) == 1:
        return runs[0]
    loss = statistics.fmean(map(attrgetter("eval_loss"), runs))
    won = [run.eval_wins for run in runs if run.eval_wins is not None]
    changes: dict[str, Any] = {}
    if won:
        wins = statistics.fmean(won)
        changes["eval_wins"] = wins
        changes["reward_accuracy_ci95"] = binomial_ci95(wins, runs[0].eval_rows)
    blocks = []
    # Of each block of held-out examples the loss with every seed.
    for of_seeds in zip(*(run.eval_blocks or () for run in runs), strict=False):
        block_loss = statistics.fmean(block[0] for block in of_seeds)
        blocks.append((block_loss, of_seeds[0][1]))
    return replaced(
        runs[0],
        **changes,
        eval_loss=loss,
        eval_blocks=tuple(blocks),
        train_loss=statistics.fmean(map(attrgetter("train_loss"), runs)),
        seconds=sum(map(attrgetter("seconds"), runs)),
        seeds=tuple(map(attrgetter("seed"), runs)),
        eval_loss_ci95=(loss - half, loss + half),
    )
