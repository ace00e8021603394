"""The guided sampler: the next trial is the one with the most expected improvement per second.

It looks at every candidate each time. What it knows comes from the study's trials alone, so that a
study that resumes is where it was; a running trial is taken to end as predicted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

from qlora_sweep.search_spaces.config import SETTINGS, TrialConfig
from qlora_sweep.search_spaces.linears import CapacityClass, nearest_capacity
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import Objective, SearchSpace, StepBudget
from qlora_sweep.storage import codec
from qlora_sweep.storage.ranking import objective_value, turned
from qlora_sweep.storage.records import NEIGHBOUR, Measured, OutOfMemory, PrunedSlow, TrialRecord
from qlora_sweep.sweep.predict.forecast import Forecaster, Progress, silent
from qlora_sweep.sweep.predict.memory.prediction import CAPPED_EXPANDABLE, stated_uncertainty
from qlora_sweep.sweep.predict.speed.predictor import NINE_IN_TEN
from qlora_sweep.sweep.predict.speed.stand_in import Took
from qlora_sweep.sweep.sampling.encoding import Candidate, Candidates, Params, identity
from qlora_sweep.sweep.sampling.surrogate import (
    LEAST,
    Array,
    Column,
    Mixture,
    Observed,
    PredictedPeaks,
    SpeedSurrogate,
    chance_to_fit,
    expected_improvement,
    expected_of,
    most_telling,
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
free memory is in pieces. In expandable segments it is not."""
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
LEARNED_MAX = 128
"""Trials with a speed that one choice is worked out from: three times what a study has. Of a space
of 20,000 configurations each hundred takes a quarter of a second."""
REMEMBERED_MAX = 256
"""Newest trials from which memory is known: it repeats to the byte."""
FASTER = 1.05
"""Expected speed over what was reached from which one more trial of a class is worth its time."""
OPEN_CHANCE = 0.05
"""Probability of being faster than the best so far from which a configuration is not ruled out."""

Flags = NDArray[np.bool_]
_NUMBERS: Mapping[str, tuple[float, Callable[[TrialConfig], float]]] = {
    "micro_batch_size": (1.5, lambda config: np.log2(float(config.tokens_per_micro_batch))),
    "seq_len": (2.0, lambda config: np.log2(config.seq_len)),
    "lora_rank": (3.0, lambda config: np.log2(config.lora_rank)),
    "effective_batch_size": (2.0, lambda config: np.log2(config.accumulation_steps)),
    "data_parallel": (2.0, lambda config: np.log2(config.data_parallel)),
    "checkpoint_fraction": (0.5, lambda config: config.checkpoint_fraction),
}
"""Settings that are compared as numbers, by how far apart two values are alike: doublings, but of
the fraction. Of a micro-batch its tokens count."""
DEFAULT_STEPS = StepBudget()
SETTLED_BELOW: float = SearchSpace.model_fields["stop_below_gain"].default
"""Expected gain below which a class is settled where a search goes on to its last trial."""
_OTHER_KIND = 0.5
"""Correlation of two different words of one setting."""
_NOT_COMPILED_IN = {
    "effective_batch_size",
    "optimizer",
    "lora_alpha",
    "learning_rate",
    "checkpoint_offload",
}
_BASE_KEYS = [key for key, setting in SETTINGS.items() if setting.shapes_base]
_base = attrgetter(*_BASE_KEYS)


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
class ClassForecast:
    """What is expected to be the fastest of a capacity class that was not measured."""

    config: TrialConfig
    tokens_per_second: float
    """On the target."""
    peak_allocated_bytes: int | None


@dataclass
class Trials:
    """What a study's trials say, the one that is asked for apart."""

    records: list[TrialRecord] = field(default_factory=list)
    running: list[TrialConfig] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    """Identities of both, and of what ended without a record."""
    learned: list[TrialRecord] = field(default_factory=list)
    """The trials with a speed that a surrogate is fitted to."""


