"""Owns what a person wants to see of a running study, gathered from the tuner's events.

Knows nothing of terminals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from reports import units
from search_spaces.config import TrialConfig
from storage.definition import StudyDefinition
from storage.ranking import Gain, Ranking, compare, rank
from storage.records import TrialRecord
from storage.recovery import next_number
from sweep.running.runner import Progress
from sweep.study.events import Event, StudyFinished, TrialFinished, TrialProgress, TrialStarted
from sweep.study.tuner import trials_spent


@dataclass
class Board:
    """A study as it stands, kept up to date by `take`.

    It is drawn several times a second, and ranked once a trial.
    """

    name: str
    definition: StudyDefinition
    records: list[TrialRecord]
    """Finished trials, those of earlier runs included."""
    clock: Callable[[], float]
    current: TrialStarted | None = None
    progress: Progress | None = None
    is_stopping: bool = False
    _started_seconds: float = field(init=False)
    _finished_here: int = field(default=0, init=False)
    _since: int = field(init=False)
    _ranking: Ranking = field(init=False)

    def __post_init__(self) -> None:
        self._since = next_number(self.records)
        self._started_seconds = self.clock()
        self._ranking = rank(self.records, self.definition)

    def take(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case TrialStarted():
                self.current, self.progress = event, None
            case TrialProgress(progress=progress):
                self.progress = progress
            case TrialFinished(record=record):
                self.records.append(record)
                self._ranking = rank(self.records, self.definition)
                self._finished_here += 1
                self.current = self.progress = None
            case StudyFinished():
                self.current = self.progress = None

    @property
    def best(self) -> TrialRecord | None:
        """The best trial of the space that fits so far, by the study's objectives."""
        return self._ranking.winner

    @property
    def gain(self) -> Gain | None:
        """The best's speed over the baseline's, where it can be stated."""
        comparison = compare(self._ranking)
        return None if comparison is None else comparison.gain

    @property
    def is_first(self) -> bool:
        """Whether no trial has finished in this run."""
        return self._finished_here == 0

    @property
    def trials_done(self) -> int:
        """Trials that count towards the study's total."""
        return trials_spent(self.records, since=self._since)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of this run."""
        return self.clock() - self._started_seconds

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds left at the pace of this run, or of its time budget; None where unknown."""
        limit = self.definition.space.time_budget_seconds
        left = None if limit is None else max(0.0, limit - self.elapsed_seconds)
        if self.is_first:
            return left
        trials_left = max(0, self.definition.space.trials - self.trials_done)
        at_pace = trials_left * self.elapsed_seconds / self._finished_here
        return at_pace if left is None else min(left, at_pace)

    def describe(self, config: TrialConfig) -> str:
        """Return what a configuration changes over the baseline."""
        return units.changes(config, baseline=self.definition.space.baseline_config())
