"""Owns a study as a person follows it: what ran, what runs since when, and what is still to come.

Fed by the tuner's events, or by what storage says of another process's study. Knows nothing of
terminals.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from itertools import islice

from reports import uncertainty, units
from search_spaces.config import TrialConfig
from search_spaces.knobs import BATCH_KEYS, CAPACITY_KEYS, KNOBS, SIZE_KEYS
from search_spaces.space import SearchSpace
from storage.confirmations import Confirmations, Ratio
from storage.definition import StudyDefinition
from storage.gain import compare
from storage.ledger import Ledger
from storage.ranking import Ranking, rank
from storage.records import Phase, TrialRecord
from sweep.planning.evidence import target_speeds
from sweep.running.wire import Progress
from sweep.study.confirmation import Plan
from sweep.study.events import (
    ConfirmationStarted,
    Event,
    GainForeseen,
    LaneLost,
    LanesOpened,
    SpaceTraced,
    StudyFinished,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)

_PACE_OF = 10
"""Newest trials whose mean time is the pace."""
_BUILDING: tuple[Phase, ...] = ("start", "build")


@dataclass(frozen=True)
class Remaining:
    """What is known of the time that is left."""

    search_seconds: float | None
    """Of the search, at the pace of its newest trials or of its time budget; None where a trial
    runs for longer than any of those did, or none ended yet."""
    may_end_sooner: bool
    """Whether that is the most it can be: the search ends where nothing more is to be gained."""
    confirm_seconds: float | None
    """Of what follows the search, or of what is left of that; None where nothing does, or where
    it takes longer than was expected."""


def search_words(config: TrialConfig, *, space: SearchSpace) -> str:
    """Return what a search chose of a configuration: ``10 x 512, rank 8 on q,v, no checkpointing``.

    What is not searched is the same in every trial, and said by `fixed_words` once.
    """
    baseline = space.baseline_config()
    if config == baseline:
        return f"the baseline, {units.size(config)}, {uncertainty.capacity(config)}"
    is_class_free = any(key in space.dimensions for key in CAPACITY_KEYS)
    said = {*SIZE_KEYS, *(CAPACITY_KEYS if is_class_free else ())}
    changed = units.differing(config, baseline)
    return ", ".join(
        [
            units.size(config),
            *([uncertainty.capacity(config)] if is_class_free else []),
            *(
                units.phrase(key, changed[key])
                for key in KNOBS
                if key in changed and key in space.dimensions and key not in said
            ),
        ]
    )


def fixed_words(space: SearchSpace) -> str:
    """Return what all that is tried changes over the baseline; empty where that is nothing."""
    first = {key: dimension.first for key, dimension in space.dimensions.items()}
    batches = dict(zip(BATCH_KEYS, space.batches[0], strict=True))
    params = {**first, **{key: batches[key] for key in batches if key in first}}
    changed = space.config(params).changes_from(space.baseline_config())
    return ", ".join(
        units.phrase(key, value)
        for key, value in changed.items()
        if key not in space.dimensions and key not in SIZE_KEYS
    )


@dataclass
class Running:
    """A trial that runs."""

    started: TrialStarted
    began_seconds: float
    """By the board's clock."""
    since_seconds: float
    """When what it does now began."""
    progress: Progress | None = None