@dataclass(frozen=True)
class _Seen:
    """What one trial says."""

    config: TrialConfig | None = None
    """None where it says nothing."""
    record: TrialRecord | None = None
    """None where it runs, or ended without one."""

    @cached_property
    def key(self) -> str:
        """Identity of the configuration; empty without one."""
        return "" if self.config is None else identity(self.config)


class _World:
    """The candidates and everything tried, with what is predicted of each, a row each."""

    def __init__(
        self,
        candidates: tuple[Candidate, ...],
        tried: Mapping[str, TrialConfig],
        forecaster: Forecaster,
    ) -> None:
        by_key = {candidate.key: candidate.config for candidate in candidates}
        for key, config in tried.items():
            by_key.setdefault(key, config)
        configs = tuple(by_key.values())
        self.candidates = candidates
        self.configs = configs
        self._capacities: Sequence[CapacityClass] | None = None
        self.rows = dict(zip(by_key, itertools.count()))
        self.forecasts = forecasts = forecaster.forecast(configs)
        self.log_tokens = np.log(forecasts.tokens_per_step)
        self.speed = SpeedSurrogate(
            columns(configs), log_tokens=self.log_tokens, physics=forecasts.physics
        )
        self.peaks: PredictedPeaks | None = None
        if forecasts.peak_bytes is not None:
            # Compiled layers keep other tensors than eager ones, and recomputed ones are predicted
            # worse: each says nothing of the other.
            pairs = [(c.compile, stated_uncertainty(c).allocated) for c in configs]
            _, kinds = np.unique(np.array(pairs, float), axis=0, return_inverse=True)
            self.peaks = PredictedPeaks(np.log(forecasts.peak_bytes), forecasts.uncertainty, kinds)
        self.numerics = np.array([config.numerics for config in configs])
        self.stand_in = forecasts.target
        self.bases = Column.of_kinds(list(map(_base, configs)), common=0.0).codes
        """Equal for configurations that share a frozen base."""
        self.shapes: dict[int, Any] = {}
        """What each compiled configuration's layers are compiled for."""
        for row, config in enumerate(configs):
            if config.compile:
                self.shapes[row] = _shape(config)

    def row(self, config: TrialConfig) -> int:
        """Return the row of a configuration."""
        return self.rows[identity(config)]

    @property
    def is_candidate(self) -> Flags:
        """Which rows may be asked for."""
        return np.arange(len(self.configs)) < len(self.candidates)

    def capacities(self, model: ModelSpec) -> Sequence[CapacityClass]:
        """Return each row's capacity class."""
        if self._capacities is None:
            of_spelling: dict[tuple[Any, Any], CapacityClass] = {}
            capacities: list[CapacityClass] = []
            for config in self.configs:
                spelled = config.lora_rank, config.target_modules
                if spelled not in of_spelling:
                    of_spelling[spelled] = CapacityClass.of(config, model)
                capacities.append(of_spelling[spelled])
            self._capacities = capacities
        return self._capacities


@dataclass(frozen=True)
class _Weighed:
    """What each row promises; the candidates come first."""

    world: _World
    goodness: Array
    """By which one is chosen: expected gain per second, with `BOLDNESS`; minus infinity for what
    was tried."""
    gains: Array
    """Expected, relative to the best so far, the uncertainty taken whole; minus infinity for what
    was tried."""
    chances: Array
    """Of fitting and being better."""
    seconds: Array
    """Of the device that a trial is expected to take."""
    speeds: Array
    """Expected tokens/s that decide."""
    fit: Array
    """Probability to fit."""
    asked: Flags
    """Which rows the recommendation is chosen from."""

    def of_asked(self, scores: Array) -> Array:
        """Return scores, minus infinity for what the recommendation is not chosen from."""
        return np.where(self.asked, scores, -np.inf)


