"""A study as it stands while it runs, fed by events: what ran, what runs, what is still to come."""

from __future__ import annotations

import itertools
import statistics
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from qlora_sweep.reports import format as units
from qlora_sweep.reports import words
from qlora_sweep.search_spaces.config import (
    BATCH_KEYS,
    CAPACITY_KEYS,
    SIZE_KEYS,
    TrialConfig,
    canonical,
)
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.definition import StudyDefinition
from qlora_sweep.storage.ledger import TrialLedger
from qlora_sweep.storage.ranking import Ranking, rank
from qlora_sweep.storage.records import TrialRecord, Verdict
from qlora_sweep.sweep.planning.evidence import target_speeds
from qlora_sweep.sweep.running.wire import Progress
from qlora_sweep.sweep.study import events
from qlora_sweep.sweep.study.confirmation_plan import ConfirmationPlan

_PACE_OF = 10
"""Newest trials whose mean time is the pace."""


def search_words(config: TrialConfig, *, space: SearchSpace) -> str:
    """Return what a search chose of a configuration: ``10 x 512, rank 8 on q,v, no checkpointing``.

    What is not searched is the same in every trial, and said by `fixed_words` once.
    """
    baseline = space.baseline_config()
    if config == baseline:
        return f"the baseline, {units.size(config)}, {words.capacity(config)}"
    said = set(SIZE_KEYS)
    phrases = [units.size(config)]
    if not space.dimensions.keys().isdisjoint(CAPACITY_KEYS):
        said.update(CAPACITY_KEYS)
        phrases.append(words.capacity(config))
    for key, value in units.differing(config, baseline).items():
        if key in space.dimensions and key not in said:
            phrases.append(units.phrase(key, value))
    return ", ".join(phrases)


def fixed_words(space: SearchSpace) -> str:
    """Return what all that is tried changes over the baseline; empty where that is nothing."""
    params = {key: dimension.first for key, dimension in space.dimensions.items()}
    for key, value in zip(BATCH_KEYS, space.batches[0], strict=True):
        if key in params:
            params[key] = value
    searched = space.dimensions.keys() | set(SIZE_KEYS)
    changed = space.config(params).changes_from(space.baseline_config())
    return ", ".join(units.phrase(key, changed[key]) for key in changed if key not in searched)


@dataclass
class ShownTrial:
    """A trial that runs; seconds are by the board's clock."""

    started: events.TrialStarted
    began_seconds: float
    since_seconds: float
    """When what it does now began."""
    progress: Progress | None = None


