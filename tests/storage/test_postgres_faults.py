"""A PostgreSQL server that is silent, stopped, restarted or cut off, and who waits for it."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import sqlalchemy
from optuna.trial import Trial, TrialState

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault
from storage import database
from storage.reading import list_studies, read_study
from storage.records import TrialRecord
from storage.study import OpenStudy
from tests.storage import driver, postgres
from tests.storage.builders import (
    DISTRIBUTIONS,
    a_record,
    begun,
    let_go_of_the_lease,
    open_it,
    run_one,
)
from tests.storage.proxy import Proxy

ANSWER_SECONDS = 1.0


@pytest.fixture
def is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody wait for long."""
    monkeypatch.setattr(database, "_ANSWER_SECONDS", ANSWER_SECONDS)
    monkeypatch.setitem(database._CONNECT, "connect_timeout", 2)


@pytest.fixture
def direct(cluster: postgres.Cluster) -> str:
    """A new database's URL, past the proxy."""
    return cluster.new_database()


@pytest.fixture
def proxy(cluster: postgres.Cluster) -> Iterator[Proxy]:
    with Proxy(cluster.port) as proxy:
        yield proxy


@pytest.fixture
def url(direct: str, proxy: Proxy) -> str:
    return proxy.through(direct)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def soon(seconds: float, action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer


def states(study: OpenStudy) -> set[TrialState]:
    return {trial.state for trial in study.study.get_trials(deepcopy=False)}


@pytest.fixture(params=["link down", "server stopped"])
def silence(
    request: pytest.FixtureRequest, cluster: postgres.Cluster, proxy: Proxy
) -> Callable[[], AbstractContextManager[None]]:
    return proxy.silent if request.param == "link down" else cluster.stopped_in_its_tracks


def test_a_silent_server_is_an_error_in_time_and_loses_nothing(
    url: str, home: Path, silence: Callable[[], AbstractContextManager[None]], is_short: None
) -> None:
    with open_it(url, home) as study:
        trial = study.ask(DISTRIBUTIONS)
        record = begun(study, trial, a_record(trial.number))
        with (
            silence(),
            within(ANSWER_SECONDS + 5.0),
            pytest.raises(
                EnvironmentFault, match=r"(not answered|timeout expired).*safe in .*spool\.jsonl"
            ),
        ):
            study.tell(trial, record)
        run_one(study)
        assert study.recover() == ()
        assert [record.number for record in study.records()] == [0, 1]
        assert states(study) == {TrialState.COMPLETE}


def test_a_server_that_was_silent_for_a_moment_is_outlasted(
    url: str, home: Path, proxy: Proxy
) -> None:
    with open_it(url, home) as study:
        proxy.fall_silent()
        soon(1.0, proxy.pass_on)
        run_one(study)
        assert len(study.records()) == 1


@pytest.mark.faults
def test_connections_that_a_firewall_forgot_are_replaced_the_lease_too(
    url: str, home: Path, proxy: Proxy, is_short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_LASTING", {})
    with open_it(url, home) as study:
        run_one(study)
        # The server goes on believing in the session that has the lock.
        proxy.forget()
        run_one(study)
        assert [record.number for record in study.records()] == [0, 1]
        with pytest.raises(EnvironmentFault, match="is driven by"):
            open_it(url, home)


WAITS: dict[str, Callable[[OpenStudy, str, Path], object]] = {
    "a trial": lambda study, url, home: run_one(study),
    "a reader": lambda study, url, home: read_study("study", url=url, home=home),
    "opening": lambda study, url, home: open_it(url, home, name="other"),
}


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """What does as Ctrl-C does, by a signal that no test runner has plans for."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR1, interrupt)
    yield lambda: os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, previous)


def test_ctrl_c_ends_each_wait_at_once(
    url: str, home: Path, proxy: Proxy, ctrl_c: Callable[[], None]
) -> None:
    with open_it(url, home) as study:
        for waiting, wait in WAITS.items():
            with proxy.silent(), within(1.5):
                soon(0.3, ctrl_c)
                with pytest.raises(KeyboardInterrupt):
                    pytest.fail(f"{waiting}: {wait(study, url, home)}")
            # All works again that was given up.
            run_one(study)


def test_a_reader_of_a_silent_server_says_so_and_ends(
    url: str, home: Path, proxy: Proxy, is_short: None
) -> None:
    open_it(url, home).close()
    silent = pytest.raises(EnvironmentFault, match=r"not answered|timeout expired")
    with proxy.silent(), within(ANSWER_SECONDS + 5.0), silent:
        list_studies(url, home)


@pytest.mark.parametrize(
    ("name", "password", "words"),
    [
        ("postgres", "wrong", "authentication failed.*: check the user and the password"),
        ("nowhere", postgres.PASSWORD, "does not exist: create it first"),
    ],
)
def test_what_waiting_cannot_help_is_said_at_once_with_what_to_do(
    cluster: postgres.Cluster, home: Path, name: str, password: str, words: str
) -> None:
    with within(3.0), pytest.raises(EnvironmentFault, match=words):
        open_it(cluster.url(name, password=password), home)


def test_a_host_that_is_nowhere_is_said(home: Path) -> None:
    with within(10.0), pytest.raises(EnvironmentFault, match="check the host's name"):
        open_it("postgresql://sweep@nowhere.invalid/sweep", home)


@pytest.mark.faults
def test_a_statement_that_somebody_cancels_over_and_over_goes_through_in_the_end(
    cluster: postgres.Cluster, direct: str, home: Path
) -> None:
    name = direct.rpartition("/")[2]
    cancel = f"SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
    over = threading.Event()

    def disturb() -> None:
        while not over.wait(0.02):
            cluster.execute(cancel)

    thread = threading.Thread(target=disturb, daemon=True)
    with open_it(direct, home) as study:
        thread.start()
        told = [run_one(study) for _ in range(3)]
        over.set()
        thread.join()
        assert study.records() == tuple(told)
        assert states(study) <= {TrialState.COMPLETE, TrialState.FAIL}


@pytest.mark.faults
def test_a_row_that_a_lost_session_has_locked_is_free_again(
    cluster: postgres.Cluster, direct: str, home: Path
) -> None:
    with (
        open_it(direct, home) as study,
        sqlalchemy.create_engine(
            direct.replace("postgresql", "postgresql+psycopg", 1), poolclass=sqlalchemy.NullPool
        ).connect() as other,
    ):
        other.exec_driver_sql("SELECT 1 FROM studies FOR UPDATE")
        timer = soon(1.0, other.rollback)
        study.add_wall_seconds(1.0)
        timer.join()
        assert study.wall_seconds() == 1.0


@pytest.mark.faults
def test_a_server_restarted_five_times_in_a_study_loses_and_doubles_nothing(
    cluster: postgres.Cluster, direct: str, home: Path
) -> None:
    over = threading.Event()
    told: list[TrialRecord] = []

    def restart() -> None:
        for _ in range(5):
            before = len(told)
            while len(told) < before + 3:
                time.sleep(0.01)
            cluster.restart()
        over.set()

    thread = threading.Thread(target=restart, daemon=True)
    with open_it(direct, home) as study:
        thread.start()
        while not over.is_set():
            told.append(run_one(study))
        thread.join()
        told.append(run_one(study))
        assert study.records() == tuple(told)
    with open_it(direct, home) as study:
        assert study.recover() == ()
        assert [record.outcome for record in study.records()] == [r.outcome for r in told]
        trials = study.study.get_trials(deepcopy=False)
        assert [trial.number for trial in trials] == list(range(len(trials)))
        assert states(study) <= {TrialState.COMPLETE, TrialState.FAIL}
    assert len(told) > 15


def steps(study: OpenStudy) -> Trial:
    """Do everything that a driver stores; return the trial that was asked for last."""
    study.recover()
    run_one(study)
    trial = study.ask_again()
    study.tell(trial, begun(study, trial, a_record(trial.number)))
    carried = a_record(2).model_copy(update={"config": TrialConfig(micro_batch_size=8)})
    study.carry(carried, params={"micro_batch_size": 8}, distributions=DISTRIBUTIONS)
    study.add_wall_seconds(2.0)
    study.note_end({"reason": "exhausted"})
    return study.ask(DISTRIBUTIONS)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_the_reply_to_any_commit_may_be_lost(url: str, home: Path, proxy: Proxy) -> None:
    for at in itertools.count(1):
        proxy.lose_reply_to(b"COMMIT", at=at)
        name = f"study{at}"
        with open_it(url, home, name=name) as study:
            last = steps(study)
            is_over = not proxy.has_lost_one
            proxy.lose_nothing()
            by_state = {
                state: [t.number for t in study.study.get_trials(states=(state,))]
                for state in TrialState
            }
            runs = len(study.study.user_attrs["runs"])
            study.abandon()
        snapshot = read_study(name, url=url, home=home)
        # A trial whose creation nobody heard of is closed, and another one asked for.
        assert by_state[TrialState.RUNNING] == [last.number], at
        assert len(by_state[TrialState.COMPLETE]) == 3, at
        assert by_state[TrialState.WAITING] == [], at
        assert len(by_state[TrialState.FAIL]) <= 1, at
        assert [record.config.micro_batch_size for record in snapshot.records][-1] == 8
        assert (len(snapshot.records), snapshot.running, runs) == (3, (), 1), at
        assert snapshot.wall_seconds == 2.0
        if is_over:
            break
    assert at > 10


@pytest.mark.parametrize("has_ended", [False, True], ids=["drives", "has ended"])
def test_a_driver_that_was_stopped_and_lost_its_lease_leaves_the_next_ones_trials_alone(
    cluster: postgres.Cluster, direct: str, home: Path, has_ended: bool
) -> None:
    name = direct.rpartition("/")[2]
    first = driver.start(direct, home, moment="abandon", trials=1)
    assert first.stdout is not None
    assert first.stdout.readline() == "opened\n"
    assert first.stdout.readline() == "begun 0\n"
    first.send_signal(signal.SIGSTOP)
    cluster.execute(
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
    )
    with open_it(direct, home) as second:
        second.recover()
        trial = second.ask(DISTRIBUTIONS)
        record = begun(second, trial, a_record(trial.number))
        if has_ended:
            let_go_of_the_lease(second)
        first.send_signal(signal.SIGCONT)
        said = first.communicate()[0]
        assert ("no longer driven from here" if has_ended else "is driven by") in said
        (running,) = read_study("study", url=direct, home=home).running
        assert running.number == trial.number
    if has_ended:
        return
    with open_it(direct, home) as third:
        third._spool.append(record)
        third.recover()
        assert third.records()[-1] == record