class CandidateSampler(BaseSampler):
    """Chooses among candidates by what a study's trials say; serves one study.

    Args:
        candidates: what may be asked for.
        inner: draws what the candidates do not say.
    """

    def __init__(self, candidates: Candidates, *, inner: BaseSampler) -> None:
        self._candidates = candidates
        self._inner = inner
        self._ended: dict[int, _Seen] = {}
        """What the trials that ended say, by number."""
        self._of_ended: Trials | None = None
        """What all of those say together; None until that is worked out."""

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
        tried: set[str] = set()
        running: list[TrialConfig] = []
        for trial in study.get_trials(deepcopy=False):
            if trial.number in self._ended:
                continue
            seen = self._seen(trial)
            if trial.state.is_finished():
                self._ended[trial.number] = seen
                self._of_ended = None
            elif trial.number != besides and seen.config is not None:
                tried.add(seen.key)
                if trial.state is TrialState.RUNNING:
                    running.append(seen.config)
        ended = self._of_ended
        if ended is None or besides in self._ended:
            ended = self._together(besides)
            if besides not in self._ended:
                self._of_ended = ended
        return Trials(list(ended.records), running, ended.tried | tried)

    def _together(self, besides: int | None) -> Trials:
        """Return what the trials that ended say together, one of them apart."""
        ended = Trials()
        for number in sorted(self._ended.keys() - {besides}):
            seen = self._ended[number]
            if seen.record is not None:
                ended.records.append(seen.record)
            if seen.config is not None:
                ended.tried.add(seen.key)
        return ended

    def _seen(self, trial: FrozenTrial) -> _Seen:
        """Return what a trial says.

        What was closed before it ran says nothing: it is still to be tried. A run that measured a
        winner again says only that it ran out of memory, as its speed is that of another process
        and another hour.
        """
        record = codec.record_of(trial)
        if record is not None:
            if record.purpose == "search" or isinstance(record.outcome, OutOfMemory):
                return _Seen(record.config, record)
            return _Seen()
        begun = codec.begun_of(trial)
        if begun is not None:
            return _Seen(begun.config)
        known = self._candidates
        if trial.state is not TrialState.FAIL and known.free.keys() <= trial.params.keys():
            return _Seen(known.config(trial.params))
        return _Seen()


