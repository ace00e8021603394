"""Owns the guided sampler: the next trial is the one of which most is to be gained per second.

It looks at every candidate each time. What it knows comes from the study's trials alone, so that a
study that goes on is where it was; a running trial is believed to end as forecast. Knows nothing
of how anything is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from storage.confirmations import scaled
from storage.objectives import measured_of, merits_of, objective_value
from storage.records import NEIGHBOUR, Measured, OutOfMemory, PrunedSlow, TrialRecord
from sweep.sampling.belief import (
    Array,
    Codes,
    Column,
    Mixture,
    Observed,
    Peaks,
    Seen,
    SpeedBelief,
    chance_to_fit,
)
from sweep.sampling.candidates import Candidate, Candidates
from sweep.sampling.encoding import Params, identity
from sweep.sampling.expecting import Expecting, Foreseen
from sweep.sampling.gains import Goal, expected_gains
from sweep.sampling.telling import telling

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
LOOKED_UP_MAX = 200
"""Candidates that are held against the pre-flight for one choice before it gives up."""
REFINED = 4
"""Best candidates around which a space that is not listed is looked at more closely."""
BOLDNESS = 0.25
"""Share of its uncertainty by which a forecast may look better when a trial is chosen.

Its whole uncertainty sends a search to what is little known, which costs trials: with a quarter it
came within 2 % of the best in 1.25 trials instead of 1.7 (mean of 32 surfaces cut out of two), and
the best forecast alone needed 1.8. What ends a search is the whole uncertainty.
"""
WORTH_BOLDNESS = 0.01
"""Expected gain, its uncertainty taken whole, below which the boldest choice is none: the next is
then the one that most is to be gained of, however little is known of it."""
LEARNED_MAX = 200
"""Trials with a speed that one choice is worked out from: five times what a study has. Of a space
of 20,000 configurations each hundred takes a quarter of a second."""
REMEMBERED_MAX = 512
"""Newest trials from which memory is known."""
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
"""Knobs that are compared as numbers, by how far apart two values have much in common: doublings,
but of the fraction."""
_OTHER_KIND = 0.5
"""What two different words of one knob have in common."""


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
class _Trials:
    """What a study's trials say, the one that is asked for apart."""

    records: tuple[TrialRecord, ...]
    running: tuple[TrialConfig, ...]
    tried: frozenset[str]
    compiled: frozenset[Any]
    """Shapes that were compiled."""
    objectives: tuple[Objective, ...]

    @cached_property
    def learned(self) -> tuple[TrialRecord, ...]:
        """The trials with a speed that what is believed is worked out from."""
        measured = [record for record in self.records if record.measurement is not None]
        return tuple(telling(measured, merits=self._merits, most=LEARNED_MAX))

    @cached_property
    def remembered(self) -> tuple[TrialRecord, ...]:
        """The newest trials, from which memory is known: it repeats to the byte."""
        return self.records[-REMEMBERED_MAX:]

    def _merits(self, record: TrialRecord) -> tuple[float, ...]:
        return merits_of(record, self.objectives) if isinstance(record.outcome, Measured) else ()

    @cached_property
    def measured(self) -> tuple[tuple[TrialRecord, float], ...]:
        """The trials with a speed, and how far each speed may be off."""
        return tuple((r, _noise(r)) for r in self.learned)

    @property
    def configs(self) -> tuple[TrialConfig, ...]:
        """Every configuration that something is made of."""
        known = (*self.learned, *self.remembered)
        return (*(record.config for record in known), *self.running)


@dataclass(frozen=True)
class _Told:
    """What one trial says."""

    record: TrialRecord | None
    """None while it runs, and where it ended without one."""
    config: TrialConfig
    key: str
    """Equal for configurations that train the same way."""
    shape: Any
    """What its layers are compiled for; None where they are not."""


@dataclass(frozen=True)
class _World:
    """The candidates and everything tried, with what is foreseen of each, a row each."""

    candidates: tuple[Candidate, ...]
    configs: tuple[TrialConfig, ...]
    rows: Mapping[str, int]
    foreseen: Foreseen
    speed: SpeedBelief
    peaks: Peaks | None
    tokens_per_step: Array
    bases: Codes
    """Equal for configurations that share a frozen base."""
    shapes: Mapping[int, Any]
    """What each compiled configuration's layers are compiled for, by row."""


