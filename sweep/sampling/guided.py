"""The guided sampler: the next trial is the one with the most expected improvement per second.

It looks at every candidate each time. What it knows comes from the study's trials alone, so that a
study that resumes is where it was; a running trial is taken to end as predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

from search_spaces.config import TrialConfig
from search_spaces.knobs import KNOBS
from search_spaces.space import Objective, StepBudget
from storage import mapping
from storage.objectives import merits_of
from storage.records import NEIGHBOUR, Measured, OutOfMemory, PrunedSlow, TrialRecord
from sweep.sampling.acquisition import Goal, expected_improvement, most_telling, uncertain_first
from sweep.sampling.encoding import Candidate, Candidates, Params, identity
from sweep.sampling.expecting import Array, Codes, Expecting, Foreseen
from sweep.sampling.surrogate import (
    Column,
    Mixture,
    Observed,
    Peaks,
    Seen,
    SpeedSurrogate,
    chance_to_fit,
)

ATTACH_SECONDS = 1.5
"""Of a trial beside its steps: attach, first step, detach."""
COMPILE_SECONDS = 5.0
"""Of a shape that was not compiled yet: 3 to 7 s, static shapes."""
REBUILD_SECONDS = 1.0
"""Of a frozen base that is not the one that is there."""
STEPS_MORE = 4
"""Steps of a usual trial beside the fewest of its warm-up and its measuring."""
NOISE = 0.01
"""Least relative error of a trial's speed, however narrow its interval."""
NOISE_UNKNOWN = 0.03
"""Of a speed without an interval."""
NOISE_UNEVEN = 0.10
"""Of a speed that was measured beside another process, or of uneven steps."""
FRAGMENTATION = 0.06
"""How far below the budget the peak of a trial may be that ran out of memory all the same, where
free memory is in pieces."""
REFINED = 4
"""Best candidates around which a space that is not listed is looked at more closely."""
BOLDNESS = 0.25
"""Share of its uncertainty by which a prediction may look better when a trial is chosen.

Its whole uncertainty sends a search to what is little known, which costs trials: with a quarter it
came within 2 % of the best in 1.25 trials instead of 1.7 (mean of 32 surfaces cut out of two), and
the best prediction alone needed 1.8. What ends a search is the whole uncertainty.
"""
WORTH_BOLDNESS = 0.01
"""Expected gain, its uncertainty taken whole, below which the boldest choice is none: the next is
then the one that most is to be gained of, however little is known of it."""
LEARNED_MAX = 200
"""Trials with a speed that one choice is worked out from: five times what a study has. Of a space
of 20,000 configurations each hundred takes a quarter of a second."""
REMEMBERED_MAX = 512
"""Newest trials from which memory is known: it repeats to the byte."""
OPEN_CHANCE = 0.05
"""Probability of being faster than the best so far from which a configuration is not ruled out."""

_NUMBERS = {
    "micro_batch_size": 1.5,
    "seq_len": 2.0,
    "lora_rank": 3.0,
    "effective_batch_size": 2.0,
    "data_parallel": 2.0,
    "checkpoint_fraction": 0.5,
}
"""Settings that are compared as numbers, by how far apart two values are alike: doublings, but of
the fraction."""
_OTHER_KIND = 0.5
"""Correlation of two different words of one setting."""


@dataclass(frozen=True)
class Outlook:
    """What is still to be gained by further trials."""

    gain: float
    """The largest expected gain of a further trial, relative to the best so far; infinite where
    nothing fits yet."""
    config: TrialConfig | None = None
    """The trial of which it is expected; None where nothing is left to try."""
    chance: float = 0.0
    """Probability that it fits and is better than the best so far."""
    open: int = 0
    """Configurations that could still be better, with a probability worth naming."""
    looked_at: int = 0
    """Configurations that were weighed, tried ones not among them."""


@dataclass(frozen=True)
class _Told:
    """What one trial says."""

    record: TrialRecord | None
    """None while it runs, and where it ended without one."""
    config: TrialConfig
    key: str
    """Equal for configurations that train the same way."""


@dataclass
class Trials:
    """What a study's trials say, the one that is asked for apart."""

    records: list[TrialRecord] = field(default_factory=list)
    running: list[TrialConfig] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    """Identities of both, and of what ended without a record."""
    learned: list[TrialRecord] = field(default_factory=list)
    """The trials with a speed that a surrogate is fitted to."""

    @property
    def remembered(self) -> list[TrialRecord]:
        """The trials from which memory is known."""
        return self.records[-REMEMBERED_MAX:]