class Board:
    """A study as it stands. Whoever changes or draws it holds `lock`: that is done in two threads.

    Args:
        name: of the study.
        definition: what it is about.
        records: trials that ended before, those that measured winners again included.
        clock: seconds; only differences count.
    """

    def __init__(
        self,
        name: str,
        definition: StudyDefinition,
        records: Iterable[TrialRecord] = (),
        *,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.definition = definition
        self.clock = clock
        self.lock = threading.Lock()
        self.ledger = TrialLedger(records)
        self.running: dict[int, ShownTrial] = {}
        """What runs, by number."""
        self.tracing: events.SpaceTraced | None = None
        """How far tracing the space is, while it is traced."""
        self.predicted_gain: events.GainForeseen | None = None
        """What the sampler expects of the next trial; None from one that cannot tell."""
        self.confirming: events.ConfirmationStarted | None = None
        """What is measured again, once the search has ended."""
        self.is_stopping = False
        self.since_seconds = clock()
        """When what is done now, beside trials, began."""
        self._started_seconds = clock()
        self._first_number = self.ledger.next_number
        self._finished = 0
        self._lanes = 1
        self._ranked: tuple[Ranking, ConfirmationPlan | None] | None = None
        self._contenders: dict[int, TrialRecord] = {}
        """Trials of the search by which the ranking is made, by number."""
        self._measured: set[TrialConfig] = set()
        """Canonical configurations of those."""
        for record in self.ledger.all:
            self._consider(record)

    def take(self, event: events.Event) -> None:
        """Take in one event."""
        before = self._doing
        match event:
            case events.SpaceTraced():
                self.tracing = event
                if event.done >= event.of:
                    self.tracing = None
            case events.GainForeseen():
                self.predicted_gain = event
            case events.TrialStarted():
                self.running[event.number] = ShownTrial(event, self.clock(), self.clock())
            case events.TrialProgress() if (running := self.running.get(event.number)) is not None:
                if running.progress is None or running.progress.phase != event.progress.phase:
                    running.since_seconds = self.clock()
                running.progress = event.progress
            case events.TrialFinished(record=record):
                self.ledger.add(record)
                self.running.pop(record.number, None)
                self._finished += 1
                self._consider(record)
            case events.ConfirmationStarted():
                self.confirming = event
                self._ranked = None
                # What a lost GPU left in the middle does not run any more.
                self.running.clear()
            case events.LanesOpened(names=names):
                self._lanes = len(names)
            case events.LaneLost(left=left):
                self._lanes = left
            case events.StudyFinished():
                self.running.clear()
        if self._doing != before and not self.is_stopping:
            self.since_seconds = self.clock()

    @property
    def _doing(self) -> tuple[bool, bool]:
        return self.tracing is not None, bool(self.running)

    def stop(self) -> None:
        """Note that somebody asked to stop, and when."""
        self.is_stopping = True
        self.since_seconds = self.clock()

    @property
    def is_first(self) -> bool:
        """Whether no trial has finished yet since it was started or resumed."""
        return self._finished == 0

    @property
    def starts_a_worker(self) -> bool:
        """Whether a trial that starts now is the first of a worker."""
        is_recorded = self.definition.target.recorded is not None
        is_fresh = self.is_first or (self.confirming is not None and not self.ledger.confirmations)
        return is_fresh and not is_recorded

    @property
    def may_end_sooner(self) -> bool:
        """Whether the search ends where nothing more is to be gained."""
        space = self.definition.space
        return space.sampler == "guided" and space.stop_below_gain > 0

    @property
    def ranking(self) -> Ranking:
        """The study's trials, ranked by its objectives."""
        return self._known()[0]

    def is_best(self, record: TrialRecord) -> bool:
        """Whether a finished trial is the best of several."""
        if record.verdict is not Verdict.FITS or len(self.ledger.records) < 2:
            return False
        winner = self.ranking.winner
        return winner is not None and winner.number == record.number

    def _known(self) -> tuple[Ranking, ConfirmationPlan | None]:
        """Return the ranking, and what a confirmation has still to run; None where there is none.

        Both are worked out when somebody looks at them first after a trial that may change them.
        """
        if self._ranked is None:
            confirmations = self.ledger.confirmations
            records = list(self._contenders.values())
            ran = list(itertools.chain(records, confirmations))
            speeds = target_speeds(self.definition, ran)
            ranking = rank(records, self.definition, confirmations, target_speeds=speeds)
            plan = None
            budget = self.definition.space.confirm
            if budget is not None:
                plan = ConfirmationPlan(ranking, budget, self._series)
            self._ranked = (ranking, plan)
        return self._ranked

    def _consider(self, record: TrialRecord) -> None:
        """Take in a finished trial for the ranking: one that neither was measured nor says that
        what fitted before does not fit changes nothing of it."""
        config = canonical(record.config)
        if record.purpose == "search":
            if record.measurement is None and config not in self._measured:
                return
            self._measured.add(config)
            self._contenders[record.number] = record
        self._ranked = None

    @property
    def _series(self) -> int:
        if self.confirming is None:
            return 0
        return self.confirming.series

    @property
    def trials_done(self) -> int:
        """Trials that count towards the study's total."""
        return self.ledger.trials_spent(since=self._first_number)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since it was started or resumed."""
        return self.clock() - self._started_seconds

    @property
    def search_seconds(self) -> float | None:
        """Seconds that the search still takes, at the pace of its newest trials, or until the time
        budget ends; None where nothing ended yet, or a trial runs for longer than any of those did.
        """
        left = self.left_seconds
        own = (r.wall_seconds for r in reversed(self.ledger.records) if r.carried is None)
        newest = list(islice(own, _PACE_OF))
        if not newest:
            return left
        rests: list[float] = []
        for ran in self._ran_seconds():
            longer = [seconds for seconds in newest if seconds > ran]
            if not longer:
                return left
            rests.append(statistics.fmean(longer) - ran)
        to_begin = max(0, self.definition.space.trials - self.trials_done - len(rests))
        at_pace = (sum(rests) + to_begin * statistics.fmean(newest)) / self._lanes
        seconds = max(at_pace, *rests, 0.0)
        if left is None:
            return seconds
        return min(seconds, left)

    @property
    def left_seconds(self) -> float | None:
        """Seconds until the time budget ends; None without one, and once it has ended."""
        limit = self.definition.space.time_budget_seconds
        if limit is None or limit <= self.elapsed_seconds:
            return None
        return limit - self.elapsed_seconds

    def _ran_seconds(self) -> list[float]:
        return [self.clock() - trial.began_seconds for trial in self.running.values()]

    @property
    def confirm_seconds(self) -> float | None:
        """Seconds that measuring the winner again still takes: what its budget leaves, or the runs
        that it needs where those take longer. None where there is none, or where it is overrun.
        """
        _, plan = self._known()
        if plan is None:
            return None
        seconds = plan.expected_seconds
        if self.confirming is not None:
            seconds -= max(self._ran_seconds(), default=0.0)
        return seconds if seconds > 0 else None

    def describe(self, config: TrialConfig) -> str:
        """Return what was searched of a configuration."""
        return search_words(config, space=self.definition.space)