@dataclass
class Board:
    """A study as it stands, kept up to date by `take`.

    It is looked at every second, and ranked when it is first looked at after a trial.
    """

    name: str
    definition: StudyDefinition
    records: list[TrialRecord]
    """Finished trials of the search, those of earlier runs included."""
    clock: Callable[[], float]
    running: dict[int, Running] = field(default_factory=dict)
    """What runs, by number: several trials where there are several GPUs."""
    lanes: int = 1
    """Trials that may run at a time."""
    tracing: SpaceTraced | None = None
    """How far tracing the space is, while it is traced."""
    foreseen: GainForeseen | None = None
    """What the sampler expects of the next trial; None from one that cannot tell."""
    is_stopping: bool = False
    is_driven_here: bool = True
    """Whether the tuner's own events are heard; of another process's study storage knows less."""
    confirmations: list[TrialRecord] = field(default_factory=list)
    """Finished runs that measure winners again."""
    confirming: ConfirmationStarted | None = None
    """What is measured again, once the search has ended."""
    earlier_seconds: float = 0.0
    """Of the study before it was followed, where all of it counts."""
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Held while it changes or is shown: what is shown every second is so in another thread."""
    _started_seconds: float = field(init=False)
    _doing_seconds: float = field(init=False)
    """When what is being done now began."""
    _building_seconds: float = field(default=0.0, init=False)
    """What the first trial took until it trained."""
    _finished_here: int = field(default=0, init=False)
    _ledger: Ledger = field(init=False)
    _since: int = field(init=False)
    _ranked: Ranking | None = field(default=None, init=False)
    """None until somebody looks: between two trials nobody waits for it."""
    _counted: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._ledger = Ledger(self.records)
        self._since = self._ledger.next_number
        self._started_seconds = self._doing_seconds = self.clock()

    def take(self, event: Event) -> None:
        """Take in one event."""
        before = self.doing
        match event:
            case SpaceTraced():
                self.tracing = event if event.done < event.of else None
            case GainForeseen():
                self.foreseen = event
            case TrialStarted():
                self.running[event.number] = Running(event, self.clock(), self.clock())
            case TrialProgress():
                self._go_on(event)
            case TrialFinished(record=record):
                self._finish(record)
            case ConfirmationStarted():
                self.confirming = event
                # It begins where nothing runs; what a lost GPU left in the middle does not either.
                self.running.clear()
                self._counted = None
            case LanesOpened(names=names):
                self.lanes = len(names)
            case LaneLost(left=left):
                self.lanes = left
            case StudyFinished():
                self.running.clear()
        if self.doing != before:
            self._doing_seconds = self.clock()

    def _go_on(self, event: TrialProgress) -> None:
        running = self.running.get(event.number)
        if running is None:
            return
        self._note_building(event.progress)
        if running.progress is None or running.progress.phase != event.progress.phase:
            running.since_seconds = self.clock()
        running.progress = event.progress

    def began_before(self, number: int, seconds: float) -> None:
        """Note that a trial began so long ago, before anybody looked."""
        began = self.clock() - max(0.0, seconds)
        self.running[number].began_seconds = self.running[number].since_seconds = began

    def stop(self) -> None:
        """Note that somebody asked to stop, and when."""
        self.is_stopping, self._doing_seconds = True, self.clock()

    def keep_running(self, numbers: Container[int]) -> None:
        """Forget what does not run any more, and never came to an end."""
        self.running = {n: running for n, running in self.running.items() if n in numbers}

    @property
    def current(self) -> TrialStarted | None:
        """The trial that runs; of several the one that began first."""
        return next((running.started for running in self.running.values()), None)

    @property
    def progress(self) -> Progress | None:
        """How far that one is."""
        return next((running.progress for running in self.running.values()), None)

    def _finish(self, record: TrialRecord) -> None:
        is_searched = record.purpose == "search"
        (self.records if is_searched else self.confirmations).append(record)
        self._ledger.add(record)
        self._ranked = self._counted = None
        self._finished_here += is_searched
        self.running.pop(record.number, None)

    @property
    def _ranking(self) -> Ranking:
        if self._ranked is None:
            known, speeds = self.records, target_speeds(self.definition, self.records)
            self._ranked = rank(known, self.definition, self.confirmations, target_speeds=speeds)
        return self._ranked

    @property
    def _owed(self) -> int:
        """Runs that a confirmation still takes, whatever its budget is."""
        if self._counted is None:
            budget = self.definition.space.confirm
            series = 0 if self.confirming is None else self.confirming.series
            self._counted = 0 if budget is None else Plan(self._ranking, budget, series).owed()
        return self._counted

    def _note_building(self, progress: Progress) -> None:
        is_first = self.is_first and not self._building_seconds
        if is_first and progress.phase not in _BUILDING:
            self._building_seconds = self.doing_seconds

    @property
    def doing(self) -> str:
        """What is being done now, without how far it is: how long that takes is `doing_seconds`."""
        if self.is_stopping:
            return "stopping"
        if self.tracing is not None:
            return "tracing"
        return "running" if self.running else "choosing"

    @property
    def doing_seconds(self) -> float:
        """Seconds since what is being done now began: by the trial that began first, if any."""
        first = next(iter(self.running.values()), None)
        since = first.since_seconds if first and self.doing == "running" else self._doing_seconds
        return self.clock() - since

    @property
    def best(self) -> TrialRecord | None:
        """The best trial of the space that fits so far, by the study's objectives."""
        return self._ranking.winner

    @property
    def gain(self) -> Ratio | None:
        """The best's speed over the baseline's in its class, where it can be stated."""
        comparison = compare(self._ranking)
        return None if comparison is None else comparison.gain

    @property
    def reference(self) -> str:
        """What that is over."""
        best = self._ranking.winner
        return "" if best is None else uncertainty.reference_of(self._ranking, best.config)

    @property
    def is_first(self) -> bool:
        """Whether no trial has finished since it was followed."""
        return self._finished_here == 0

    @property
    def starts_a_worker(self) -> bool:
        """Whether a trial that starts now is what a worker is started for."""
        is_recorded = self.definition.target.recorded is not None
        return self.is_driven_here and not is_recorded and self.confirming is None

    @property
    def may_end_sooner(self) -> bool:
        """Whether the search ends where nothing more is to be gained."""
        space = self.definition.space
        return space.sampler == "guided" and space.stop_below_gain > 0

    @property
    def trials_done(self) -> int:
        """Trials that count towards the study's total."""
        return self._ledger.trials_spent(since=self._since)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds that it was followed, and of the study before where that counts."""
        return self.earlier_seconds + self.clock() - self._started_seconds

    @property
    def remaining(self) -> Remaining:
        """What is known of the time that is left."""
        searching = None if self.confirming is not None else self._search_seconds()
        return Remaining(searching, self.may_end_sooner, self._confirm_seconds())

    def _search_seconds(self) -> float | None:
        limit = self.definition.space.time_budget_seconds if self.is_driven_here else None
        left = None if limit is None else max(0.0, limit - self.elapsed_seconds)
        own = (r.wall_seconds for r in reversed(self.records) if r.carried is None)
        newest = list(islice(own, _PACE_OF))
        if not newest:
            return left or None
        rests = [_rest_seconds(newest, ran) for ran in self._running_seconds()]
        to_begin = max(0, self.definition.space.trials - self.trials_done - len(rests))
        at_pace = (sum(rests) + to_begin * statistics.fmean(newest)) / self.lanes
        # What runs when the time budget is spent is waited for.
        seconds = max(at_pace if left is None else min(left, at_pace), *rests, 0.0)
        return seconds if math.isfinite(seconds) else None

    def _running_seconds(self) -> list[float]:
        """Return for how long each trial has run."""
        return [self.clock() - trial.began_seconds for trial in tuple(self.running.values())]

    def _confirm_seconds(self) -> float | None:
        """Return what the budget leaves, or what is run whatever it takes where that is more, with
        the start of the fresh worker as far as known; None where that is overrun.
        """
        budget = self.definition.space.confirm
        if budget is None:
            return None
        series = 0 if self.confirming is None else self.confirming.series
        known = Confirmations(tuple(r for r in self.confirmations if r.series == series))
        repeats = max(
            budget.seconds - known.repeat_seconds(series=series),
            self._owed * _run_seconds(known.records or self.records),
        )
        is_soaked = any(r.purpose == "soak" for r in known.records)
        starting = 0.0 if known.records else self._building_seconds
        ran = 0.0 if self.confirming is None else max(self._running_seconds(), default=0.0)
        left = repeats + starting + (0.0 if is_soaked else budget.soak_seconds) - ran
        return left if left > 0 else None

    def describe(self, config: TrialConfig) -> str:
        """Return what was searched of a configuration."""
        return search_words(config, space=self.definition.space)


def _run_seconds(records: Iterable[TrialRecord]) -> float:
    """Return what a run took on average, the start of its worker apart; 0 where none did."""
    measured = [r.measurement for r in records if r.measurement and r.purpose != "soak"]
    taken = [m.setup_seconds + m.measured_seconds for m in measured]
    return sum(taken) / len(taken) if taken else 0.0


def _rest_seconds(known: Iterable[float], ran: float) -> float:
    """Return what is left of a trial, by those that took longer; infinite where none did."""
    longer = [seconds for seconds in known if seconds > ran]
    return statistics.fmean(longer) - ran if longer else math.inf