@dataclass(frozen=True)
class _World:
    """The candidates and everything tried, with what is predicted of each, a row each."""

    candidates: tuple[Candidate, ...]
    configs: tuple[TrialConfig, ...]
    rows: Mapping[str, int]
    foreseen: Foreseen
    speed: SpeedSurrogate
    peaks: Peaks | None
    tokens_per_step: Array
    bases: Codes
    """Equal for configurations that share a frozen base."""
    shapes: Mapping[int, Any]
    """What each compiled configuration's layers are compiled for, by row."""

    def row(self, config: TrialConfig) -> int:
        """Return the row of a configuration."""
        return self.rows[identity(config)]


@dataclass(frozen=True)
class _Weighed:
    """What each row promises; the candidates come first."""

    merits: Array
    """By which one is chosen: expected gain per second, with `BOLDNESS`; minus infinity for what
    was tried."""
    gains: Array
    """Expected, relative to the best so far, the uncertainty taken whole; minus infinity for what
    was tried."""
    chances: Array
    """Of fitting and being better."""
    seconds: Array
    """Of the device that a trial is expected to take."""


class CandidateSampler(BaseSampler):
    """Chooses among candidates by what a study's trials say; serves one study.

    Args:
        candidates: what may be asked for.
        inner: draws what the candidates do not say.
        forecaster: refuses what is hopeless, and predicts.
    """

    def __init__(
        self, candidates: Candidates, *, inner: BaseSampler, forecaster: Expecting
    ) -> None:
        self._candidates = candidates
        self._inner = inner
        self._forecaster = forecaster
        self._known: dict[int, _Told | None] = {}
        """What the trials that ended say, by number."""

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the whole space, also before there is any trial to infer it from."""
        return dict(self._candidates.free)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Draw one parameter that the space does not know, or that a queued trial left open."""
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def _read(self, study: optuna.Study, *, besides: int | None) -> Trials:
        trials = Trials()
        for trial in study.get_trials(deepcopy=False):
            if trial.number == besides or (told := self._told_by(trial)) is None:
                continue
            trials.tried.add(told.key)
            if told.record is not None:
                trials.records.append(told.record)
            elif trial.state is TrialState.RUNNING:
                trials.running.append(told.config)
        return trials

    def _told_by(self, trial: FrozenTrial) -> _Told | None:
        """Return what a trial says, worked out once where it has ended; None for nothing.

        What was closed before it ran says nothing: it is still to be tried. A run that measured a
        winner again says only that it ran out of memory, as its speed is that of another process
        and another hour.
        """
        if trial.number in self._known:
            return self._known[trial.number]
        told: _Told | None = None
        record = mapping.record_of(trial)
        if record is None and not mapping.never_ran(trial):
            config = mapping.config_of(trial)
            if config is None and self._candidates.free.keys() <= trial.params.keys():
                config = self._candidates.config(trial.params)
            told = None if config is None else _Told(None, config, identity(config))
        elif record and (record.purpose == "search" or isinstance(record.outcome, OutOfMemory)):
            told = _Told(record, record.config, identity(record.config))
        if trial.state.is_finished():
            self._known[trial.number] = told
        return told