class GuidedSampler(BaseSampler):
    """Asks for the most expected gain per second of device time.

    Args:
        candidates: what may be asked for.
        preflight: refuses what is hopeless, and predicts.
        objectives: what is searched for.
        distributions: of the dimensions that are free.
        steps: how long a trial trains.
        seed: decides between candidates of which the same is expected.
    """

    def __init__(
        self,
        candidates: Candidates,
        *,
        preflight: Expecting,
        objectives: Sequence[Objective],
        distributions: Mapping[str, BaseDistribution],
        steps: StepBudget,
        seed: int,
    ) -> None:
        self._candidates = candidates
        self._preflight = preflight
        self._objectives = tuple(objectives)
        self._distributions = dict(distributions)
        self._steps = steps.warmup_min + steps.measured_min + STEPS_MORE
        self._steps_seconds_max = steps.seconds_max
        self._seed = seed
        self._independent = RandomSampler(seed=seed)
        self._known: dict[int, _Told | None] = {}
        """What the trials that ended say, by number."""
        self._world: _World | None = None
        self._best: tuple[Params, ...] = ()

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the whole space, also before there is any trial to infer it from."""
        return self._distributions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the candidate of which most is to be gained."""
        chosen = self._choose(self._read(study, besides=trial.number))
        return {} if chosen is None else {name: chosen.params[name] for name in search_space}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Draw one parameter that the space does not know, or that a queued trial left open."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def prepare(self) -> None:
        """Do once, before anything is asked, what every choice takes first."""
        if self._candidates.is_listed:
            nothing = _Trials((), (), frozenset(), frozenset(), self._objectives)
            self._weigh(self._seen(nothing), nothing)

    def outlook(self, study: optuna.Study, *, besides: int | None = None) -> Outlook:
        """Return what is still to be gained, by what the study's trials say, one of them apart."""
        trials = self._read(study, besides=besides)
        world = self._seen(trials)
        weighed = self._weigh(world, trials)
        left = [row for row in range(len(world.candidates)) if weighed.merits[row] > -np.inf]
        row = self._first_acceptable(world, weighed.doubted)
        if row is None:
            return Outlook(gain=0.0)
        return Outlook(
            gain=float(weighed.gains[row]),
            config=world.candidates[row].config,
            chance=float(weighed.chances[row]),
            open=int((weighed.chances[left] >= OPEN_CHANCE).sum()),
            looked_at=len(left),
        )

    def fastest_of(
        self, study: optuna.Study, is_wanted: Callable[[TrialConfig], bool]
    ) -> TrialConfig | None:
        """Return what is expected to be the fastest that fits of some configurations, none of them
        tried before; None where none is left that the pre-flight does not refuse."""
        trials = self._read(study, besides=None)
        world = self._seen(trials)
        left = [c.key not in trials.tried and is_wanted(c.config) for c in world.candidates]
        rows = slice(0, len(world.candidates))
        speed, fit = self._speed(world, trials), self._fit(world, trials)
        speeds = np.exp(speed.mean + _class_offsets(world, speed, fit))
        promised = np.where(left, speeds[rows] * fit[rows], -np.inf)
        row = self._first_acceptable(world, promised)
        return None if row is None else world.candidates[row].config

    def _read(self, study: optuna.Study, *, besides: int | None) -> _Trials:
        records, running, tried, compiled = [], [], set(), set()
        for trial in study.get_trials(deepcopy=False):
            told = None if trial.number == besides else self._told_by(trial)
            if told is None:
                continue
            tried.add(told.key)
            if told.record is not None:
                records.append(told.record)
                compiled.add(told.shape)
            elif trial.state is TrialState.RUNNING:
                running.append(told.config)
        known = tuple(records), tuple(running), frozenset(tried), frozenset(compiled)
        return _Trials(*known, self._objectives)

    def _told_by(self, trial: FrozenTrial) -> _Told | None:
        """Return what a trial says, worked out once where it has ended; None for nothing."""
        if not trial.state.is_finished():
            return self._told(trial, None)
        if trial.number not in self._known:
            self._known[trial.number] = self._told(trial, mapping.record_of(trial))
        return self._known[trial.number]

    def _told(self, trial: FrozenTrial, record: TrialRecord | None) -> _Told | None:
        if record is not None and not _tells_the_search(record):
            return None
        config = self._config(trial) if record is None else record.config
        return None if config is None else _Told(record, config, identity(config), _shape(config))

    def _config(self, trial: FrozenTrial) -> TrialConfig | None:
        config = mapping.config_of(trial)
        if config is None and self._distributions.keys() <= trial.params.keys():
            return self._candidates.config(trial.params)
        return config

    def _choose(self, trials: _Trials) -> Candidate | None:
        world = self._seen(trials)
        weighed = self._weigh(world, trials)
        row = self._best_acceptable(world, weighed)
        if row is None:
            # All that is left is refused, or was tried: it gets its verdict without the device.
            left = [c for c in world.candidates if c.key not in trials.tried]
            return min(left or world.candidates, key=self._need(world), default=None)
        order = np.argsort(-weighed.merits[: len(world.candidates)])[:REFINED]
        self._best = tuple(world.candidates[at].params for at in order)
        return world.candidates[row]

    def _need(self, world: _World) -> Any:
        """Return a key by which what needs the least memory comes first."""
        peaks = world.foreseen.peak_bytes
        return lambda c: 0.0 if peaks is None else np.nan_to_num(peaks[world.rows[c.key]], nan=1e30)

    def _best_acceptable(self, world: _World, weighed: _Weighed) -> int | None:
        """Return the best candidate that the pre-flight does not refuse; None where there is none.

        What looks best is held against the pre-flight one by one, as few are ever needed.
        """
        row = self._first_acceptable(world, weighed.merits)
        if row is None or weighed.gains[row] >= WORTH_BOLDNESS:
            return row
        # What looks best is as good as found: what may be better by surprise has its turn.
        return self._first_acceptable(world, weighed.doubted / weighed.seconds)

    def _first_acceptable(self, world: _World, merits: Array) -> int | None:
        merits = merits[: len(world.candidates)]
        for row in np.argsort(-merits)[:LOOKED_UP_MAX]:
            if merits[row] == -np.inf:
                return None
            if not self._is_refused(world, int(row)):
                return int(row)
        rest = np.flatnonzero(merits > -np.inf)
        return next((int(r) for r in rest if not self._is_refused(world, int(r))), None)

    def _is_refused(self, world: _World, row: int) -> bool:
        return self._preflight.expect(world.candidates[row].config).is_refused

    # What is foreseen

    def _seen(self, trials: _Trials) -> _World:
        """Return the candidates with what was tried; made anew only where either has changed."""
        world = self._world
        keys = {identity(config): config for config in trials.configs}
        if world is None or not self._candidates.is_listed or not keys.keys() <= world.rows.keys():
            world = self._made(self._candidates.near(self._best), keys)
            self._world = world
        return world

    def _made(self, candidates: tuple[Candidate, ...], tried: Mapping[str, TrialConfig]) -> _World:
        known = {candidate.key: candidate.config for candidate in candidates}
        known |= {key: config for key, config in tried.items() if key not in known}
        configs = tuple(known.values())
        foreseen = self._preflight.foresee(configs)
        log_tokens = np.log(
            [float(config.tokens_per_step) for config in configs]
            if foreseen.tokens_per_step is None
            else foreseen.tokens_per_step
        )
        return _World(
            candidates,
            configs,
            {key: row for row, key in enumerate(known)},
            foreseen,
            SpeedBelief(columns(configs), log_tokens=log_tokens, physics=foreseen.physics),
            _peaks(configs, foreseen),
            np.exp(log_tokens),
            Column.of_kinds(list(map(_base, configs)), common=0.0).codes,
            {row: _shape(config) for row, config in enumerate(configs) if config.compile},
        )

    # What is to be gained

    def _weigh(self, world: _World, trials: _Trials) -> _Weighed:
        """Return what each candidate promises; nothing of what was tried."""
        speed = self._speed(world, trials)
        fit = self._fit(world, trials)
        offsets = _class_offsets(world, speed, fit)
        compared = replace(speed, means=speed.means + offsets)
        goal = Goal.of(
            self._objectives, foreseen=world.foreseen, speed=compared, rows=len(world.configs)
        )
        able = [r for r, _ in trials.measured if self._may_win(world, r)]
        best = [self._values(r, offsets[world.rows[identity(r.config)]]) for r in able]
        gains, chances = expected_gains(goal, best)
        # Without a forecast there is nothing to be bold about.
        share = 1.0 if world.foreseen.physics is None else BOLDNESS
        merits = expected_gains(replace(goal, first=goal.first.surer(share)), best)[0] * fit
        promised = gains * fit if best else np.full(len(gains), np.inf)
        seconds = self._seconds(world, trials, speed)
        if best:
            merits = merits / seconds
        # Equals are told apart by seed and trial, so that a study that goes on is where it was.
        draws = np.random.default_rng([self._seed, len(trials.tried)]).random(len(merits))
        merits = merits * (1.0 + 1e-6 * draws)
        tried = [row for key, row in world.rows.items() if key in trials.tried]
        merits[tried] = -np.inf
        doubted = promised.copy()
        doubted[tried] = -np.inf
        return _Weighed(merits, doubted, promised, chances * fit, seconds)

    def _may_win(self, world: _World, record: TrialRecord) -> bool:
        """Whether a trial counts among the best: it ran to its end, and the space holds it."""
        is_inside = world.rows[identity(record.config)] < len(world.candidates)
        return isinstance(record.outcome, Measured) and (
            is_inside or not self._candidates.is_listed
        )

    def _values(self, record: TrialRecord, offset: float) -> list[float]:
        measured = scaled(measured_of(record), float(np.exp(offset)))
        return [objective_value(objective, measured) for objective in self._objectives]

    def _speed(self, world: _World, trials: _Trials) -> Mixture:
        rows = [world.rows[identity(record.config)] for record, _ in trials.measured]
        speeds = [m.tokens_per_second for r, _ in trials.measured if (m := r.measurement)]
        observed = Observed(
            np.array(rows, dtype=np.intp),
            np.log(np.array(speeds)),
            np.array([noise for _, noise in trials.measured]),
        )
        speed = world.speed.given(observed)
        if not trials.running:
            return speed
        # A running trial will say something of its like: as if it ended just as forecast.
        running = np.array([world.rows[identity(c)] for c in trials.running], dtype=np.intp)
        return world.speed.given(
            Observed(
                np.append(observed.rows, running),
                np.append(observed.log_speed, speed.mean[running]),
                np.append(observed.noise, np.full(len(running), NOISE_UNKNOWN)),
            )
        )

    def _fit(self, world: _World, trials: _Trials) -> Array:
        budget = world.foreseen.budget_bytes
        if world.peaks is None or budget is None:
            return np.ones(len(world.configs))
        seen = [s for r in trials.remembered if (s := _seen_memory(r, world, budget))]
        rows, numbers, bounds = zip(*seen, strict=True) if seen else ((), (), ())
        known = Seen(
            np.array(rows, dtype=np.intp), np.log(np.array(numbers)), np.array(bounds, dtype=bool)
        )
        return chance_to_fit(world.peaks, known, log_budget=float(np.log(budget)))

    def _seconds(self, world: _World, trials: _Trials, speed: Mixture) -> Array:
        """Return the device seconds that each candidate's trial is expected to take."""
        steps = world.tokens_per_step / np.exp(speed.mean) * self._steps
        seconds = ATTACH_SECONDS + np.minimum(steps, 2 * self._steps_seconds_max)
        for row, shape in world.shapes.items():
            if shape not in trials.compiled:
                seconds[row] += COMPILE_SECONDS
        if trials.records:
            there = world.bases[world.rows[identity(trials.records[-1].config)]]
            seconds += REBUILD_SECONDS * (world.bases != there)
        return seconds


