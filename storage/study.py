"""A study that this process drives alone: opened, asked, told, and recovered after a crash.

Everything is written in transactions that first see that the study is still this driver's. A result
reaches the spool first, then the database, where its trial is still the attempt that it is of;
whatever else became of the trial, the result is kept.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.storage import codec, database, directory
from qlora_sweep.storage.database import Storage, faults, retried
from qlora_sweep.storage.definition import (
    StudyDefinition,
    UnreadableStudy,
    check_name,
    differences,
    step_differences,
)
from qlora_sweep.storage.files import refuse_public, sweep_temporary
from qlora_sweep.storage.lease import open_leased
from qlora_sweep.storage.ledger import TrialLedger
from qlora_sweep.storage.reading import identity_in, refusal
from qlora_sweep.storage.records import (
    NEIGHBOUR,
    SEARCH,
    Attempt,
    Lost,
    OutOfMemory,
    RunKind,
    TrialRecord,
    moment_now,
)
from qlora_sweep.storage.soundness import Soundness, left_out_words
from qlora_sweep.storage.urls import DatabaseUrl, parse_url

T = TypeVar("T")

_OPEN = (TrialState.RUNNING, TrialState.WAITING)
_OF_A_RUN = {"definition", "identity", "driver", "mark", "format", "runs"}
"""Attributes of a study that each run of a driver writes when it begins."""


def open_study(
    name: str,
    *,
    url: str,
    definition: StudyDefinition,
    sampler: optuna.samplers.BaseSampler,
    environment: Mapping[str, Any],
    home: Path,
    warn: Callable[[str], None] = lambda _: None,
) -> OpenStudy:
    """Create or resume a study and take its lease; close it, or use it in a ``with``.

    Args:
        name: becomes a directory's name, so letters, digits, dots, dashes and underscores.
        url: ``sqlite:///path`` or ``postgresql://user:password@host/database``.
        definition: must agree with the stored one in space, model and target.
        sampler: proposes the next trial.
        environment: fingerprint of this run, kept beside those of earlier runs.
        home: the directory of all studies' files (``runs``).
        warn: told, in words, what becomes of results that cannot be told or written.

    Raises:
        InputError: the name or URL is not right, the stored study is about something else, or the
            study's directory holds the files of one that this database does not have. Nothing was
            created or changed.
        EnvironmentFault: the database is not to be had, or another driver has the study.
    """
    check_name(name)
    where = parse_url(url)
    folder = home / name
    refuse_public(folder)
    if directory.read_identity(folder) is not None:
        words = directory.stranger_words(folder, name, identity_in(where, name), str(where))
        if words:
            raise InputError(words)
    fresh = codec.StudyAttributes(
        definition=definition,
        identity=uuid.uuid4().hex,
        driver=uuid.uuid4().hex,
        mark=uuid.uuid4().hex,
        format=codec.FORMAT_WRITTEN,
        runs=[codec.Run(started_at=moment_now(), environment=dict(environment))],
    )
    named = f"study '{name}' in {where}"
    with ExitStack() as closing:
        storage = open_leased(where, name, closing.callback)
        with faults(where):
            study, stored = retried(lambda: _begin(name, storage, sampler, fresh, named))
        known = _continued(stored, fresh)
        try:
            ours = directory.StudyFile(
                identity=known.identity,
                name=name,
                database=str(where),
                definition=definition,
                environment=dict(environment),
            )
            directory.note_identity(folder, ours)
        except EnvironmentFault as fault:
            warn(f"{fault}; the database goes on without it")
        sweep_temporary(folder)
        records: Iterable[TrialRecord] = ()
        if stored is not None:
            records = stored.records
            for words in _resume_warnings(stored, definition, named):
                warn(words)
        soundness = Soundness.of(definition)
        return OpenStudy(
            study=study,
            definition=definition,
            was_resumed=stored is not None,
            environment=environment,
            ledger=TrialLedger(records),
            known=known,
            soundness=soundness,
            spool=directory.Spool(folder / directory.SPOOL, known.identity, soundness),
            _storage=storage,
            _marks={fresh.mark},
            _url=where,
            _closing=closing.pop_all(),
            _warn=warn,
        )


def _begin(
    name: str,
    storage: Storage,
    sampler: optuna.samplers.BaseSampler,
    fresh: codec.StudyAttributes,
    named: str,
) -> tuple[optuna.Study, codec.StoredStudy | None]:
    """Create a study, or see that it can be resumed, all in one transaction; return it and what was
    stored of it, None of a new one.

    Args:
        name: of the study.
        storage: of its database, leased.
        sampler: proposes the next trial.
        fresh: its attributes as those of a new study.
        named: it and the database, for messages.
    """
    objectives = fresh.definition.space.objectives
    with storage.together():
        stored = None
        # Where Optuna looks in vain it gives up the transaction.
        if name in {study.study_name for study in storage.get_all_studies()}:
            stored = _checked(named, name, storage, fresh.definition)
            storage.left_out = frozenset(stored.left_out)
        else:
            directions = codec.directions(objectives)
            optuna.create_study(study_name=name, storage=storage, directions=directions)
        study = _load(name, storage, sampler)
        values = _continued(stored, fresh).model_dump(mode="json", include=_OF_A_RUN)
        for key, value in values.items():
            study.set_user_attr(key, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names(list(objectives))
        return study, stored


def _continued(
    stored: codec.StoredStudy | None, fresh: codec.StudyAttributes
) -> codec.StudyAttributes:
    """Return a study's attributes as its new driver keeps them."""
    if stored is None:
        return fresh
    # An earlier attempt may have written the run before its connection failed.
    earlier = [run for run in stored.attributes.runs if run not in fresh.runs]
    changes = {key: getattr(fresh, key) for key in _OF_A_RUN - {"identity"}}
    return replaced(stored.attributes, **(changes | {"runs": earlier + fresh.runs}))


