"""Owns a study that this process drives alone: opened, asked, told, and recovered after a crash.

A result reaches the spool first, then the database. Knows nothing of how trials run or of what is
worth trying; looking at a study without driving it is `reading`'s.
"""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.trial import FrozenTrial, Trial, TrialState

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault, InputError, quote
from storage import mapping
from storage.database import PATIENCE, Patience, close, faults, open_for_writing, patiently
from storage.definition import StudyDefinition, differences, names_cost
from storage.lease import Lease, lease_for
from storage.ledger import Ledger
from storage.reading import DEFINITION, ENDED, IDENTITY, RUNS, WALL_SECONDS, understood
from storage.records import SEARCH, Errand, Lost, TrialRecord
from storage.recovery import Spool, attempts
from storage.sampler_view import SearchStorage
from storage.stored import read_stored_trials
from storage.urls import DatabaseUrl, parse_url

T = TypeVar("T")

NAME_MAX = 100
NAME_BYTES_MAX = 200
"""A file system's names end at 255 bytes, and the lock's begins with the database's."""

_NAME = re.compile(rf"[^\W_][\w.-]{{0,{NAME_MAX - 1}}}")


def open_study(
    name: str,
    *,
    url: str,
    definition: StudyDefinition,
    sampler: optuna.samplers.BaseSampler,
    environment: Mapping[str, Any],
    home: Path,
    patience: Patience = PATIENCE,
) -> OpenStudy:
    """Create or resume a study and take its lease; close it, or use it in a ``with``.

    Args:
        name: becomes a directory's name, so letters, digits, dots, dashes and underscores.
        url: ``sqlite:///path`` or ``postgresql://user:password@host/database``.
        definition: must agree with the stored one in space, model and target.
        sampler: proposes the next trial.
        environment: fingerprint of this run, kept beside those of earlier runs.
        home: the directory of all studies' files (``runs``).
        patience: how long a database that is locked or away is waited for.

    Raises:
        InputError: the name or URL is not right, or the stored study is about something else.
        EnvironmentFault: the database is not to be had, or another driver has the study.
    """
    if not _NAME.fullmatch(name) or len(name.encode()) > NAME_BYTES_MAX:
        raise InputError(
            f"study name must be at most {NAME_MAX} letters, digits, '.', '_' and '-', "
            f"got {quote(name)}"
        )
    database = parse_url(url)
    with ExitStack() as undo:
        storage = open_for_writing(database)
        undo.callback(close, storage)
        lease = lease_for(database, name)
        undo.callback(lease.release)
        with faults(database), understood(name):
            lease.acquire()
            create = partial(
                optuna.create_study,
                study_name=name,
                storage=storage,
                sampler=sampler,
                pruner=optuna.pruners.NopPruner(),
                directions=mapping.directions(definition.space.objectives),
                load_if_exists=True,
            )
            # Other drivers may be writing into the same file: their locks pass.
            study = patiently(create, patience=patience)
            was_resumed = _check_agreement(study, definition, database)
            note = partial(_note_run, study, definition, environment)
            identity = patiently(note, patience=patience)
            spool = Spool(home / name / "spool.jsonl", identity)
            opened = OpenStudy(
                study,
                definition,
                was_resumed,
                environment,
                storage,
                database,
                lease,
                spool,
                patience,
            )
        undo.pop_all()
    return opened


def _check_agreement(study: optuna.Study, definition: StudyDefinition, url: DatabaseUrl) -> bool:
    """Return whether the study was there before; raise where it is about something else."""
    stored, named = study.user_attrs.get(DEFINITION), f"study '{study.study_name}' in {url}"
    if stored is None:
        if study.get_trials(deepcopy=False):
            raise InputError(f"{named} is not one of sweep's; choose another --study")
        return False
    if names_cost(stored):
        # Its trials' values are dollars, smaller the better: speeds cannot be told beside them.
        raise InputError(
            f"{named} was started with the objective cost, which is no objective any more; it can "
            "still be read, but not gone on with: start a new study with --study and another name"
        )
    lines = differences(StudyDefinition.model_validate(stored), definition)
    if lines:
        raise InputError(
            f"{named} was started with another definition:\n  "
            + "\n  ".join(lines)
            + "\nStart a new study with --study and another name, or go on as it was started."
        )
    return True