class GuidedSampler(CandidateSampler):
    """Asks for the most expected improvement per second of device time.

    Args:
        candidates: what may be asked for.
        forecaster: refuses what is hopeless, and predicts.
        objective: what is searched for; loss is not predicted, and is none.
        steps: how long a trial trains.
        seed: decides between candidates of which the same is expected.
        model: whose capacity classes compare, where speed alone is searched for: the candidates of
            the class that is asked for come first. None where all compete.
        settled_below: expected gain below which that class is settled, and others have their turn;
            None where the search ends then.
    """

    def __init__(
        self,
        candidates: Candidates,
        *,
        forecaster: Forecaster,
        objective: Objective = "tokens_per_second",
        steps: StepBudget = DEFAULT_STEPS,
        seed: int,
        model: ModelSpec | None = None,
        settled_below: float | None = None,
    ) -> None:
        super().__init__(candidates, inner=RandomSampler(seed=seed))
        self._forecaster = forecaster
        self._model = None
        if objective == "tokens_per_second":
            self._model = model
        self._settled_below = settled_below
        self._objective = objective
        self._steps = steps
        self._seed = seed
        self._world: _World | None = None
        self._best: tuple[Params, ...] = ()
        self._turned_values: dict[int, float] = {}
        """What each trial that ended reached, by number."""
        self._weighings: dict[Any, _Weighed] = {}
        """The last two, by the trials that they are of."""

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the candidate of which most is to be gained."""
        trials = self._read(study, besides=trial.number)
        weighed = self._weighed(trials)
        world = weighed.world
        gains = weighed.of_asked(weighed.gains)
        goodness = weighed.of_asked(weighed.goodness)
        most = gains[: len(world.candidates)].max(initial=-np.inf)
        if self._settled_below is not None and most < self._settled_below:
            # Trials are to be used up.
            gains, goodness = weighed.gains, weighed.goodness
        row = self._first_acceptable(world, goodness)
        if row is not None and gains[row] < WORTH_BOLDNESS:
            # What looks best is as good as found: what may be better by surprise has its turn.
            row = self._first_acceptable(world, gains / weighed.seconds)
        if row is None:
            row = self._first_acceptable(world, weighed.goodness)
        if row is None:
            chosen = _leanest(world, trials)
        else:
            chosen = world.candidates[row]
            order = np.argsort(-goodness[: len(world.candidates)])[:REFINED]
            self._best = tuple(world.candidates[at].params for at in order)
        if chosen is None:
            return {}
        return {name: chosen.params[name] for name in search_space}

    def prepare(self, progress: Progress = silent) -> None:
        """Do once, before anything is asked, what every choice takes first."""
        self._candidates.prepare(progress)
        if self._candidates.is_listed:
            self._weighed(Trials())

    def outlook(self, study: optuna.Study, *, besides: int | None = None) -> Outlook:
        """Return what is still to be gained of what the recommendation is chosen from, by what the
        study's trials say, one of them apart."""
        weighed = self._weighed(self._read(study, besides=besides))
        candidates = weighed.world.candidates
        gains = weighed.of_asked(weighed.gains)
        row = self._first_acceptable(weighed.world, gains)
        if row is None:
            return Outlook(gain=0.0)
        left = gains[: len(candidates)] > -np.inf
        return Outlook(
            gain=float(gains[row]),
            config=candidates[row].config,
            chance=float(weighed.chances[row]),
            open=int((weighed.chances[: len(candidates)][left] >= OPEN_CHANCE).sum()),
            looked_at=int(left.sum()),
        )

    def fastest_of(
        self,
        study: optuna.Study,
        is_wanted: Callable[[TrialConfig], bool],
        measured: Sequence[TrialConfig] = (),
    ) -> TrialConfig | None:
        """Return what is expected to be the fastest that fits of some configurations; None where
        that is hardly faster than what was measured of them, or everything left is refused."""
        trials = self._read(study, besides=None)
        weighed = self._weighed(trials)
        world = weighed.world
        speeds = weighed.speeds * weighed.fit
        left = [c.key not in trials.tried and is_wanted(c.config) for c in world.candidates]
        row = self._first_acceptable(world, np.where(left, speeds[: len(left)], -np.inf))
        reached = 0.0
        for config in measured:
            if identity(config) in world.rows:
                reached = max(reached, weighed.speeds[world.row(config)])
        if row is None or weighed.speeds[row] < FASTER * reached:
            return None
        return world.candidates[row].config

    def unmeasured_classes(self, study: optuna.Study) -> tuple[ClassForecast, ...]:
        """Return what is expected to be the fastest that fits of each capacity class in which
        nothing fitted yet; of what the recommendation is not chosen from."""
        if self._model is None:
            return ()
        trials = self._read(study, besides=None)
        weighed = self._weighed(trials)
        world = weighed.world
        found: list[ClassForecast] = []
        capacities = world.capacities(self._model)
        unmeasured = set(capacities)
        unmeasured.difference_update(capacities[row] for row in self._fitted(world, trials))
        for capacity in sorted(unmeasured, key=str):
            of_class = _equal(capacities, capacity)
            row = self._most_promising(weighed, of_class & ~weighed.asked)
            if row is not None:
                config = world.candidates[row].config
                peak = self._forecaster.expect(config).peak_allocated_bytes
                found.append(ClassForecast(config, float(weighed.speeds[row]), peak))
        return tuple(found)

    def _most_promising(self, weighed: _Weighed, rows: Flags) -> int | None:
        """Return which of some rows is expected to be the fastest, of those that are likely to fit
        and are not refused; None for none."""
        is_likely = rows & weighed.world.is_candidate & (weighed.fit >= OPEN_CHANCE)
        scores = np.where(is_likely, weighed.speeds * weighed.fit, -np.inf)
        return self._first_acceptable(weighed.world, scores)

    def _read(self, study: optuna.Study, *, besides: int | None) -> Trials:
        trials = super()._read(study, besides=besides)
        measured = [record for record in trials.records if record.measurement is not None]
        goodness = np.array([self._turned_value(record) for record in measured])
        trials.learned = [measured[at] for at in most_telling(goodness, most=LEARNED_MAX)]
        return trials

    def _turned_value(self, record: TrialRecord) -> float:
        """Return what a trial reached; minus infinity where it was stopped."""
        if record.number not in self._turned_values:
            reached = -math.inf
            if isinstance(record.outcome, Measured):
                measured = record.outcome.measurement
                reached = turned(self._objective, objective_value(self._objective, measured))
            self._turned_values[record.number] = reached
        return self._turned_values[record.number]

    def _first_acceptable(self, world: _World, scores: Array) -> int | None:
        """Return the candidate of the highest score that the pre-flight does not refuse; None where
        there is none. They are held against it one by one, as few are ever needed."""
        for row in np.argsort(-scores[: len(world.candidates)]):
            if scores[row] == -np.inf:
                return None
            if not self._forecaster.expect(world.candidates[row].config).is_refused:
                return int(row)
        return None

    def _weighed(self, trials: Trials) -> _Weighed:
        """Return what each candidate promises, worked out once: whether to go on, by these trials
        and by all but the last, and what is next are read from it."""
        tried: dict[str, TrialConfig] = {}
        for record in itertools.chain(trials.learned, trials.records[-REMEMBERED_MAX:]):
            tried[identity(record.config)] = record.config
        for config in trials.running:
            tried[identity(config)] = config
        world = self._world
        if world is None or not self._candidates.is_listed or not tried.keys() <= world.rows.keys():
            world = _World(self._candidates.near(self._best), tried, self._forecaster)
            self._world = world
            self._weighings = {}
        numbers = tuple(record.number for record in trials.records)
        key = (numbers, tuple(trials.running), frozenset(trials.tried))
        if key not in self._weighings:
            self._weighings = dict(list(self._weighings.items())[-1:])
            self._weighings[key] = self._weigh(world, trials)
        return self._weighings[key]

    def _weigh(self, world: _World, trials: Trials) -> _Weighed:
        """Return what each candidate promises; nothing of what was tried."""
        speed = _speed(world, trials)
        fit = _fit(world, trials)
        seconds = self._seconds(world, trials, speed)
        decides = speed
        if world.stand_in is not None:
            decides = _on_target(world, trials)
        nothing = np.zeros(len(world.configs))
        speeds = np.exp(decides.mean)
        known = _Weighed(world, nothing, nothing, nothing, seconds, speeds, fit, nothing > -1)
        asked = self._asked(known, trials)
        expected = expected_of(self._objective, forecasts=world.forecasts, speed=decides)
        best = self._reached(known, trials, asked)
        gains, chances = expected_improvement(expected, best)
        # Without a prediction there is nothing to be bold about.
        share = 1.0
        if world.forecasts.physics is not None:
            share = BOLDNESS
        goodness = expected_improvement(expected.surer(share), best)[0] * fit
        if len(best):
            gains = gains * fit
            goodness = goodness / seconds
        else:
            gains = np.full(len(gains), np.inf)
        # Equals are told apart by seed and trial, so that a study that resumes is where it was.
        draws = np.random.default_rng([self._seed, len(trials.tried)]).random(len(goodness))
        goodness = goodness * (1.0 + 1e-6 * draws)
        is_tried = _is_tried(world, trials)
        goodness[is_tried] = -np.inf
        gains[is_tried] = -np.inf
        return replace(known, goodness=goodness, gains=gains, chances=chances * fit, asked=asked)

    def _asked(self, known: _Weighed, trials: Trials) -> Flags:
        """Return which rows the recommendation is chosen from: of speed alone those of the capacity
        class nearest to the standard recipe's in which anything fits or may fit, as in the ranking.

        Where another GPU stands in for the target, no measurement says which class of numerics is
        the faster: there it is that of 16-bit compute, unless 8 bits are sure to gain.
        """
        world = known.world
        everything = np.ones(len(world.configs), dtype=bool)
        if self._model is None:
            return everything
        capacities = world.capacities(self._model)
        fitted = self._fitted(world, trials)
        is_tried = _is_tried(world, trials)
        left = set(capacities[: len(world.candidates)])
        while left:
            nearest = nearest_capacity(left, self._model)
            assert nearest is not None, "there are classes"
            own = _equal(capacities, nearest)
            if own[fitted].any() or self._most_promising(known, own & ~is_tried) is not None:
                if world.stand_in is not None:
                    own &= self._of_numerics(known, own)
                return own
            left.remove(nearest)
        return everything

    def _of_numerics(self, known: _Weighed, own: Flags) -> Flags:
        """Return which rows are of the class of numerics that is chosen on the target."""
        world = known.world
        stand_in = world.stand_in
        assert stand_in is not None, "another GPU stands in for the target"
        likely = own & world.is_candidate & (known.fit >= OPEN_CHANCE)
        fastest: dict[str, int] = {}
        for numerics in np.unique(world.numerics[likely]):
            of_class = likely & (world.numerics == numerics)
            fastest[str(numerics)] = int(np.argmax(np.where(of_class, known.speeds, -np.inf)))
        plain = fastest.get("16-bit")
        for numerics, row in sorted(fastest.items(), key=lambda pair: -known.speeds[pair[1]]):
            if plain is None or row == plain:
                return np.asarray(world.numerics == numerics)
            gain = np.log(known.speeds[row] / known.speeds[plain])
            if gain > NINE_IN_TEN * stand_in.ratio_spread(row, plain):
                return np.asarray(world.numerics == numerics)
        return own

    def _fitted(self, world: _World, trials: Trials) -> list[int]:
        """Return the rows of the trials that count among the best: those that ran to their end,
        that the space holds, and that did not run out of memory later, measured longer."""
        lost = set()
        for record in trials.records:
            if record.purpose != "search":
                lost.add(identity(record.config))
        rows = []
        for record in trials.learned:
            row = world.row(record.config)
            is_inside = row < len(world.candidates) or not self._candidates.is_whole
            is_lost = identity(record.config) in lost
            if is_inside and not is_lost and isinstance(record.outcome, Measured):
                rows.append(row)
        return rows

    def _reached(self, known: _Weighed, trials: Trials, asked: Flags) -> Array:
        """Return what the trials that count among the best reached, (trials,): of speed the one
        that decides."""
        world = known.world
        is_predicted = world.stand_in is not None and self._objective == "tokens_per_second"
        of_row = {world.row(record.config): record for record in trials.learned}
        reached: list[float] = []
        for row in self._fitted(world, trials):
            if asked[row] and is_predicted:
                reached.append(float(known.speeds[row]))
            elif asked[row]:
                reached.append(self._turned_value(of_row[row]))
        return np.array(reached)

    def _seconds(self, world: _World, trials: Trials, speed: Mixture) -> Array:
        """Return the device seconds that each candidate's trial is expected to take."""
        steps = self._steps.fewest + STEPS_MORE
        training = np.exp(world.log_tokens) / np.exp(speed.mean) * steps
        seconds = ATTACH_SECONDS + np.minimum(training, 2 * self._steps.seconds_max)
        compiled = {_shape(record.config) for record in trials.records if record.config.compile}
        for row, shape in world.shapes.items():
            if shape not in compiled:
                seconds[row] += COMPILE_SECONDS
        if trials.records:
            there = world.bases[world.row(trials.records[-1].config)]
            seconds += REBUILD_SECONDS * (world.bases != there)
        return seconds


