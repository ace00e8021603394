"""Owns a study that this process drives alone: asked, told, and recovered after a crash.

A result reaches the spool first, then the database. Knows nothing of how trials run or of what is
worth trying.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault, InputError
from storage import mapping
from storage.database import Patience, close, faults, patiently
from storage.definition import StudyDefinition
from storage.lease import Lease
from storage.reading import IDENTITY, WALL_SECONDS
from storage.records import Lost, TrialRecord
from storage.retries import attempts, to_retry
from storage.spool import Spool
from storage.urls import DatabaseUrl

T = TypeVar("T")


@dataclass(eq=False)
class LeasedStudy:
    """A study that this process alone drives.

    Every method may raise `EnvironmentFault`, for a database that stays away.
    """

    study: optuna.Study
    definition: StudyDefinition
    was_resumed: bool
    _storage: RDBStorage
    _url: DatabaseUrl
    _lease: Lease
    _spool: Spool
    _patience: Patience
    _records: dict[int, TrialRecord] = field(default_factory=dict, init=False)
    _worst_cost: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        self._reload()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up the lease and the connections. Idempotent."""
        self._lease.release()
        close(self._storage)

    def records(self) -> tuple[TrialRecord, ...]:
        """Return every finished trial's record, by number, from memory: nobody else writes."""
        return tuple(self._records[number] for number in sorted(self._records))

    def recover(self) -> tuple[TrialConfig, ...]:
        """Settle what an earlier driver left open, and return the configurations to try again.

        Call it before the first `ask`. A trial that ended but was not told is told from the spool.
        One that was running is recorded as lost: the lease says that nobody runs it any more. What
        was lost, crashed or timed out is returned until it was tried three times.
        """
        self._patiently(self._empty_queue)
        spooled = {entry.record.number: entry for entry in self._spool.read()}
        for frozen in self._patiently(lambda: self._trials(TrialState.RUNNING)):
            entry = spooled.get(frozen.number)
            if entry is not None:
                self._write(
                    self._handle(frozen.number), entry.record, self._told(entry.record, entry.cost)
                )
            else:
                self._give_up(frozen)
        return to_retry(self.records())

    def ask(
        self,
        distributions: Mapping[str, BaseDistribution],
        *,
        params: Mapping[str, Any] | None = None,
    ) -> Trial:
        """Return the next trial, with ``params`` where given and the sampler's choice elsewhere."""

        def attempt() -> Trial:
            if params is not None:
                self.study.enqueue_trial(dict(params))
            return self.study.ask(dict(distributions))

        self._hold()
        return self._patiently(attempt, before_retry=self._drop_unbegun)

    def begin(self, trial: Trial, config: TrialConfig, started_at: str) -> None:
        """Store the configuration before it runs, so that a driver's death loses only the run."""

        def attempt() -> None:
            trial.set_user_attr(mapping.STARTED_AT, started_at)
            trial.set_user_attr(mapping.CONFIG, config.model_dump(mode="json"))

        self._patiently(attempt)

    def tell(self, trial: Trial, record: TrialRecord, *, cost: float | None = None) -> None:
        """Keep a result: spooled and fsynced first, then told.

        Args:
            trial: as `ask` returned it.
            record: of that trial.
            cost: value of the ``cost`` objective; needed for a measured trial where a study has it.

        Raises:
            EnvironmentFault: the database stays away or another driver took over; the result is
                in the spool.
        """
        if record.number != trial.number:
            raise ValueError(
                f"a record of trial {record.number} cannot be told for trial {trial.number}"
            )
        told = self._told(record, cost)
        self._spool.append(record, cost=cost)
        try:
            self._hold()
            self._write(trial, record, told)
        except EnvironmentFault as fault:
            raise EnvironmentFault(
                f"{fault}; the result of trial {record.number} is safe in {self._spool.path} "
                "and will be told when the study is resumed"
            ) from fault

    def abandon(self) -> None:
        """Close a trial that was begun and never ran: nothing can be lost, and no attempt was made.

        The lease says that no other driver's trial can be running.
        """
        self._patiently(self._close_running)

    def add_wall_seconds(self, seconds: float) -> None:
        """Add to the driver's time over all runs of the study."""
        stored = self._patiently(lambda: self.study.user_attrs)
        total = float(stored.get(WALL_SECONDS, 0.0)) + seconds
        self._patiently(lambda: self.study.set_user_attr(WALL_SECONDS, total))

    def _reload(self) -> None:
        finished = [
            trial for trial in self.study.get_trials(deepcopy=False) if trial.state.is_finished()
        ]
        found = {trial.number: mapping.record_of(trial) for trial in finished}
        self._records = {number: record for number, record in found.items() if record is not None}
        for trial in finished:
            self._learn_cost(trial.user_attrs.get(mapping.COST))

    def _learn_cost(self, cost: float | None) -> None:
        if cost is not None:
            self._worst_cost = max(self._worst_cost, 2.0 * cost)

    def _told(self, record: TrialRecord, cost: float | None) -> mapping.Told:
        self._learn_cost(cost)
        scale = mapping.Scale(
            self.definition.space.objectives, self.definition.target.budget_bytes, self._worst_cost
        )
        return mapping.to_optuna(record, scale=scale, cost=cost)

    def _write(self, trial: Trial, record: TrialRecord, told: mapping.Told) -> None:
        self._records[record.number] = self._patiently(lambda: self._store(trial, record, told))

    def _store(self, trial: Trial, record: TrialRecord, told: mapping.Told) -> TrialRecord:
        """Write what is not there yet, the state last; return the record that storage then has."""
        stored = self._storage.get_trial(self._id(trial.number))
        if stored.state.is_finished():
            return mapping.record_of(stored) or record
        for key, value in told.attributes.items():
            trial.set_user_attr(key, value)
        if mapping.CONSTRAINT not in stored.constraints:
            trial.set_constraint(mapping.CONSTRAINT, told.violation)
        if told.intermediate is not None and not stored.intermediate_values:
            step, value = told.intermediate
            trial.report(value, step)
        self.study.tell(trial, values=told.values, state=told.state)
        return record

    def _give_up(self, frozen: FrozenTrial) -> None:
        """Record an orphan as lost; one that had no whole configuration yet is only closed."""
        config = mapping.config_of(frozen) or self._config_of_params(frozen.params)
        if config is None:
            self._patiently(lambda: self._close_unbegun(frozen.number))
            return
        record = TrialRecord(
            number=frozen.number,
            config=config,
            outcome=Lost(detail="the driver ended while the trial ran"),
            attempt=attempts(self.records(), config) + 1,
            started_at=frozen.user_attrs.get(mapping.STARTED_AT),
        )
        self._write(self._handle(frozen.number), record, self._told(record, None))

    def _config_of_params(self, params: Mapping[str, Any]) -> TrialConfig | None:
        """Return the configuration of a trial that never began; None where it is not whole."""
        space = self.definition.space
        try:
            return space.config(params) if params.keys() >= space.dimensions.keys() else None
        except InputError:
            return None

    def _empty_queue(self) -> None:
        """Close trials queued for an `ask` that never came; the next `ask` would be handed them."""
        while self._trials(TrialState.WAITING):
            self.study.tell(self.study.ask(), state=TrialState.FAIL)

    def _drop_unbegun(self) -> None:
        """Close what a failed `ask` left behind."""
        self._empty_queue()
        for frozen in self._trials(TrialState.RUNNING):
            if mapping.config_of(frozen) is None:
                self._close_unbegun(frozen.number)

    def _close_running(self) -> None:
        for frozen in self._trials(TrialState.RUNNING):
            self._close_unbegun(frozen.number)

    def _close_unbegun(self, number: int) -> None:
        self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def _trials(self, state: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(state,))

    def _id(self, number: int) -> int:
        study_id = self._storage.get_study_id_from_name(self.study.study_name)
        return self._storage.get_trial_id_from_study_id_trial_number(study_id, number)

    def _handle(self, number: int) -> Trial:
        return Trial(self.study, self._patiently(lambda: self._id(number)))

    def _hold(self) -> None:
        """Make sure that the lease is still ours, or take it again if nobody else was faster."""
        if self._lease.is_held():
            return
        self._patiently(self._lease.acquire)
        # Open connections may lead to a server, or a deleted file, that is no longer there.
        self._storage.engine.dispose()
        known = self._patiently(self._storage.get_all_studies)
        if self._spool.study_id not in [study.user_attrs.get(IDENTITY) for study in known]:
            raise EnvironmentFault(
                f"study '{self.study.study_name}' was deleted from {self._url} while it was driven"
            )
        self._patiently(self._reload)

    def _patiently(
        self, action: Callable[[], T], *, before_retry: Callable[[], None] = lambda: None
    ) -> T:
        with faults(self._url):
            return patiently(action, patience=self._patience, before_retry=before_retry)