def _note_run(
    study: optuna.Study, definition: StudyDefinition, environment: Mapping[str, Any]
) -> str:
    """Store what this run is about and on what it runs; return the study's identity.

    Safe to repeat after a failure: the run itself is noted last.
    """
    stored = study.user_attrs
    identity = str(stored.get(IDENTITY) or uuid.uuid4().hex)
    run = {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": dict(environment),
    }
    study.set_user_attr(IDENTITY, identity)
    study.set_user_attr(DEFINITION, definition.model_dump(mode="json"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.set_metric_names(list(definition.space.objectives))
    study.set_user_attr(RUNS, [*stored.get(RUNS, ()), run])
    return identity


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
    ledger: Ledger = field(default_factory=Ledger, init=False)
    """Every finished trial, from memory: nobody else writes."""

    def __post_init__(self) -> None:
        self._reload()

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

        Call it before the first `ask`. A trial that ended but was not told is told from the spool.
        One that was running is recorded as lost: the lease says that nobody runs it any more. What
        was lost, crashed or timed out is returned until it was tried three times.
        """
        self._patiently(self._empty_queue)
        spooled = {record.number: record for record in self._spool.read()}
        for frozen in self._patiently(lambda: self._trials(TrialState.RUNNING)):
            record = spooled.get(frozen.number) or self._lost(frozen)
            if record is None:
                self._patiently(partial(self._close_unbegun, frozen.number))
            else:
                self._write(Trial(self.study, self._patiently(partial(self._id, frozen))), record)
        return self.ledger.to_retry()

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
        number = len(self._patiently(lambda: self.study.get_trials(deepcopy=False)))
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
        # Not tried again where the database is away: a transaction may have gone through unheard.
        with faults(self._url):
            self.study.add_trial(frozen)
        self.ledger.add(numbered)

    def begin(
        self, trial: Trial, config: TrialConfig, started_at: str, *, errand: Errand = SEARCH
    ) -> str:
        """Store the configuration before it runs, so that a driver's death loses only the run.

        Returns:
            The identity of this attempt, which its result must name: a number alone may come to
            stand for another configuration, in a database that was restored from a copy.
        """
        identity = uuid.uuid4().hex

        def attempt() -> None:
            trial.set_user_attr(mapping.ATTEMPT, identity)
            trial.set_user_attr(mapping.STARTED_AT, started_at)
            if errand != SEARCH:
                trial.set_user_attr(mapping.PURPOSE, errand.model_dump(mode="json"))
            trial.set_user_attr(mapping.CONFIG, config.model_dump(mode="json"))

        self._patiently(attempt)
        return identity

    def tell(self, trial: Trial, record: TrialRecord) -> None:
        """Keep a result of a trial that `ask` returned: spooled and fsynced first, then told.

        Raises:
            EnvironmentFault: the database stays away, or another driver took over. The result
                is in the spool.
        """
        if record.number != trial.number:
            raise ValueError(
                f"a record of trial {record.number} cannot be told for trial {trial.number}"
            )
        self._spool.append(record)
        try:
            self._hold()
            self._write(trial, record)
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

    def wall_seconds(self) -> float:
        """Return the driver's time over all runs of the study so far."""
        return float(self._patiently(lambda: self.study.user_attrs).get(WALL_SECONDS, 0.0))

    def note_end(self, values: Mapping[str, Any]) -> None:
        """Keep why the search ended, in plain JSON values; an earlier run's gives way."""
        self._patiently(lambda: self.study.set_user_attr(ENDED, dict(values)))

    def add_wall_seconds(self, seconds: float) -> None:
        """Add to the driver's time over all runs of the study."""
        total = self.wall_seconds() + seconds
        self._patiently(lambda: self.study.set_user_attr(WALL_SECONDS, total))

    def _reload(self) -> None:
        study_id = self._storage.get_study_id_from_name(self.study.study_name)
        self.ledger = Ledger(read_stored_trials(self._storage.engine, study_id).records)
        self._storage.record_of = self._known

    def _known(self, number: int) -> TrialRecord | None:
        return self.ledger.record(number)

    def _write(self, trial: Trial, record: TrialRecord) -> None:
        self.ledger.add(self._patiently(lambda: self._store(trial, record)))

    def _store(self, trial: Trial, record: TrialRecord) -> TrialRecord:
        """Write what is not there yet, the state last; return the record that storage then has."""
        stored = self._storage.get_trial(self._id(trial))
        if stored.state.is_finished():
            return mapping.record_of(stored) or record
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
        self.study.tell(trial, values=result.values, state=result.state)
        return record

    def _lost(self, frozen: FrozenTrial) -> TrialRecord | None:
        """Return an orphan's record; None where it had no whole configuration yet."""
        config = mapping.config_of(frozen) or self._config_of_params(frozen.params)
        if config is None:
            return None
        errand = mapping.errand_of(frozen)
        return TrialRecord(
            number=frozen.number,
            config=config,
            outcome=Lost(detail="the driver ended while the trial ran"),
            attempt=attempts(self.on_errand(errand), config) + 1,
            started_at=frozen.user_attrs.get(mapping.STARTED_AT),
            **errand.model_dump(),
        )

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

    def _id(self, trial: Trial | FrozenTrial) -> int:
        study_id = self._storage.get_study_id_from_name(self.study.study_name)
        return self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)

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