def _speed(world: _World, trials: Trials) -> Mixture:
    """Return the log speeds, a running trial taken to end just as predicted: it will say something
    of its like."""
    rows: list[int] = []
    log_speeds: list[float] = []
    noises: list[float] = []
    for record in trials.learned:
        if record.measurement is not None:
            rows.append(world.row(record.config))
            log_speeds.append(np.log(record.measurement.tokens_per_second))
            noises.append(_noise(record))
    speed = world.speed.posterior(_observed(rows, log_speeds, noises))
    if not trials.running:
        return speed
    for config in trials.running:
        row = world.row(config)
        rows.append(row)
        log_speeds.append(speed.mean[row])
        noises.append(NOISE_UNKNOWN)
    return world.speed.posterior(_observed(rows, log_speeds, noises))


def _observed(
    rows: Sequence[int], log_speeds: Sequence[float], noises: Sequence[float]
) -> Observed:
    return Observed(np.array(rows, np.intp), np.array(log_speeds, float), np.array(noises, float))


def _is_tried(world: _World, trials: Trials) -> Flags:
    """Return which rows were tried. (configurations,)"""
    return np.array([key in trials.tried for key in world.rows], bool)


def _equal(capacities: Sequence[CapacityClass], wanted: CapacityClass) -> Flags:
    """Return which rows are of a capacity class. (configurations,)"""
    return np.array([capacity == wanted for capacity in capacities], bool)