class GuidedSampler(CandidateSampler):
    """Asks for the most expected improvement per second of device time.

    Args:
        candidates: what may be asked for.
        forecaster: refuses what is hopeless, and predicts.
        objectives: what is searched for.
        steps: how long a trial trains.
        seed: decides between candidates of which the same is expected.
    """

    def __init__(
        self,
        candidates: Candidates,
        *,
        forecaster: Expecting,
        objectives: Sequence[Objective],
        steps: StepBudget,
        seed: int,
    ) -> None:
        super().__init__(candidates, inner=RandomSampler(seed=seed), forecaster=forecaster)
        self._objectives = uncertain_first(objectives)
        self._steps = steps.warmup_min + steps.measured_min + STEPS_MORE
        self._steps_seconds_max = steps.seconds_max
        self._seed = seed
        self._world: _World | None = None
        self._best: tuple[Params, ...] = ()
        self._weighings: list[tuple[_World, Any, _Weighed]] = []
        """The last two, with the trials that they are by."""

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the candidate of which most is to be gained."""
        chosen = self._choose(self._learned(study, besides=trial.number))
        return {} if chosen is None else {name: chosen.params[name] for name in search_space}

    def prepare(self) -> None:
        """Do once, before anything is asked, what every choice takes first."""
        if self._candidates.is_listed:
            nothing = Trials()
            self._weighed(self._seen(nothing), nothing)

    def outlook(self, study: optuna.Study, *, besides: int | None = None) -> Outlook:
        """Return what is still to be gained, by what the study's trials say, one of them apart."""
        trials = self._learned(study, besides=besides)
        world = self._seen(trials)
        weighed = self._weighed(world, trials)
        row = self._first_acceptable(world, weighed.gains)
        if row is None:
            return Outlook(gain=0.0)
        count = len(world.candidates)
        left = weighed.merits[:count] > -np.inf
        return Outlook(
            gain=float(weighed.gains[row]),
            config=world.candidates[row].config,
            chance=float(weighed.chances[row]),
            open=int((weighed.chances[:count][left] >= OPEN_CHANCE).sum()),
            looked_at=int(left.sum()),
        )

    def fastest_of(
        self, study: optuna.Study, is_wanted: Callable[[TrialConfig], bool]
    ) -> TrialConfig | None:
        """Return what is expected to be the fastest that fits of some configurations, none of them
        tried before; None where none is left that the pre-flight does not refuse."""
        trials = self._learned(study, besides=None)
        world = self._seen(trials)
        left = [c.key not in trials.tried and is_wanted(c.config) for c in world.candidates]
        speed, fit = self._speed(world, trials), _fit(world, trials)
        promised = (np.exp(speed.mean + _class_offsets(world, speed, fit)) * fit)[: len(left)]
        row = self._first_acceptable(world, np.where(left, promised, -np.inf))
        return None if row is None else world.candidates[row].config

    def _learned(self, study: optuna.Study, *, besides: int | None) -> Trials:
        trials = self._read(study, besides=besides)
        measured = [record for record in trials.records if record.measurement is not None]
        merits = np.full((len(measured), len(self._objectives)), -np.inf)
        for row, record in enumerate(measured):
            if isinstance(record.outcome, Measured):
                merits[row] = merits_of(record, self._objectives)
        trials.learned = [measured[at] for at in most_telling(merits, most=LEARNED_MAX)]
        return trials

    def _choose(self, trials: Trials) -> Candidate | None:
        world = self._seen(trials)
        weighed = self._weighed(world, trials)
        row = self._first_acceptable(world, weighed.merits)
        if row is not None and weighed.gains[row] < WORTH_BOLDNESS:
            # What looks best is as good as found: what may be better by surprise has its turn.
            row = self._first_acceptable(world, weighed.gains / weighed.seconds)
        if row is None:
            # All that is left is refused, or was tried: what needs the least memory gets its
            # verdict without the device.
            left = [c for c in world.candidates if c.key not in trials.tried] or world.candidates
            peaks = world.foreseen.peak_bytes
            needs = np.zeros(len(world.rows)) if peaks is None else np.nan_to_num(peaks, nan=1e30)
            return min(left, key=lambda c: needs[world.rows[c.key]], default=None)
        order = np.argsort(-weighed.merits[: len(world.candidates)])[:REFINED]
        self._best = tuple(world.candidates[at].params for at in order)
        return world.candidates[row]

    def _first_acceptable(self, world: _World, scores: Array) -> int | None:
        """Return the candidate of the highest score that the pre-flight does not refuse; None where
        there is none. They are held against it one by one, as few are ever needed."""
        for row in np.argsort(-scores[: len(world.candidates)]):
            if scores[row] == -np.inf:
                return None
            if not self._forecaster.expect(world.candidates[row].config).is_refused:
                return int(row)
        return None

    def _seen(self, trials: Trials) -> _World:
        """Return the candidates with what was tried; made anew only where either has changed."""
        told = [record.config for record in (*trials.learned, *trials.remembered)]
        tried = {identity(config): config for config in (*told, *trials.running)}
        world = self._world
        if world and self._candidates.is_listed and tried.keys() <= world.rows.keys():
            return world
        candidates = self._candidates.near(self._best)
        known = {candidate.key: candidate.config for candidate in candidates}
        known |= {key: config for key, config in tried.items() if key not in known}
        configs = tuple(known.values())
        foreseen = self._forecaster.foresee(configs)
        log_tokens = np.log(
            [float(config.tokens_per_step) for config in configs]
            if foreseen.tokens_per_step is None
            else foreseen.tokens_per_step
        )
        self._world = _World(
            candidates,
            configs,
            {key: row for row, key in enumerate(known)},
            foreseen,
            SpeedSurrogate(columns(configs), log_tokens=log_tokens, physics=foreseen.physics),
            _peaks(configs, foreseen),
            np.exp(log_tokens),
            Column.of_kinds(list(map(_base, configs)), common=0.0).codes,
            {row: _shape(config) for row, config in enumerate(configs) if config.compile},
        )
        return self._world

    # What is to be gained

    def _weighed(self, world: _World, trials: Trials) -> _Weighed:
        """Return what each candidate promises, worked out once: whether to go on, by these trials
        and by all but the last, and what is next are read from it."""
        numbers = tuple(record.number for record in trials.records)
        known = numbers, tuple(trials.running), frozenset(trials.tried)
        for of_world, by, weighed in self._weighings:
            if of_world is world and by == known:
                return weighed
        weighed = self._weigh(world, trials)
        if self._candidates.is_listed:
            # Else each look is at other candidates.
            self._weighings = [*self._weighings[-1:], (world, known, weighed)]
        return weighed

    def _weigh(self, world: _World, trials: Trials) -> _Weighed:
        """Return what each candidate promises; nothing of what was tried."""
        speed, fit = self._speed(world, trials), _fit(world, trials)
        offsets = _class_offsets(world, speed, fit)
        compared = replace(speed, means=speed.means + offsets)
        goal = Goal.of(self._objectives, foreseen=world.foreseen, speed=compared)
        best = self._reached(world, trials, offsets)
        gains, chances = expected_improvement(goal, best)
        # Without a prediction there is nothing to be bold about.
        share = 1.0 if world.foreseen.physics is None else BOLDNESS
        merits = expected_improvement(replace(goal, first=goal.first.surer(share)), best)[0] * fit
        gains = gains * fit if len(best) else np.full(len(gains), np.inf)
        seconds = self._seconds(world, trials, speed)
        if len(best):
            merits = merits / seconds
        # Equals are told apart by seed and trial, so that a study that resumes is where it was.
        draws = np.random.default_rng([self._seed, len(trials.tried)]).random(len(merits))
        merits = merits * (1.0 + 1e-6 * draws)
        tried = [row for key, row in world.rows.items() if key in trials.tried]
        merits[tried] = gains[tried] = -np.inf
        return _Weighed(merits, gains, chances * fit, seconds)

    def _reached(self, world: _World, trials: Trials, offsets: Array) -> Array:
        """Return the objectives of the trials that count among the best: those that ran to their
        end, and that the space holds."""
        reached = []
        for record in trials.learned:
            row = world.row(record.config)
            is_inside = row < len(world.candidates) or not self._candidates.is_listed
            if is_inside and isinstance(record.outcome, Measured):
                values = np.array(merits_of(record, self._objectives), dtype=float)
                if self._objectives[0] == "tokens_per_second":
                    values[0] *= np.exp(offsets[row])
                reached.append(values)
        return np.array(reached)

    def _speed(self, world: _World, trials: Trials) -> Mixture:
        measured = [(r, r.measurement) for r in trials.learned if r.measurement is not None]
        observed = Observed(
            np.array([world.row(record.config) for record, _ in measured], dtype=np.intp),
            np.log(np.array([measurement.tokens_per_second for _, measurement in measured])),
            np.array([_noise(record) for record, _ in measured]),
        )
        speed = world.speed.posterior(observed)
        if not trials.running:
            return speed
        # A running trial will say something of its like: as if it ended just as predicted.
        running = np.array([world.row(config) for config in trials.running], dtype=np.intp)
        return world.speed.posterior(
            Observed(
                np.append(observed.rows, running),
                np.append(observed.log_speed, speed.mean[running]),
                np.append(observed.noise, np.full(len(running), NOISE_UNKNOWN)),
            )
        )

    def _seconds(self, world: _World, trials: Trials, speed: Mixture) -> Array:
        """Return the device seconds that each candidate's trial is expected to take."""
        steps = world.tokens_per_step / np.exp(speed.mean) * self._steps
        seconds = ATTACH_SECONDS + np.minimum(steps, 2 * self._steps_seconds_max)
        compiled = {_shape(record.config) for record in trials.records if record.config.compile}
        for row, shape in world.shapes.items():
            if shape not in compiled:
                seconds[row] += COMPILE_SECONDS
        if trials.records:
            there = world.bases[world.row(trials.records[-1].config)]
            seconds += REBUILD_SECONDS * (world.bases != there)
        return seconds