def _resume_warnings(
    stored: codec.StoredStudy, definition: StudyDefinition, named: str
) -> Iterator[str]:
    """Yield what a person must know of a study that is resumed."""
    changed = step_differences(stored.attributes.definition, definition)
    if changed:
        steps = f"was started with other steps ({', '.join(changed)})"
        yield f"{named} {steps}: its trials may not compare with earlier ones"
    yield from left_out_words(stored.left_out, of=named)


def _load(name: str, storage: Storage, sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    """Return a study anew from the database."""
    pruner = optuna.pruners.NopPruner()
    return optuna.load_study(study_name=name, storage=storage, sampler=sampler, pruner=pruner)


def _checked(
    named: str, name: str, storage: Storage, definition: StudyDefinition
) -> codec.StoredStudy:
    """Return what is stored. Raises `InputError` where the study cannot be gone on with."""
    attributes = storage.get_study_user_attrs(storage.get_study_id_from_name(name))
    if "definition" not in attributes:
        raise InputError(f"{named} is not one of sweep's; choose another --study")
    stored = codec.read_stored(name, attributes, storage.trials_of(name))
    if isinstance(stored, UnreadableStudy):
        raise refusal(stored)
    lines = differences(stored.attributes.definition, definition)
    if lines:
        raise InputError(
            f"{named} was started with another definition:\n  "
            + "\n  ".join(lines)
            + "\nStart a new study with --study and another name, or go on as it was started."
        )
    return stored


def _gpus_of(record: TrialRecord) -> int:
    """Return how many GPUs a trial took while it ran."""
    return record.config.data_parallel or 1


@dataclass(eq=False)
class OpenStudy(AbstractContextManager["OpenStudy"]):
    """A study that this process alone drives.

    Every method may raise `EnvironmentFault`, for a database that stays away or another driver.
    """

    study: optuna.Study
    definition: StudyDefinition
    was_resumed: bool
    environment: Mapping[str, Any]
    """Fingerprint of this run."""
    ledger: TrialLedger
    """Every finished trial, from memory: no other process writes."""
    known: codec.StudyAttributes
    """What is stored of the study itself, from memory."""
    soundness: Soundness
    """What any result is held against."""
    spool: directory.Spool
    """What is kept on disk alone, where the database stays away: a resume tells it."""
    _storage: Storage
    _marks: set[str]
    """Of which the database has one: that of the newest transaction, and those of failed ones,
    which may have gone through unheard."""
    _url: DatabaseUrl
    _closing: ExitStack
    _warn: Callable[[str], None]
    _open: dict[int, TrialRecord | None] = field(default_factory=dict, init=False)
    """What was asked for and not told, by number: once it began as lost, until it is."""
    _is_stale: bool = field(default=False, init=False)
    """Whether Optuna may hold trials of a transaction that failed."""
    gpus: int = field(default=1, init=False)
    """That trials run on at a time, in this run."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up the lease and the connections. Idempotent."""
        self._closing.close()

    @property
    def name(self) -> str:
        """What the study is called."""
        return self.study.study_name

    def records(self) -> tuple[TrialRecord, ...]:
        """Return every finished trial's record, by number.

        They are the search's; what measured its winners again are the `confirmations`.
        """
        return self.ledger.records

    def confirmations(self) -> tuple[TrialRecord, ...]:
        """Return every finished run that measured a winner again, by number."""
        return self.ledger.confirmations

    def recover(self) -> tuple[TrialConfig, ...]:
        """Close what an earlier driver left open, and return the configurations to try again.

        Call it before the first `ask`. A trial that ended but was not told is told from the spool,
        or from what its worker left on disk. One that was running is recorded as lost: the lease
        says that it no longer runs. What was lost, crashed or timed out is returned until it
        was tried three times. A result whose trial is another by now is kept in the spool and said.
        """

        def close_never_begun() -> None:
            # Read anew each time: an earlier attempt may have committed and lost its connection.
            for trial in self._storage.trials_of(self.name, *_OPEN):
                if codec.begun_of(trial) is None:
                    self._close(trial)

        settled = directory.settled_attempts(self.ledger.all)
        spooled = self.spool.read(known=settled)
        ended = {record.attempt_id: record for record in spooled.records}
        begun = map(codec.begun_of, self._write(lambda: self._storage.trials_of(self.name, *_OPEN)))
        lost = {record.attempt_id: record for record in begun if record is not None}
        for left in directory.left_outcomes(self.spool.path.parent, study=self.known.identity):
            attempt = left.attempt.id
            if attempt in settled or attempt in ended:
                continue
            record = self._record_of(left, lost.get(attempt))
            if record is not None:
                ended[attempt] = record
                if attempt not in lost and record.verdict in directory.WORTH_KEEPING:
                    # Before the worker's next outcome replaces it.
                    self.spool.append(record)
        self._write(close_never_begun)
        for record in lost.values():
            known = ended.get(record.attempt_id, record)
            record = known if known.config == record.config else record
            # The time of a lost trial was paid for, too.
            if self._has_stored(record, spent_seconds=record.wall_seconds, gpus=_gpus_of(record)):
                self.ledger.add(record)
        for words in spooled.problems:
            self._warn(words)
        kept = directory.kept_among(self.spool.read().records, self.ledger.all)
        if kept:
            self._warn(directory.kept_words(kept, study=self.name, path=self.spool.path))
        return self.ledger.to_retry()

    def _record_of(self, left: directory.Left, begun: TrialRecord | None) -> TrialRecord | None:
        """Return what a worker left as the record of its attempt, whatever became of its trial.

        None where it is of another configuration than the trial, or where memory ran out as another
        process had it. Its seconds are those that the worker measured.
        """
        outcome = self.soundness.counted(left.config, left.outcome)
        is_neighbours = isinstance(outcome, OutOfMemory) and NEIGHBOUR in outcome.flags
        record = begun or self._begun(left.attempt, left.config)
        if is_neighbours or record.config != left.config:
            return None
        record = replaced(record, outcome=outcome)
        measured = record.measurement
        if measured is None:
            return record
        seconds = measured.setup_seconds + measured.measured_seconds
        return replaced(record, device_seconds=seconds, wall_seconds=seconds)

    def _begun(self, attempt: Attempt, config: TrialConfig) -> TrialRecord:
        """Return the record of a trial that begins: as lost, until more is known."""
        run_kind = RunKind.model_validate(attempt.model_dump(include=set(RunKind.model_fields)))
        return TrialRecord(
            number=attempt.number,
            config=config,
            outcome=Lost(detail="the driver ended while the trial ran"),
            is_baseline=config == self.definition.space.baseline_config(),
            attempt=self.ledger.attempts(config, run_kind) + 1,
            attempt_id=attempt.id,
            started_at=attempt.started_at,
            **run_kind.model_dump(),
        )

    def lacking(self, spooled: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
        """Return which results of a spool of this study it has not, and will not tell by itself."""
        running = self._write(lambda: self._storage.trials_of(self.name, TrialState.RUNNING))
        begun = {record.attempt_id for trial in running if (record := codec.begun_of(trial))}
        ended = (record for record in spooled if record.attempt_id not in begun)
        return directory.kept_among(ended, self.ledger.all)

    def ask(
        self,
        distributions: Mapping[str, BaseDistribution],
        *,
        params: Mapping[str, Any] | None = None,
    ) -> Trial:
        """Return the next trial, with ``params`` where given and the sampler's choice elsewhere."""

        def create() -> Trial:
            # An earlier attempt may have committed before its connection failed.
            for trial in self._storage.trials_of(self.name, TrialState.RUNNING):
                if trial.number not in self._open and codec.RECORD not in trial.user_attrs:
                    self._close(trial)
            if params is not None:
                self.study.enqueue_trial(dict(params))
                return self.study.ask(dict(distributions))
            return self.study.ask()

        def suggest() -> Trial:
            # Anew after a transaction that failed: a trial believes to have what it got there.
            given = trial
            if trial.study is not self.study:
                # Optuna's cache knows no trial that it neither made nor read.
                self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
                given = Trial(self.study, self._id(trial.number))
            for name, distribution in distributions.items():
                given._suggest(name, distribution)
            return given

        trial = self._write(create)
        self._open[trial.number] = None
        if params is not None or not distributions:
            return trial
        # Chosen before the database is held, as that may take seconds.
        with faults(self._url):
            retried(lambda: trial.relative_params)
        return self._write(suggest)

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
        trial = self.ask(distributions, params=params)
        record = replaced(record, number=trial.number)
        self._write(lambda: self._store(record, attempt=None))
        del self._open[trial.number]
        self.ledger.add(record)

    def begin(
        self, trial: Trial, config: TrialConfig, started_at: str, *, run_kind: RunKind = SEARCH
    ) -> Attempt:
        """Store the configuration before it runs, so that a driver's death loses only the run.

        Returns:
            This attempt, which its result must name: a number alone may come to stand for another
            configuration, in a database that was restored from a copy.
        """
        known = {"id": uuid.uuid4().hex, "study": self.known.identity, "number": trial.number}
        begun = Attempt(**known, started_at=started_at, **run_kind.model_dump())
        record = self._begun(begun, config)
        self._open[trial.number] = record
        values = record.model_dump(mode="json")
        # Where somebody closed or deleted it already its result is kept, and that is said then.
        put = self._storage.set_trial_user_attr
        with suppress(UpdateFinishedTrialError, KeyError):
            self._write(lambda: put(self._id(trial.number), codec.RECORD, values))
        return begun

    def tell(self, trial: Trial, record: TrialRecord, *, spent_seconds: float = 0.0) -> TrialRecord:
        """Keep a result of a trial that `ask` returned: spooled and fsynced first, then told.

        Args:
            trial: that it is of.
            record: the result.
            spent_seconds: of the driver, since what was told before; see `add_wall_seconds`.

        Returns:
            What the study has of the trial now: the record, or one that says that the result is in
            the spool alone, as somebody closed or deleted the trial in the database meanwhile.

        Raises:
            EnvironmentFault: the database stays away, or another driver took over. The result
                is in the spool, or the message says that it is nowhere.
        """
        assert record.number == trial.number
        self._open.pop(record.number, None)
        result = f"the result of trial {record.number} ({record.verdict})"
        unspooled = ""
        try:
            self.spool.append(record)
        except EnvironmentFault as fault:
            # A healthy database outweighs what is in the way of that.
            unspooled = str(fault)
        try:
            is_told = self._has_stored(record, spent_seconds=spent_seconds, gpus=self.gpus)
            if not is_told:
                self.add_wall_seconds(spent_seconds)
            if unspooled and not is_told:
                raise EnvironmentFault(f"somebody closed trial {record.number} in {self._url}")
        except EnvironmentFault as fault:
            where = f"is safe in {self.spool.path}: a resume tells it, or says how to take it over"
            if unspooled:
                where = f"is nowhere: it runs again ({unspooled})"
            raise type(fault)(f"{fault}; {result} {where}") from fault
        if unspooled:
            self._warn(f"{unspooled}; {result} is in the database alone")
        if not is_told:
            self._warn(directory.kept_words([record], study=self.name, path=self.spool.path))
            lost = Lost(
                detail=f"it ended as {record.verdict}, but somebody closed the trial in the "
                f"database: the result is kept in {self.spool.path} alone",
                is_kept=True,
            )
            record = replaced(record, outcome=lost)
            # The database is not as it was left: perhaps a copy was written over it.
            self._is_stale = True
        self.ledger.add(record)
        return record

    def abandon(self, *, besides: Collection[int] = ()) -> None:
        """Close what was begun and never ran: nothing can be lost, and no attempt was made.

        Where the database does not hear of it, the spool does, for a resume to know that its driver
        was not killed by it.

        Args:
            besides: numbers of the trials that do run.
        """

        def close() -> None:
            for trial in self._storage.trials_of(self.name, TrialState.RUNNING):
                if trial.number not in besides:
                    self._close(trial)

        never_ran = {n: record for n, record in self._open.items() if n not in besides}
        try:
            self._write(close)
        except BaseException:
            lost = Lost(detail="interrupted before it ran", is_interrupted=True)
            for record in filter(None, never_ran.values()):
                with suppress(EnvironmentFault):
                    self.spool.append(replaced(record, outcome=lost))
            raise
        for number in never_ran:
            del self._open[number]

    def add_wall_seconds(self, seconds: float) -> None:
        """Add to the driver's time over all runs of the study, and to what is paid for."""
        self.note(**self._with_seconds(seconds, gpus=self.gpus))

    def _with_seconds(self, seconds: float, *, gpus: int) -> dict[str, float]:
        """Return the study's times with so many more seconds on so many GPUs."""
        return {
            "wall_seconds": self.known.wall_seconds + seconds,
            "gpu_seconds": self.known.gpu_seconds + seconds * gpus,
        }

    def note(self, **attributes: Any) -> None:
        """Keep attributes of the study in plain JSON values, all in one transaction."""

        def write() -> None:
            for key, value in attributes.items():
                self.study.set_user_attr(key, value)

        self._write(write)
        self.known = replaced(self.known, **attributes)

    def _close(self, trial: FrozenTrial) -> None:
        """Close a trial that never ran."""
        self._storage.set_trial_user_attr(trial._trial_id, codec.RECORD, None)
        self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)

    def _id(self, number: int) -> int:
        """Return the database's number of a trial, in a transaction that is ours. Raises `KeyError`
        where it is gone."""
        study = self.study._study_id
        return self._storage.get_trial_id_from_study_id_trial_number(study, number)

    def _write(self, action: Callable[[], T]) -> T:
        """Do something in one transaction, all of it or nothing, where the study is ours.

        Args:
            action: may be repeated, also after it was committed.
        """

        mark = uuid.uuid4().hex

        def attempt() -> T:
            with self._ours(mark):
                return action()

        with faults(self._url):
            done = retried(attempt, more_seconds=database.RESTART_SECONDS)
        self._marks = {mark}
        return done

    @contextmanager
    def _ours(self, mark: str) -> Iterator[None]:
        """Make one transaction that fails where the study is gone, somebody else drove it, or an
        older copy was put in its place.

        Args:
            mark: of the transaction, which may be repeated.
        """
        with self._storage.together():
            named = f"study '{self.name}'"
            try:
                number = self._storage.get_study_id_from_name(self.name)
                attributes = self._storage.get_study_user_attrs(number)
            except KeyError:
                raise EnvironmentFault(f"{named} was deleted from {self._url}") from None
            why = ""
            if attributes.get("driver") != self.known.driver:
                why = "another driver took it over, or a copy was put in its place"
            elif attributes.get("mark") not in self._marks:
                why = "an older copy of the database was put in its place"
            if why:
                lost = f"{named} in {self._url} is no longer driven from here"
                raise EnvironmentFault(f"{lost}: {why}; the same command resumes it")
            if self._is_stale:
                self.study = _load(self.name, self._storage, self.study.sampler)
            self._is_stale = True
            self._marks.add(mark)
            yield
            self._storage.set_study_user_attr(number, "mark", mark)
        self._is_stale = False

    def _has_stored(self, record: TrialRecord, *, spent_seconds: float, gpus: int) -> bool:
        """Write a result, and the seconds that it took; return whether the database has it."""
        spent = self._with_seconds(spent_seconds, gpus=gpus)

        def store() -> bool:
            is_stored = self._store(record, attempt=record.attempt_id)
            if is_stored:
                # In the same transaction: a driver may be killed behind each.
                for key, value in spent.items():
                    self.study.set_user_attr(key, value)
            return is_stored

        try:
            is_stored = self._write(store)
        except KeyError:
            return False
        if is_stored:
            self.known = replaced(self.known, **spent)
        return is_stored

    def _store(self, record: TrialRecord, *, attempt: str | None) -> bool:
        """Write a result, the state last, where its trial is open and was begun as an attempt;
        return whether the database has it. Raises `KeyError` where the trial is gone."""
        trial_id = self._id(record.number)
        stored = self._storage.get_trial(trial_id)
        if stored.state.is_finished():
            # By this very result, which may have gone through unheard, or by somebody else.
            there = codec.record_of(stored)
            kind = (record.attempt_id, record.verdict)
            return there is not None and (there.attempt_id, there.verdict) == kind
        begun = codec.begun_of(stored)
        if (None if begun is None else begun.attempt_id) != attempt:
            return False
        result = codec.to_optuna(
            record,
            objectives=self.definition.space.objectives,
            budget_bytes=self.definition.target.budget_bytes,
        )
        trial = Trial(self.study, trial_id)
        for key, value in result.attributes.items():
            trial.set_user_attr(key, value)
        if codec.CONSTRAINT not in stored.constraints:
            trial.set_constraint(codec.CONSTRAINT, result.violation)
        if result.intermediate is not None:
            step, value = result.intermediate
            trial.report(value, step)
        self.study.tell(trial, values=result.values, state=result.state)
        return True
