"""Whatever happens to a study in whatever order, what was measured is there, once, and is right.

Drivers are studies opened in this process; one that dies lets go of its lease and says nothing, as
the system does for a process that was killed. The model knows what was measured and by which run,
the machine looks at the disk after every step.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import optuna
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from optuna.trial import Trial, TrialState

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.storage import lease
from qlora_sweep.storage.database import close, open_for_reading, open_for_writing
from qlora_sweep.storage.directory import OUTCOME, OutcomeFile
from qlora_sweep.storage.reading import read_study
from qlora_sweep.storage.records import Attempt, Crashed, Lost, Outcome, TrialRecord
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.storage.urls import parse_url
from tests.storage.builders import BATCHES, DISTRIBUTIONS, agreeing, fits, open_it

NAME = "study"
STARTED = "2025-01-01T00:00:00+00:00"


@dataclass
class Run:
    """What the worker did once."""

    number: int
    batch: int
    attempt: Attempt
    is_measured: bool = False
    is_given_up: bool = False
    """Whether the driver said that its result could be kept nowhere: disk and database failed."""

    @property
    def speed(self) -> float:
        """Of which no two runs have the same."""
        return 1000.0 + self.number


@dataclass
class Driver:
    """A study that is open, and the trial that it is running."""

    study: OpenStudy
    trial: Trial | None = None
    run: Run | None = None


@dataclass
class Model:
    """What the world knows."""

    runs: list[Run] = field(default_factory=list)
    is_disk_full: bool = False
    is_database_away: bool = False
    copy: bytes | None = None


class Study(RuleBasedStateMachine):
    """One study, its drivers, and everything that befalls them."""

    def __init__(self) -> None:
        super().__init__()
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.directory = Path(tempfile.mkdtemp(prefix="sweep-states-", dir=memory))
        self.home = self.directory / "runs"
        self.home.mkdir()
        self.database = self.home / "sweep.db"
        self.url = f"sqlite:///{self.database}"
        with _storage(self.url):
            pass
        self.model = Model()
        self.driver: Driver | None = None

    def teardown(self) -> None:
        self.model.is_disk_full = False
        if self.driver is not None:
            self.driver.study.close()
        shutil.rmtree(self.directory)

    # A driver's life.

    @precondition(lambda self: self.driver is None)
    @rule()
    def resume(self) -> None:
        """Open the study and close what was left; what can be told now is told."""
        model = self.model
        # What stands beside no study is another's, and not to be gone on with.
        is_strange = not self._is_there() and bool(self._kept_text())
        try:
            with self._disk():
                study = open_it(self.url, self.home, name=NAME)
                try:
                    study.recover()
                except BaseException:
                    study.close()
                    raise
        except (EnvironmentFault, InputError):
            assert model.is_disk_full or model.is_database_away or is_strange
            return
        assert not is_strange, "a study was started anew beside the files of another"
        if model.is_database_away:
            # With nothing to say that there was one, a new one is what was asked for.
            study.close()
            self.database.unlink()
            return
        self.driver = Driver(study)
        assert not self._trials(TrialState.RUNNING, TrialState.WAITING)

    @precondition(lambda self: self.driver is not None)
    @rule()
    def second_driver(self) -> None:
        """It is refused for as long as the first one lives and has its database."""
        if self.model.is_database_away:
            return
        with (
            patch.object(lease, "_GRACE_SECONDS", 0.05),
            # Where somebody deleted the study, that is said before anybody's lease is looked at.
            pytest.raises(
                EnvironmentFault if self._is_there() else InputError,
                match="is driven by" if self._is_there() else "not there any more",
            ),
        ):
            open_it(self.url, self.home, name=NAME)

    @precondition(lambda self: self.driver is not None and self.driver.trial is None)
    @rule(batch=st.sampled_from(BATCHES))
    def ask(self, batch: int) -> None:
        """Begin a trial; a driver that cannot ends, as the command does."""
        driver = self._driver()
        with self._or_the_driver_ends():
            trial = driver.study.ask(DISTRIBUTIONS, params={"micro_batch_size": batch})
            attempt = driver.study.begin(trial, TrialConfig(micro_batch_size=batch), STARTED)
            driver.trial = trial
            driver.run = Run(len(self.model.runs) + 1, batch, attempt)
            self.model.runs.append(driver.run)

    @precondition(lambda self: self._is_running())
    @rule()
    def finish(self) -> None:
        """The worker measures, leaves that on disk, and the driver tells it."""
        driver = self._driver()
        assert driver.run is not None
        driver.run.is_measured = True
        self._leave(driver.run)
        self._tell(fits(driver.run.speed))

    @precondition(lambda self: self._is_running())
    @rule()
    def kill_worker(self) -> None:
        self._tell(Crashed(phase="measure", detail="killed"))

    @precondition(lambda self: self._is_running())
    @rule()
    def cancel(self) -> None:
        self._tell(Lost(detail="interrupted"))

    @precondition(lambda self: self.driver is not None)
    @rule()
    def kill_driver(self) -> None:
        """The system frees its lock and closes its files; nothing else is done."""
        study, self.driver = self._driver().study, None
        study.close()

    @precondition(lambda self: self._is_running())
    @rule()
    def kill_driver_before_it_hears(self) -> None:
        """The worker has measured and left that on disk; nobody is there to be told."""
        run = self._driver().run
        assert run is not None
        # Where the disk is full it is not left, and was never said to be kept.
        run.is_measured = self._leave(run)
        self.kill_driver()

    # What befalls the machine.

    @precondition(lambda self: not self.model.is_database_away)
    @rule()
    def lose_database(self) -> None:
        self.database.rename(self.directory / "away.db")
        self.model.is_database_away = True

    @precondition(lambda self: self.model.is_database_away)
    @rule()
    def regain_database(self) -> None:
        (self.directory / "away.db").rename(self.database)
        self.model.is_database_away = False

    @precondition(lambda self: not self.model.is_disk_full)
    @rule()
    def fill_disk(self) -> None:
        self.model.is_disk_full = True

    @precondition(lambda self: self.model.is_disk_full)
    @rule()
    def free_disk(self) -> None:
        self.model.is_disk_full = False

    @precondition(lambda self: not self.model.is_database_away)
    @rule()
    def copy_database(self) -> None:
        self.model.copy = self.database.read_bytes()

    @precondition(lambda self: self.model.copy is not None and not self.model.is_database_away)
    @rule()
    def restore_copy(self) -> None:
        """Put an old copy in the place of the database, as a person does: by another file."""
        assert self.model.copy is not None
        beside = self.directory / "copy.db"
        beside.write_bytes(self.model.copy)
        beside.replace(self.database)

    @precondition(lambda self: not self.model.is_database_away)
    @rule()
    def fail_from_outside(self) -> None:
        """Somebody closes a trial that runs, or that a dead driver left, by Optuna's own means."""
        for trial in self._trials(TrialState.RUNNING):
            with _storage(self.url) as storage:
                storage.set_trial_state_values(trial._trial_id, state=TrialState.FAIL)

    @precondition(lambda self: not self.model.is_database_away)
    @rule()
    def delete_study(self) -> None:
        """Somebody deletes the study by Optuna's own means; its results are theirs to lose."""
        if self._is_there():
            with _storage(self.url) as storage:
                storage.delete_study(storage.get_study_id_from_name(NAME))
        for run in self.model.runs:
            run.is_given_up = True

    # What always holds.

    @invariant()
    def what_was_measured_is_kept_once_and_right(self) -> None:
        if self.model.is_database_away:
            return
        stored = self._stored()
        kept = self._kept_text()
        for number, times in Counter(run.number for run, _ in stored).items():
            assert times == 1, f"run {number} is stored {times} times"
        for run, batch in stored:
            assert run.is_measured, f"{run} was never measured"
            assert run.batch == batch, f"{run} is stored as one of micro-batch {batch}"
        there = {run.number for run, _ in stored}
        for run in self.model.runs:
            if run.is_measured and not run.is_given_up and run.number not in there:
                assert str(run.speed) in kept, f"{run} was measured and is nowhere"

    def _stored(self) -> list[tuple[Run, int]]:
        """Return each measured run in the database with the micro-batch it is stored under."""
        connection = sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)
        try:
            rows = connection.execute(_RECORDS).fetchall()
        finally:
            connection.close()
        records = [json.loads(text) for (text,) in rows]
        return [
            (self._run_of(speed["tokens_per_second"]), record["config"]["micro_batch_size"])
            for record in records
            if (speed := record["outcome"].get("measurement")) is not None
        ]

    def _run_of(self, speed: float) -> Run:
        return self.model.runs[round(speed) - 1001]

    @precondition(lambda self: not self.model.is_database_away)
    @rule()
    def look(self) -> None:
        """Whoever looks meanwhile sees every record, or is told that there is no study."""
        try:
            records = read_study(NAME, url=self.url, home=self.home).records
        except InputError:
            records = ()
        seen = sum(record.measurement is not None for record in records)
        assert seen == len(self._stored())

    def _kept_text(self) -> str:
        """Return all that is in the study's files."""
        files = [path for path in (self.home / NAME).rglob("*") if path.is_file()]
        return "".join(path.read_text() for path in files)

    # How it is done.

    def _driver(self) -> Driver:
        assert self.driver is not None
        return self.driver

    def _is_running(self) -> bool:
        return self.driver is not None and self.driver.trial is not None

    def _is_there(self) -> bool:
        """Whether the database that is there has the study."""
        if self.model.is_database_away:
            return False
        connection = sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)
        try:
            return bool(connection.execute("SELECT 1 FROM studies").fetchall())
        finally:
            connection.close()

    def _tell(self, outcome: Outcome) -> None:
        driver = self._driver()
        trial, run = driver.trial, driver.run
        assert trial is not None
        assert run is not None
        driver.trial = driver.run = None
        record = _record(trial.number, run, outcome)
        try:
            with self._or_the_driver_ends():
                driver.study.tell(trial, record)
        finally:
            if self.driver is None and self.model.is_disk_full:
                # The message does not say that it is safe, and it is not.
                run.is_given_up = True

    @contextmanager
    def _or_the_driver_ends(self) -> Iterator[None]:
        try:
            with self._disk():
                yield
        except EnvironmentFault:
            self._driver().study.close()
            self.driver = None

    def _leave(self, run: Run) -> bool:
        """Leave a measurement on disk, as the worker does before it answers; False if it cannot."""
        file = OutcomeFile(self.home / NAME / OUTCOME)
        config = TrialConfig(micro_batch_size=run.batch)
        try:
            with self._disk():
                file.write(run.attempt, config, agreeing(fits(run.speed), config))
        except EnvironmentFault:
            return False
        return True

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Let no file grow inside where the disk is full."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.model.is_disk_full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def _trials(self, *states: TrialState) -> list[optuna.trial.FrozenTrial]:
        storage = open_for_reading(parse_url(self.url))
        assert storage is not None
        try:
            study_id = storage.get_study_id_from_name(NAME)
            return storage.get_all_trials(study_id, deepcopy=False, states=states)
        except KeyError:
            return []
        finally:
            close(storage)