@dataclass(frozen=True)
class _Weighed:
    """What each row promises; the candidates come first."""

    merits: Array
    """By which one is chosen: expected gain per second; minus infinity for what was tried."""
    doubted: Array
    """By which one is chosen that merits leave aside: expected gain, the uncertainty taken whole;
    minus infinity for what was tried."""
    gains: Array
    """Expected, relative to the best so far."""
    chances: Array
    """Of fitting and being better."""
    seconds: Array
    """Of the device that a trial is expected to take."""


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
    """Return the properties by which configurations are compared: work, then knob by knob."""
    tokens = np.log2([float(config.tokens_per_micro_batch) for config in configs])
    found = [Column.of_numbers(tokens, scale=_NUMBERS["micro_batch_size"])]
    for key, knob in KNOBS.items():
        values = [_compared(key, config) for config in configs]
        if key in _NUMBERS and key != "micro_batch_size":
            found.append(Column.of_numbers(np.array(values), scale=_NUMBERS[key]))
        elif key not in _NUMBERS and (knob.memory != "untouched" or knob.shapes_base):
            found.append(Column.of_kinds(values, common=_OTHER_KIND))
    return found


def _compared(key: str, config: TrialConfig) -> Any:
    match key:
        case "effective_batch_size":
            return np.log2(config.accumulation_steps)
        case "checkpoint_fraction":
            return config.checkpoint_fraction
        case _ if key in _NUMBERS:
            return np.log2(getattr(config, key))
        case _:
            return getattr(config, key)