def _leanest(world: _World, trials: Trials) -> Candidate | None:
    """Return the candidate to try where all that is left is refused: what needs the least memory
    gets its verdict without the device."""
    left = [candidate for candidate in world.candidates if candidate.key not in trials.tried]
    needs = np.zeros(len(world.rows))
    if world.forecasts.peak_bytes is not None:
        needs = np.nan_to_num(world.forecasts.peak_bytes, nan=1e30)
    return min(left or world.candidates, key=lambda one: needs[world.rows[one.key]], default=None)


def _fit(world: _World, trials: Trials) -> Array:
    """Return the probability that each configuration fits."""
    if world.peaks is None:
        return np.ones(len(world.configs))
    budget = world.forecasts.budget_bytes
    seen: list[tuple[int, float, bool]] = []
    for record in trials.records[-REMEMBERED_MAX:]:
        match record.outcome:
            case Measured(measurement=measured) | PrunedSlow(measurement=measured):
                peak = np.log(float(measured.peak_allocated_bytes))
                seen.append((world.row(record.config), peak, False))
            case OutOfMemory(stage=stage, flags=flags) if (
                stage != "load" and NEIGHBOUR not in flags
            ):
                slack = 0.0
                if world.forecasts.is_cut_up and record.config.expandable_segments:
                    slack = CAPPED_EXPANDABLE
                elif world.forecasts.is_cut_up:
                    slack = FRAGMENTATION
                seen.append((world.row(record.config), np.log(budget * (1.0 - slack)), True))
    return chance_to_fit(world.peaks, seen, log_budget=float(np.log(budget)))