def _fit(world: _World, trials: Trials) -> Array:
    """Return the probability that each configuration fits."""
    budget = world.foreseen.budget_bytes
    if world.peaks is None or budget is None:
        return np.ones(len(world.configs))
    rows, peaks, bounds = [], [], []
    for record in trials.remembered:
        match record.outcome:
            case Measured(measurement=measured) | PrunedSlow(measurement=measured):
                peak, is_bound = float(measured.peak_allocated_bytes), False
            case OutOfMemory(stage=stage, flags=flags) if (
                stage != "load" and NEIGHBOUR not in flags
            ):
                slack = FRAGMENTATION if world.foreseen.is_cut_up else 0.0
                peak, is_bound = budget * (1.0 - slack), True
            case _:
                continue
        rows.append(world.row(record.config))
        peaks.append(peak)
        bounds.append(is_bound)
    seen = Seen(
        np.array(rows, dtype=np.intp), np.log(np.array(peaks)), np.array(bounds, dtype=bool)
    )
    return chance_to_fit(world.peaks, seen, log_budget=float(np.log(budget)))


def _class_offsets(world: _World, speed: Mixture, fit: Array) -> Array:
    """Return what is added to each log speed, so that classes of numerics compare.

    Where another GPU stands in for the target, the most promising of each class gets the speed that
    is predicted of it there, and the rest of its class keeps its distance to that.
    """
    target, offsets = world.foreseen.target, np.zeros(len(world.configs))
    if target is None:
        return offsets
    classes = np.array([config.numerics for config in world.configs])
    log_seconds = target.log_seconds(np.zeros(len(target.spread)), slice(None))
    there = np.log(world.tokens_per_step) - log_seconds
    promising = np.exp(speed.mean) * fit
    promising[len(world.candidates) :] = 0.0
    for of_class in (classes == numerics for numerics in np.unique(classes)):
        best = np.argmax(np.where(of_class, promising, -1.0))
        offsets[of_class] = there[best] - speed.mean[best]
    return offsets