def _peaks(configs: Sequence[TrialConfig], foreseen: Foreseen) -> Peaks | None:
    if foreseen.peak_bytes is None or foreseen.uncertainty is None:
        return None
    # Compiled layers keep other tensors than eager ones, and recomputed ones are foretold worse:
    # each says nothing of the other.
    is_compiled = np.array([config.compile for config in configs], dtype=float)
    pairs = np.column_stack([is_compiled, foreseen.uncertainty])
    _, kinds = np.unique(pairs, axis=0, return_inverse=True)
    return Peaks(np.log(foreseen.peak_bytes), foreseen.uncertainty, kinds)


def _seen_memory(
    record: TrialRecord, world: _World, budget_bytes: int
) -> tuple[int, float, bool] | None:
    """Return a trial's row, its peak, and whether that is but a bound; None for neither."""
    row = world.rows[identity(record.config)]
    match record.outcome:
        case Measured(measurement=measured) | PrunedSlow(measurement=measured):
            return row, float(measured.peak_allocated_bytes), False
        case OutOfMemory(stage=stage, flags=flags) if stage != "load" and NEIGHBOUR not in flags:
            slack = FRAGMENTATION if world.foreseen.is_cut_up else 0.0
            return row, budget_bytes * (1.0 - slack), True
        case _:
            return None


def _tells_the_search(record: TrialRecord) -> bool:
    """Whether a run says something of the search: one that measured a winner again only that it
    ran out of memory, as its speed is that of another process and another hour.
    """
    return record.purpose == "search" or isinstance(record.outcome, OutOfMemory)


def _noise(record: TrialRecord) -> float:
    """Return how far a trial's speed may be off, relative: one standard deviation."""
    measured = record.measurement
    assert measured is not None, "a trial without a speed has no error"
    if measured.speed_interval is None:
        return NOISE_UNKNOWN
    if measured.is_noisy:
        return NOISE_UNEVEN
    low, high = measured.speed_interval
    return float(np.hypot(NOISE, np.log(high / low) / 4))


def _shape(config: TrialConfig) -> Any:
    """Return what a compiled layer is compiled for."""
    if not config.compile:
        return None
    ignored = {"effective_batch_size", "optimizer", "lora_alpha", "learning_rate"}
    return tuple(value for key, value in config if key not in ignored)


_BASE_KEYS = tuple(key for key, knob in KNOBS.items() if knob.shapes_base)


def _base(config: TrialConfig) -> Any:
    return tuple(getattr(config, key) for key in _BASE_KEYS)