def _record(number: int, run: Run, outcome: Outcome) -> TrialRecord:
    config = TrialConfig(micro_batch_size=run.batch)
    return TrialRecord(
        number=number,
        config=config,
        outcome=agreeing(outcome, config),
        attempt_id=run.attempt.id,
    )


@contextmanager
def _storage(url: str) -> Iterator[optuna.storages.RDBStorage]:
    storage = open_for_writing(parse_url(url))
    try:
        yield storage
    finally:
        close(storage)


_RECORDS = (
    "SELECT a.value_json FROM trial_user_attributes a JOIN trials t ON t.trial_id = a.trial_id "
    "WHERE a.key = 'record' AND t.state IN ('COMPLETE', 'PRUNED', 'FAIL')"
)

_SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.faults
@pytest.mark.timeout(600)
class TestAStudy(Study.TestCase):  # type: ignore[misc, valid-type, name-defined]
    """A few orders; the histories above are those that went wrong once."""

    settings = settings(_SETTINGS, max_examples=8, stateful_step_count=25)


@pytest.mark.faults
@pytest.mark.timeout(7200)
class TestAStudyAtLength(TestAStudy):  # type: ignore[misc, valid-type]
    """The same in many more orders."""

    settings = settings(_SETTINGS, max_examples=300, stateful_step_count=50)