def columns(configs: Sequence[TrialConfig]) -> list[Column]:
    """Return the properties by which configurations are compared: work, then each setting."""
    tokens = np.log2([float(config.tokens_per_micro_batch) for config in configs])
    found = [Column.of_numbers(tokens, scale=_NUMBERS["micro_batch_size"])]
    for key, knob in KNOBS.items():
        if key == "micro_batch_size":
            continue
        if key in _NUMBERS:
            numbers = np.array([_number(key, config) for config in configs])
            found.append(Column.of_numbers(numbers, scale=_NUMBERS[key]))
        elif knob.memory != "untouched" or knob.shapes_base:
            kinds = [getattr(config, key) for config in configs]
            found.append(Column.of_kinds(kinds, common=_OTHER_KIND))
    return found


def _number(key: str, config: TrialConfig) -> float:
    if key == "checkpoint_fraction":
        return config.checkpoint_fraction
    count = config.accumulation_steps if key == "effective_batch_size" else getattr(config, key)
    return float(np.log2(count))


def _peaks(configs: Sequence[TrialConfig], foreseen: Foreseen) -> Peaks | None:
    if foreseen.peak_bytes is None or foreseen.uncertainty is None:
        return None
    # Compiled layers keep other tensors than eager ones, and recomputed ones are predicted worse:
    # each says nothing of the other.
    is_compiled = np.array([config.compile for config in configs], dtype=float)
    pairs = np.column_stack([is_compiled, foreseen.uncertainty])
    _, kinds = np.unique(pairs, axis=0, return_inverse=True)
    return Peaks(np.log(foreseen.peak_bytes), foreseen.uncertainty, kinds)


def _noise(record: TrialRecord) -> float:
    """Return how far a trial's speed may be off, relative: one standard deviation."""
    measured = record.measurement
    if measured is None or measured.speed_interval is None:
        return NOISE_UNKNOWN
    if measured.is_noisy:
        return NOISE_UNEVEN
    low, high = measured.speed_interval
    return float(np.hypot(NOISE, np.log(high / low) / 4))


def _shape(config: TrialConfig) -> Any:
    """Return what a layer is compiled for."""
    ignored = {"effective_batch_size", "optimizer", "lora_alpha", "learning_rate"}
    return tuple(value for key, value in config if key not in ignored)


_BASE_KEYS = tuple(key for key, knob in KNOBS.items() if knob.shapes_base)


def _base(config: TrialConfig) -> Any:
    return tuple(getattr(config, key) for key in _BASE_KEYS)