def _on_target(world: _World, trials: Trials) -> Mixture:
    """Return the log speeds on the target where another GPU stands in for it: as predicted there,
    corrected by what was measured, and as unsure as a trial here can show."""
    stand_in = world.stand_in
    assert stand_in is not None, "another GPU stands in for the target"
    known: dict[int, Took] = {}
    for record in trials.learned:
        if record.measurement is not None:
            known[world.row(record.config)] = Took.of(record.measurement)
    deviations = np.maximum(stand_in.expected_shift(NOISE), LEAST)
    deviations[list(known)] = LEAST
    means = world.log_tokens - stand_in.corrected(known)
    return Mixture(np.ones(1), means[None, :], deviations[None, :])


def columns(configs: Sequence[TrialConfig]) -> list[Column]:
    """Return the properties by which configurations are compared."""
    found = []
    for key, setting in SETTINGS.items():
        if key in _NUMBERS:
            scale, number = _NUMBERS[key]
            found.append(Column.of_numbers(np.array(list(map(number, configs))), scale=scale))
        elif setting.memory != "untouched" or setting.shapes_base:
            kinds = list(map(attrgetter(key), configs))
            found.append(Column.of_kinds(kinds, common=_OTHER_KIND))
    return found


def _noise(record: TrialRecord) -> float:
    """Return how far a trial's speed may be off, relative: one standard deviation."""
    measured = record.measurement
    if measured is None or (measured.speed_interval is None and not measured.flags):
        return NOISE_UNKNOWN
    if measured.speed_interval is None or NEIGHBOUR in measured.flags:
        return NOISE_UNEVEN
    low, high = measured.speed_interval
    return float(np.hypot(NOISE, np.log(high / low) / 4))


@lru_cache(maxsize=2**15)
def _shape(config: TrialConfig) -> Any:
    """Return what a layer is compiled for."""
    return tuple(value for key, value in config if key not in _NOT_COMPILED_IN)