HISTORIES = {
    "a stale line of the spool under the number of another trial": (
        "resume copy_database ask:1 finish kill_driver restore_copy resume ask:2 kill_driver resume"
    ),
    "a copy of the time when the trial ran": (
        "resume ask:1 copy_database finish kill_driver restore_copy resume ask:2 finish"
    ),
    "a copy put in the database's place while a trial runs": (
        "resume ask:1 finish copy_database ask:2 restore_copy finish resume ask:4 finish look"
    ),
    "a trial failed from outside while it runs": (
        "resume ask:1 fail_from_outside finish kill_driver resume look"
    ),
    "a trial failed from outside after its driver died": (
        "resume ask:1 lose_database finish regain_database fail_from_outside resume look"
    ),
    "the database away while a result comes": (
        "resume ask:1 lose_database finish resume regain_database look resume look"
    ),
    "a trial failed from outside, its result left by the worker, and another trial after it": (
        "resume ask:1 kill_driver_before_it_hears fail_from_outside resume ask:2 finish look"
    ),
    "a copy without the trial whose result was left by the worker, and another trial after it": (
        "resume copy_database ask:1 kill_driver_before_it_hears restore_copy resume ask:2 finish "
        "look kill_driver resume ask:4 finish look"
    ),
    "a result left by the worker that a full disk keeps from being spooled": (
        "resume ask:1 kill_driver_before_it_hears fail_from_outside fill_disk resume free_disk "
        "resume ask:2 finish look"
    ),
    "a disk that is full while a result comes, and a database that is healthy": (
        "resume ask:1 fill_disk finish free_disk resume look"
    ),
    "a driver killed between the measurement and its hearing of it": (
        "resume ask:1 kill_driver_before_it_hears resume look"
    ),
    "a study deleted while a trial runs": (
        "resume ask:1 finish ask:2 delete_study finish look resume look"
    ),
    "an empty copy put in the database's place": (
        "copy_database resume ask:1 finish kill_driver restore_copy resume look"
    ),
    "a worker killed, then the driver": (
        "resume ask:1 kill_worker ask:1 kill_driver resume ask:1 finish"
    ),
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_after_every_step_of_a_history_what_was_measured_is_kept(history: str) -> None:
    machine = Study()
    try:
        for step in history.split():
            name, _, batch = step.partition(":")
            if name == "resume" and machine.driver is not None:
                # It need not have ended by then.
                continue
            getattr(machine, name)(**({"batch": int(batch)} if batch else {}))
            machine.what_was_measured_is_kept_once_and_right()
    finally:
        machine.teardown()
