"""A study that this process drives alone: asked, told, and recovered after a crash.

Everything is written in transactions that first see that the study is still this driver's. A result
reaches the spool first, then the database, where its trial is still the attempt that it is of;
whatever else became of the trial, the result is kept.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault, InputError
from storage import database, mapping
from storage.database import Storage, faults, retried
from storage.definition import RunningTrial, StudyDefinition
from storage.keys import CARD_SECONDS, DRIVER, ENDED, QUALITY_TOKENS, WALL_SECONDS
from storage.ledger import Ledger
from storage.outcome_file import outcome_files
from storage.records import SEARCH, Attempt, Errand, Lost, TrialRecord
from storage.recovery import ended_unseen, record_left
from storage.spool import WORTH_KEEPING, Spool, kept_among, kept_words, settled_attempts
from storage.urls import DatabaseUrl

T = TypeVar("T")

_CLOSED = (UpdateFinishedTrialError, KeyError)
"""What Optuna raises where a trial ended, or is gone, since it was asked for."""
_OPEN = (TrialState.RUNNING, TrialState.WAITING)


@dataclass(eq=False)
class OpenStudy:
    """A study that this process alone drives.

    Every method may raise `EnvironmentFault`, for a database that stays away or another driver.
    """

    study: optuna.Study
    definition: StudyDefinition
    was_resumed: bool
    environment: Mapping[str, Any]
    """Fingerprint of this run."""
    ledger: Ledger
    """Every finished trial, from memory: nobody else writes."""
    _storage: Storage
    _url: DatabaseUrl
    _driver: str
    """What the study's attribute says for as long as nobody else drove it."""
    _closing: ExitStack
    _spool: Spool
    _warn: Callable[[str], None]
    _open: dict[int, TrialRecord | None] = field(default_factory=dict, init=False)
    """What was asked for and not told, by number: once it began as interrupted, until it is."""
    _is_stale: bool = field(default=False, init=False)
    """Whether Optuna may hold trials of a transaction that failed."""
    cards: int = field(default=1, init=False)
    """That trials run on at a time, in this run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the lease and the connections. Idempotent."""
        self._closing.close()

    @property
    def name(self) -> str:
        """What the study is called."""
        return self.study.study_name

    @property
    def identity(self) -> str:
        """What tells it from every other study, whatever that is called."""
        return self._spool.study_id

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
        left = {(record.attempt_id, record.config): record for record in self._left()}
        contents = self._spool.look(known=settled_attempts(self.ledger.all))
        known = left | {(record.attempt_id, record.config): record for record in contents.records}
        begun = [(mapping.how_begun(t), t) for t in self._write(lambda: self._trials(*_OPEN))]
        waiting = {(trial.attempt_id, trial.config) for trial, _ in begun}
        for attempt, record in left.items():
            is_spooled = record.attempt_id in {spooled.attempt_id for spooled in contents.records}
            if attempt not in waiting and record.verdict in WORTH_KEEPING and not is_spooled:
                # Before the worker's next outcome replaces it.
                self._spool.append(record)
        for trial, frozen in begun:
            ended = known.get((trial.attempt_id, trial.config)) if trial.config else None
            ended = ended or self._unseen(trial, frozen)
            if ended is None:
                self._write(partial(self._fail, trial.number))
            elif self._has_stored(ended):
                self.ledger.add(ended)
        for words in contents.problems:
            self._warn(words)
        kept = kept_among(self._spool.read(), self.ledger.all)
        if kept:
            self._warn(kept_words(kept, study=self.name, path=self._spool.path))
        return self.ledger.to_retry()

    def lacking(self, spooled: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
        """Return which results of a spool of this study it has not, and will not tell by itself."""
        running = self._write(lambda: self._trials(TrialState.RUNNING))
        begun = {trial.user_attrs.get(mapping.ATTEMPT) for trial in running}
        return kept_among((r for r in spooled if r.attempt_id not in begun), self.ledger.all)

    def ask(
        self,
        distributions: Mapping[str, BaseDistribution],
        *,
        params: Mapping[str, Any] | None = None,
    ) -> Trial:
        """Return the next trial, with ``params`` where given and the sampler's choice elsewhere."""
        attempts, suggestions = itertools.count(), itertools.count()

        def create() -> Trial:
            if next(attempts):
                # An attempt may have gone through although nobody was told.
                for trial in self._trials(TrialState.RUNNING):
                    if trial.number not in self._open:
                        self._fail(trial.number)
            self._free_number()
            if params is not None:
                self.study.enqueue_trial(dict(params))
            return self.study.ask()

        def suggest() -> Trial:
            given = trial
            if next(suggestions) or trial.study is not self.study:
                # What a trial was given in a transaction that failed, it believes to have.
                self.study.get_trials(deepcopy=False)
                given = Trial(self.study, self._id(trial.number))
            for name, distribution in distributions.items():
                mapping.suggest(given, name, distribution)
            return given

        trial = self._write(create)
        self._open[trial.number] = None
        if params is None and any(not d.single() for d in distributions.values()):
            # Chosen before the database is held, as that may take seconds.
            with faults(self._url):
                retried(lambda: trial.relative_params)
        return self._write(suggest)

    def _free_number(self) -> int:
        """Return the next trial's number, which no trial has that this driver knows.

        Optuna counts trials to number them: where one was deleted, a number would come twice.
        """
        while True:
            number = self._storage.trial_count(self._study_id)
            if self.ledger.record(number) is None and number not in self._open:
                return number
            closed = {mapping.NEVER_RAN: True}
            self.study.add_trial(
                optuna.trial.create_trial(state=TrialState.FAIL, user_attrs=closed)
            )

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
        """Store a trial that another study ran. It gets the next number; nothing of it is spooled,
        as the other study still has it.

        Args:
            record: says where it was measured.
            params: of the trial, where this study's space has them.
            distributions: of those.
        """
        number = self._write(self._free_number)
        numbered = record.model_copy(update={"number": number})
        result = self._result(numbered)
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
            # One more than there were is this one, which went through although nobody was told.
            if self._storage.trial_count(self._study_id) == number:
                self.study.add_trial(frozen)

        self._write(attempt)
        self.ledger.add(numbered)

    def begin(
        self, trial: Trial, config: TrialConfig, started_at: str, *, errand: Errand = SEARCH
    ) -> Attempt:
        """Store the configuration before it runs, so that a driver's death loses only the run.

        Returns:
            This attempt, which its result must name: a number alone may come to stand for another
            configuration, in a database that was restored from a copy.
        """
        begun = Attempt(
            id=uuid.uuid4().hex,
            study=self.identity,
            number=trial.number,
            started_at=started_at,
            **errand.model_dump(),
        )
        self._open[trial.number] = TrialRecord(
            number=trial.number,
            config=config,
            outcome=Lost(detail="interrupted before it ran", is_interrupted=True),
            attempt_id=begun.id,
            started_at=started_at,
            **errand.model_dump(),
        )
        attributes: dict[str, Any] = {mapping.ATTEMPT: begun.id, mapping.STARTED_AT: started_at}
        if errand != SEARCH:
            attributes[mapping.PURPOSE] = errand.model_dump(mode="json")
        attributes[mapping.CONFIG] = config.model_dump(mode="json")

        def attempt() -> None:
            for key, value in attributes.items():
                self._storage.set_trial_user_attr(self._id(trial.number), key, value)

        # Where somebody closed or deleted it already its result is kept, and that is said then.
        with suppress(*_CLOSED):
            self._write(attempt)
        return begun

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
        begun = self._open.pop(record.number, None)
        if record.attempt_id is None and begun is not None:
            record = record.model_copy(update={"attempt_id": begun.attempt_id})
        result, unspooled = f"the result of trial {record.number} ({record.verdict})", ""
        try:
            self._spool.append(record)
        except EnvironmentFault as fault:
            # A healthy database outweighs what is in the way of that.
            unspooled = str(fault)
        try:
            is_told = self._has_stored(record)
            if unspooled and not is_told:
                raise EnvironmentFault(f"somebody closed trial {record.number} in {self._url}")
        except EnvironmentFault as fault:
            where = f"is safe in {self._spool.path}: a resume tells it, or says how to take it over"
            if unspooled:
                where = f"is nowhere: it runs again ({unspooled})"
            raise type(fault)(f"{fault}; {result} {where}") from fault
        if not is_told:
            return self._keep(record)
        if unspooled:
            self._warn(f"{unspooled}; {result} is in the database alone")
        self.ledger.add(record)
        return record

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
        self._write(self._forget_cached)
        return kept

    def abandon(self, *, besides: Collection[int] = ()) -> None:
        """Close what was begun and never ran: nothing can be lost, and no attempt was made.

        Where the database does not hear of it, the spool does, for a resume to know that its driver
        was not killed by it.

        Args:
            besides: numbers of the trials that do run.
        """

        def close() -> None:
            for trial in self._trials(TrialState.RUNNING):
                if trial.number not in besides:
                    self._fail(trial.number)

        never_ran = {n: record for n, record in self._open.items() if n not in besides}
        try:
            self._write(close)
        except BaseException:
            for record in filter(None, never_ran.values()):
                with suppress(EnvironmentFault):
                    self._spool.append(record)
            raise
        for number in never_ran:
            del self._open[number]

    def spool(self, record: TrialRecord) -> None:
        """Keep a result on disk alone, of whose database it is known that it stays away: a resume
        tells it.

        Raises:
            EnvironmentFault: the disk cannot be written.
        """
        self._spool.append(record)

    def wall_seconds(self) -> float:
        """Return the driver's time over all runs of the study so far."""
        return float(self._attributes().get(WALL_SECONDS, 0.0))

    def card_seconds(self) -> float:
        """Return the driver's time over all runs, times the GPUs that each had: what is paid."""
        return float(self._attributes().get(CARD_SECONDS, 0.0))

    def add_wall_seconds(self, seconds: float) -> None:
        """Add to the driver's time over all runs of the study."""
        before, of_cards = self._attributes(), seconds * self.cards
        totals = {
            key: before.get(key, 0.0) + more
            for key, more in ((WALL_SECONDS, seconds), (CARD_SECONDS, of_cards))
        }

        def write() -> None:
            for key, total in totals.items():
                self.study.set_user_attr(key, total)

        self._write(write)

    def quality_tokens(self) -> int | None:
        """Return on how many tokens a trial trains for its held-out loss; None before that is
        chosen."""
        tokens: int | None = self._attributes().get(QUALITY_TOKENS)
        return tokens

    def note_quality_tokens(self, tokens: int) -> None:
        """Keep on how many tokens every trial of the study trains for its held-out loss."""
        self._write(lambda: self.study.set_user_attr(QUALITY_TOKENS, tokens))

    def note_end(self, values: Mapping[str, Any]) -> None:
        """Keep why the search ended, in plain JSON values; an earlier run's gives way."""
        self._write(lambda: self.study.set_user_attr(ENDED, dict(values)))

    def _attributes(self) -> dict[str, Any]:
        return self._write(lambda: self.study.user_attrs)

    @property
    def _study_id(self) -> int:
        """The database's number of the study. Raises `KeyError` where it is gone."""
        return self._storage.get_study_id_from_name(self.name)

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials in some states, as the database has them."""
        return self._storage.get_all_trials(self._study_id, deepcopy=False, states=states)

    def _fail(self, number: int) -> None:
        """Close a trial that never ran, where it is still there and open."""
        for trial in self._trials(*_OPEN):
            if trial.number == number:
                self._storage.set_trial_user_attr(trial._trial_id, mapping.NEVER_RAN, True)
                self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)

    def _id(self, number: int) -> int:
        """Return the database's number of a trial. Raises `KeyError` where it is gone."""
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)

    def _forget_cached(self) -> None:
        """Let Optuna read the trials anew."""
        self.study = optuna.load_study(
            study_name=self.name,
            storage=self._storage,
            sampler=self.study.sampler,
            pruner=self.study.pruner,
        )

    def _write(self, action: Callable[[], T]) -> T:
        """Do something in one transaction, all of it or nothing, where the study is ours.

        Args:
            action: may be repeated, also where it went through and nobody was told.
        """

        def attempt() -> T:
            with self._storage.together():
                self._require_driver()
                if self._is_stale:
                    self._forget_cached()
                self._is_stale = True
                done = action()
            self._is_stale = False
            return done

        with faults(self._url):
            return retried(attempt, more_seconds=database.RESTART_SECONDS)

    def _require_driver(self) -> None:
        """Raise where the study is no longer in the database, or somebody else drove it."""
        named = f"study '{self.name}'"
        try:
            number = self._storage.get_study_id_from_name(self.name)
            driver = self._storage.get_study_user_attrs(number).get(DRIVER)
        except KeyError:
            raise EnvironmentFault(
                f"{named} was deleted from {self._url} while it was driven"
            ) from None
        if driver != self._driver:
            raise EnvironmentFault(
                f"{named} in {self._url} is no longer driven from here: another driver took it "
                "over, or a copy was put in its place; the same command resumes it"
            )

    def _has_stored(self, record: TrialRecord) -> bool:
        """Write a result; return whether the database has it."""
        try:
            return self._write(lambda: self._store(record))
        except KeyError:
            return False

    def _store(self, record: TrialRecord) -> bool:
        """Write a result, the state last, where its trial is open and the attempt that it is of;
        return whether the database has it. Raises `KeyError` where the trial is gone."""
        trial_id = self._id(record.number)
        stored = self._storage.get_trial(trial_id)
        if stored.user_attrs.get(mapping.ATTEMPT) != record.attempt_id:
            return False
        if stored.state.is_finished():
            # By this very result, which may have gone through unheard, or by somebody else.
            told = mapping.record_of(stored)
            return told is not None and told.verdict is record.verdict
        result, trial = self._result(record), Trial(self.study, trial_id)
        for key, value in result.attributes.items():
            trial.set_user_attr(key, value)
        if mapping.CONSTRAINT not in stored.constraints:
            trial.set_constraint(mapping.CONSTRAINT, result.violation)
        if result.intermediate is not None:
            step, value = result.intermediate
            trial.report(value, step)
        self.study.tell(trial, values=result.values, state=result.state)
        return True

    def _result(self, record: TrialRecord) -> mapping.OptunaResult:
        return mapping.to_optuna(
            record,
            objectives=self.definition.space.objectives,
            budget_bytes=self.definition.target.budget_bytes,
        )

    def _unseen(self, trial: RunningTrial, frozen: FrozenTrial) -> TrialRecord | None:
        """Return the record of a trial that its driver did not see the end of: it was lost; None
        where it had no whole configuration."""
        config = trial.config or self._config_of_params(frozen.params)
        if config is None or frozen.state is TrialState.WAITING:
            return None
        lost = Lost(detail="the driver ended while the trial ran")
        return ended_unseen(trial, config, lost, definition=self.definition, known=self.ledger.all)

    def _left(self) -> Iterator[TrialRecord]:
        """Yield what the last workers left on disk and is not known already."""
        settled = settled_attempts(self.ledger.all)
        for file in outcome_files(self._spool.path.parent):
            left = record_left(
                file, definition=self.definition, study=self.identity, known=self.ledger.all
            )
            if left is not None and left.attempt_id not in settled:
                yield left

    def _config_of_params(self, params: Mapping[str, Any]) -> TrialConfig | None:
        """Return the configuration of a trial that never began; None where it is not whole."""
        space = self.definition.space
        try:
            return space.config(params) if params.keys() >= space.dimensions.keys() else None
        except InputError:
            return None
