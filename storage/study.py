"""Owns a study that this process drives alone: opened, asked, told, and recovered after a crash.

A result reaches the spool first, then the database, where its trial is still the attempt that it is
of; whatever else became of the trial, the result is kept. Knows nothing of how trials run or of
what is worth trying; looking at a study without driving it is `reading`'s.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault, InputError
from storage import mapping
from storage.database import close, faults, patiently
from storage.definition import RunningTrial, StudyDefinition
from storage.kept import (
    WORTH_KEEPING,
    has_result,
    has_settled,
    how_begun,
    is_of,
    kept_among,
    kept_words,
    unsettled,
    unsettled_words,
)
from storage.keys import CARD_SECONDS, ENDED, IDENTITY, QUALITY_TOKENS, WALL_SECONDS
from storage.lease import Lease
from storage.ledger import Ledger
from storage.outcome_file import outcome_files
from storage.patience import Patience
from storage.records import (
    SEARCH,
    Attempt,
    Errand,
    Lost,
    TrialRecord,
)
from storage.recovery import attempts, ended_unseen, errand_of, record_left
from storage.sampler_view import SearchStorage
from storage.spool import Spool
from storage.stored import (
    read_stored_trials,
    refuse_unreadable,
    refuse_unreadable_trials,
    unreadable_in_words,
)
from storage.urls import DatabaseUrl, PostgresUrl

T = TypeVar("T")

_CLOSED = (UpdateFinishedTrialError, KeyError)
"""What Optuna raises where a trial ended, or is gone, since it was asked for."""


@dataclass(eq=False)
class OpenStudy:
    """A study that this process alone drives.

    Every method may raise `EnvironmentFault`, for a database that stays away.
    """

    study: optuna.Study
    definition: StudyDefinition
    was_resumed: bool
    environment: Mapping[str, Any]
    """Fingerprint of this run."""
    _storage: SearchStorage
    _url: DatabaseUrl
    _lease: Lease
    _spool: Spool
    _patience: Patience
    _warn: Callable[[str], None]
    _begun: dict[int, str] = field(default_factory=dict, init=False)
    """Identity of each attempt that this driver began, by number."""
    _open: dict[int, TrialRecord] = field(default_factory=dict, init=False)
    """What was begun and not told, by number: as interrupted, until it is."""
    cards: int = field(default=1, init=False)
    """That trials run on at a time, in this run."""
    _wall_seconds: float | None = field(default=None, init=False)
    """As it was read or written last; nobody else writes it."""
    _card_seconds: float | None = field(default=None, init=False)
    """Likewise."""
    ledger: Ledger = field(default_factory=Ledger, init=False)
    """Every finished trial, from memory: nobody else writes."""

    def __post_init__(self) -> None:
        self._patiently(self._reload)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the lease and the connections. Idempotent."""
        self._lease.release()
        close(self._storage)

    def records(self) -> tuple[TrialRecord, ...]:
        """Return every finished trial's record, by number.

        They are the search's; what measured its winners again are the `confirmations`.
        """
        return self.ledger.records

    def confirmations(self) -> tuple[TrialRecord, ...]:
        """Return every finished run that measured a winner again, by number."""
        return self.ledger.confirmations

    def on_errand(self, errand: Errand) -> tuple[TrialRecord, ...]:
        """Return the finished runs of one purpose and one confirmation, by number."""
        return self.ledger.on_errand(errand)

    def recover(self) -> tuple[TrialConfig, ...]:
        """Close what an earlier driver left open, and return the configurations to try again.

        Call it before the first `ask`. A trial that ended but was not told is told from the spool,
        or from what its worker left on disk. One that was running is recorded as lost: the lease
        says that nobody runs it any more. What was lost, crashed or timed out is returned until it
        was tried three times. A result whose trial is another by now is kept in the spool and said.
        """
        self._patiently(self._empty_queue)
        left = tuple(self._left())
        for ended in left:
            self._keep_what_was_left(ended)
        begun = self._patiently(self._running)
        found = unsettled(self._spool, records=self.ledger.all, begun=begun)
        waiting = {record.number: record for record in found.waiting}
        for frozen in self._patiently(lambda: self._trials(TrialState.RUNNING)):
            record = waiting.get(frozen.number) or self._unseen(frozen, left)
            if record is None:
                self._patiently(partial(self._close_unbegun, frozen.number))
            else:
                handle = Trial(self.study, self._patiently(partial(self._id, frozen)))
                self._write(handle, record)
        for line in unsettled_words(found, study=self.name, path=self._spool.path, is_driven=True):
            self._warn(line)
        return self.ledger.to_retry()

    @property
    def name(self) -> str:
        """What the study is called."""
        return self.study.study_name

    @property
    def identity(self) -> str:
        """What tells it from every other study, whatever that is called."""
        return self._spool.study_id

    def lacking(self, spooled: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
        """Return which results of a spool of this study it has not, and will not tell by itself."""
        begun = self._patiently(self._running)
        open_anyway = (r for r in spooled if not any(is_of(r, trial) for trial in begun))
        return kept_among(tuple(open_anyway), self.ledger.all)

    def ask(
        self,
        distributions: Mapping[str, BaseDistribution],
        *,
        params: Mapping[str, Any] | None = None,
    ) -> Trial:
        """Return the next trial, with ``params`` where given and the sampler's choice elsewhere."""

        def attempt() -> Trial:
            while True:
                if params is not None:
                    self.study.enqueue_trial(dict(params))
                trial = self.study.ask()
                if self.ledger.record(trial.number) is None:
                    break
                # Optuna counts trials to number them: where one was deleted, a number comes twice.
                self.study.tell(trial, state=TrialState.FAIL)
            if params is None and any(not d.single() for d in distributions.values()):
                # Chosen before the database is held, as that may take seconds.
                _ = trial.relative_params
            with self._storage.together():
                for name, distribution in distributions.items():
                    mapping.suggest(trial, name, distribution)
            return trial

        self._hold()
        return self._patiently(attempt, before_retry=self._drop_unbegun)

    def ask_again(self) -> Trial:
        """Return a trial without parameters, which the sampler neither chose nor hears of."""
        sampler = self.study.sampler
        self.study.sampler = optuna.samplers.RandomSampler()
        try:
            return self.ask({}, params={})
        finally:
            self.study.sampler = sampler

    def carry(
        self,
        record: TrialRecord,
        *,
        params: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
    ) -> None:
        """Store a trial that another study ran, in one transaction: all of it is there or nothing.

        It gets the next number; nothing of it is spooled, as the other study still has it.

        Args:
            record: says where it was measured.
            params: of the trial, where this study's space has them.
            distributions: of those.
        """
        self._hold()
        number = self._patiently(self._free_number)
        numbered = record.model_copy(update={"number": number})
        result = mapping.to_optuna(
            numbered,
            objectives=self.definition.space.objectives,
            budget_bytes=self.definition.target.budget_bytes,
        )
        frozen = optuna.trial.create_trial(
            state=result.state,
            values=result.values,
            params=dict(params),
            distributions=dict(distributions),
            user_attrs={
                mapping.STARTED_AT: numbered.started_at,
                mapping.CONFIG: numbered.config.model_dump(mode="json"),
                **result.attributes,
            },
            constraints={mapping.CONSTRAINT: result.violation},
        )

        def attempt() -> None:
            # Nobody else adds trials: one more than there were is this one, which went through
            # although nobody was told.
            if len(self.study.get_trials(deepcopy=False)) == number:
                self.study.add_trial(frozen)

        self._patiently(attempt)
        self.ledger.add(numbered)

    def begin(
        self, trial: Trial, config: TrialConfig, started_at: str, *, errand: Errand = SEARCH
    ) -> Attempt:
        """Store the configuration before it runs, so that a driver's death loses only the run.

        Returns:
            This attempt, which its result must name: a number alone may come to stand for another
            configuration, in a database that was restored from a copy.
        """
        identity = uuid.uuid4().hex
        self._open[trial.number] = TrialRecord(
            number=trial.number,
            config=config,
            outcome=Lost(detail="interrupted before it ran", is_interrupted=True),
            attempt_id=identity,
            started_at=started_at,
            **errand.model_dump(),
        )

        def attempt() -> None:
            with self._storage.together():
                trial.set_user_attr(mapping.ATTEMPT, identity)
                trial.set_user_attr(mapping.STARTED_AT, started_at)
                if errand != SEARCH:
                    trial.set_user_attr(mapping.PURPOSE, errand.model_dump(mode="json"))
                trial.set_user_attr(mapping.CONFIG, config.model_dump(mode="json"))

        # Where somebody closed or deleted it already its result is kept, and that is said then.
        with suppress(*_CLOSED):
            self._patiently(attempt)
        if isinstance(self._url, PostgresUrl):
            # What follows takes seconds to minutes, and a server has few connections for a team:
            # whichever it was that is kept, the lease's alone is left.
            close(self._storage)
        self._begun[trial.number] = identity
        return Attempt(
            id=identity,
            study=self.identity,
            number=trial.number,
            started_at=started_at,
            **errand.model_dump(),
        )

    def tell(self, trial: Trial, record: TrialRecord) -> TrialRecord:
        """Keep a result of a trial that `ask` returned: spooled and fsynced first, then told.

        Returns:
            What the study has of the trial now: the record, or one that says that the result is in
            the spool alone, as somebody closed or deleted the trial in the database meanwhile.

        Raises:
            EnvironmentFault: the database stays away, or another driver took over. The result
                is in the spool, or the message says that it is nowhere.
        """
        if record.number != trial.number:
            raise ValueError(
                f"a record of trial {record.number} cannot be told for trial {trial.number}"
            )
        if record.attempt_id is None:
            record = record.model_copy(update={"attempt_id": self._begun.get(record.number)})
        unspooled: EnvironmentFault | None = None
        try:
            self._spool.append(record)
        except EnvironmentFault as fault:
            # A healthy database outweighs what is in the way of that.
            unspooled = fault
        self._open.pop(record.number, None)
        try:
            self._hold()
            is_told = self._write(trial, record)
        except EnvironmentFault as fault:
            raise self._untold(record, fault, unspooled) from fault
        if is_told:
            if unspooled is not None:
                self._warn(
                    f"{unspooled}; the result of trial {record.number} is in the database alone"
                )
            return record
        closed = EnvironmentFault(f"somebody closed trial {record.number} in {self._url}")
        if unspooled is not None:
            raise self._untold(record, closed, unspooled)
        return self._keep(record)

    def _untold(
        self, record: TrialRecord, fault: EnvironmentFault, unspooled: EnvironmentFault | None
    ) -> EnvironmentFault:
        """Return the fault of a result that did not reach the database, with where it is."""
        result = f"the result of trial {record.number} ({record.verdict})"
        if unspooled is not None:
            return type(fault)(f"{fault}; {unspooled}; {result} is nowhere: it runs again")
        return type(fault)(
            f"{fault}; {result} is safe in {self._spool.path}: a resume tells it where the trial "
            "is still open, and else says how to take it over"
        )

    def _keep(self, record: TrialRecord) -> TrialRecord:
        """Say that a result is in the spool alone, and go on as if the trial had been lost."""
        path = self._spool.path
        self._warn(kept_words([record], study=self.name, path=path))
        lost = Lost(
            detail=f"it ended as {record.verdict}, but somebody closed the trial in the database: "
            f"the result is kept in {path} alone",
            is_kept=True,
        )
        kept = record.model_copy(update={"outcome": lost})
        there = self.ledger.record(record.number)
        if there is None or there.attempt_id == record.attempt_id:
            self.ledger.add(kept)
        # The database is not as it was left: perhaps a copy was written over it.
        self._patiently(self._forget_cached)
        return kept

    def abandon(self, *, besides: Collection[int] = ()) -> None:
        """Close what was begun and never ran: nothing can be lost, and no attempt was made.

        The lease says that no other driver's trial can be running. Where the database does not hear
        of it, the spool does, for a resume to know that its driver was not killed by it.

        Args:
            besides: numbers of the trials that do run.
        """
        never_ran = [record for number, record in self._open.items() if number not in besides]
        try:
            self._patiently(partial(self._close_running, besides))
        except BaseException:
            for record in never_ran:
                with suppress(EnvironmentFault):
                    self._spool.append(record)
            raise
        for record in never_ran:
            del self._open[record.number]

    def spool(self, record: TrialRecord) -> None:
        """Keep a result on disk alone, of whose database it is known that it stays away: a resume
        tells it.

        Raises:
            EnvironmentFault: the disk cannot be written.
        """
        self._spool.append(record)

    def wall_seconds(self) -> float:
        """Return the driver's time over all runs of the study so far."""
        if self._wall_seconds is None:
            stored = self._patiently(lambda: self.study.user_attrs)
            self._wall_seconds = float(stored.get(WALL_SECONDS, 0.0))
        return self._wall_seconds

    def quality_tokens(self) -> int | None:
        """Return on how many tokens a trial trains for its held-out loss; None before that is
        chosen."""
        stored = self._patiently(lambda: self.study.user_attrs).get(QUALITY_TOKENS)
        return stored if isinstance(stored, int) and stored > 0 else None

    def note_quality_tokens(self, tokens: int) -> None:
        """Keep on how many tokens every trial of the study trains for its held-out loss."""
        self._patiently(lambda: self.study.set_user_attr(QUALITY_TOKENS, tokens))

    def note_end(self, values: Mapping[str, Any]) -> None:
        """Keep why the search ended, in plain JSON values; an earlier run's gives way."""
        self._patiently(lambda: self.study.set_user_attr(ENDED, dict(values)))

    def add_wall_seconds(self, seconds: float) -> None:
        """Add to the driver's time over all runs of the study."""
        total = self.wall_seconds() + seconds
        of_cards = self.card_seconds() + seconds * self.cards

        def write() -> None:
            if of_cards != total:
                self.study.set_user_attr(CARD_SECONDS, of_cards)
            self.study.set_user_attr(WALL_SECONDS, total)

        self._patiently(write)
        self._wall_seconds, self._card_seconds = total, of_cards

    def card_seconds(self) -> float:
        """Return the driver's time over all runs, times the cards that each had: what is paid."""
        if self._card_seconds is None:
            stored = self._patiently(lambda: self.study.user_attrs)
            self._card_seconds = float(stored.get(CARD_SECONDS, stored.get(WALL_SECONDS, 0.0)))
        return self._card_seconds

    def _reload(self) -> None:
        # Whoever had the lease in between may have been a newer version.
        refuse_unreadable(self._storage.engine, self.name)
        study_id = self._storage.get_study_id_from_name(self.study.study_name)
        trials = read_stored_trials(self._storage.engine, study_id)
        refuse_unreadable_trials(self.name, trials)
        for words in unreadable_in_words(trials.unreadable):
            self._warn(words)
        self.ledger = Ledger(trials.records)
        self._storage.record_of = self.ledger.record
        self._wall_seconds = self._card_seconds = None

    def _write(self, trial: Trial, record: TrialRecord) -> bool:
        """Tell a result; return whether the database has it now, and nobody else's instead."""
        try:
            is_told = self._patiently(partial(self._store, trial, record))
        except _CLOSED:
            is_told = self._patiently(lambda: self._is_there(record))
        if is_told:
            self.ledger.add(record)
        return is_told

    def _free_number(self) -> int:
        """Return the number of the next trial, which Optuna derives from how many there are."""
        while True:
            number = len(self.study.get_trials(deepcopy=False))
            if self.ledger.record(number) is None:
                return number
            # One was deleted: without another in its place a number would come twice.
            self.study.add_trial(optuna.trial.create_trial(state=TrialState.FAIL))

    def _store(self, trial: Trial, record: TrialRecord) -> bool:
        """Write what is not there yet, the state last, where the trial is what the result is of."""
        with self._storage.together():
            stored = self._storage.get_trial(self._id(trial))
            if stored.state.is_finished():
                return has_result(stored, record)
            if not self._is_its_trial(stored, record):
                return False
            result = mapping.to_optuna(
                record,
                objectives=self.definition.space.objectives,
                budget_bytes=self.definition.target.budget_bytes,
            )
            for key, value in result.attributes.items():
                trial.set_user_attr(key, value)
            if mapping.CONSTRAINT not in stored.constraints:
                trial.set_constraint(mapping.CONSTRAINT, result.violation)
            if result.intermediate is not None and not stored.intermediate_values:
                step, value = result.intermediate
                trial.report(value, step)
            try:
                self.study.tell(trial, values=result.values, state=result.state)
            except ValueError:
                # Closed since it was looked at, which Optuna says in no other way.
                if not self._storage.get_trial(self._id(trial)).state.is_finished():
                    raise
                return self._is_there(record)
            return True

    def _is_there(self, record: TrialRecord) -> bool:
        """Whether the database has this very result, which may have gone through unheard."""
        try:
            return has_result(self._storage.get_trial(self._id(record)), record)
        except KeyError:
            return False

    def _is_its_trial(self, stored: FrozenTrial, record: TrialRecord) -> bool:
        """Whether an open trial is the attempt that a result is of; what never began is any."""
        trial = how_begun(stored)
        if trial.attempt_id != record.attempt_id:
            return False
        return trial.config is None or is_of(
            record.model_copy(update={"started_at": record.started_at or trial.started_at}), trial
        )

    def _running(self) -> list[RunningTrial]:
        """Return how the open trials were begun."""
        return list(map(how_begun, self._trials(TrialState.RUNNING)))

    def _unseen(self, frozen: FrozenTrial, left: Iterable[TrialRecord]) -> TrialRecord | None:
        """Return the record of a trial that its driver did not see the end of.

        What its worker left on disk, or that it was lost; None where it had no whole configuration.
        """
        trial = how_begun(frozen)
        for found in left:
            if is_of(found, trial):
                return found
        config = trial.config or self._config_of_params(frozen.params)
        if config is None:
            return None
        return ended_unseen(
            trial,
            config,
            Lost(detail="the driver ended while the trial ran"),
            is_baseline=config == self.definition.space.baseline_config(),
            attempt=attempts(self.on_errand(errand_of(trial)), config) + 1,
        )

    def _left(self) -> Iterator[TrialRecord]:
        """Yield what the last workers left on disk and is not known already."""
        for file in outcome_files(self._spool.path.parent):
            left = record_left(
                file, definition=self.definition, study=self.identity, known=self.ledger.all
            )
            if left is not None and not has_settled(left, self.ledger.all):
                yield left

    def _keep_what_was_left(self, left: TrialRecord) -> None:
        """Spool what a worker left where no open trial takes it, before the next one's replaces it.

        Raises:
            EnvironmentFault: it cannot be kept. It stays where it is.
        """
        is_taken = any(is_of(left, trial) for trial in self._patiently(self._running))
        is_nothing = left.verdict not in WORTH_KEEPING
        if is_taken or is_nothing or left.attempt_id in {r.attempt_id for r in self._spool.read()}:
            return
        self._spool.append(left)

    def _config_of_params(self, params: Mapping[str, Any]) -> TrialConfig | None:
        """Return the configuration of a trial that never began; None where it is not whole."""
        space = self.definition.space
        try:
            return space.config(params) if params.keys() >= space.dimensions.keys() else None
        except InputError:
            return None

    def _empty_queue(self) -> None:
        """Close trials queued for an `ask` that never came; the next `ask` would be handed them."""
        while waiting := {frozen.number for frozen in self._trials(TrialState.WAITING)}:
            trial = self.study.ask()
            self.study.tell(trial, state=TrialState.FAIL)
            if trial.number not in waiting:
                # None was queued: that is of a database which another was written over since.
                self._forget_cached()

    def _drop_unbegun(self) -> None:
        """Close what an `ask` left behind that failed."""
        self._empty_queue()
        for frozen in self._trials(TrialState.RUNNING):
            if mapping.CONFIG not in frozen.user_attrs:
                self._close_unbegun(frozen.number)

    def _close_running(self, besides: Collection[int]) -> None:
        for frozen in self._trials(TrialState.RUNNING):
            if frozen.number not in besides:
                self._close_unbegun(frozen.number)

    def _close_unbegun(self, number: int) -> None:
        # Where somebody deleted it there is nothing to close.
        with suppress(ValueError):
            self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def _trials(self, state: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(state,))

    def _id(self, trial: Trial | FrozenTrial | TrialRecord) -> int:
        study_id = self._storage.get_study_id_from_name(self.study.study_name)
        return self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)

    def _hold(self) -> None:
        """Make sure that the lease is still ours, or take it again if nobody else was faster."""
        if self._lease.is_held():
            return
        self._patiently(self._lease.acquire)
        # Open connections may lead to a server, or a deleted file, that is no longer there.
        self._storage.engine.dispose()
        self._require_study()
        self._patiently(self._forget_cached)
        self._patiently(self._reload)

    def _forget_cached(self) -> None:
        """Let Optuna read the trials anew: what it keeps of them may be another copy's by now."""
        self.study = optuna.load_study(
            study_name=self.name,
            storage=self._storage,
            sampler=self.study.sampler,
            pruner=self.study.pruner,
        )

    def _require_study(self) -> None:
        """Raise where the study is no longer in the database, or another one has its name."""

        def identity() -> object:
            stored = self._storage.get_study_id_from_name(self.name)
            return self._storage.get_study_user_attrs(stored).get(IDENTITY)

        gone = EnvironmentFault(
            f"study '{self.name}' was deleted from {self._url} while it was driven"
        )
        with faults(self._url):
            try:
                stored = patiently(identity, patience=self._patience, storage=self._storage)
            except KeyError:
                raise gone from None
        if stored != self.identity:
            raise gone

    def _patiently(
        self, action: Callable[[], T], *, before_retry: Callable[[], None] = lambda: None
    ) -> T:
        with faults(self._url):
            try:
                return patiently(
                    action,
                    patience=self._patience,
                    before_retry=before_retry,
                    storage=self._storage,
                )
            except KeyError:
                # Optuna's word for what is not there: the study as a whole, or one of its trials.
                self._require_study()
                raise
