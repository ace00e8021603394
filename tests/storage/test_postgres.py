"""A PostgreSQL server that is silent, stopped, restarted, pooled, somebody else's or shared."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy
from optuna.storages import RDBStorage
from optuna.trial import Trial, TrialState

from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.storage import database
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.lease import this_driver
from qlora_sweep.storage.reading import list_studies, read_study
from qlora_sweep.storage.records import TrialRecord
from qlora_sweep.storage.study import OpenStudy
from tests.storage import driver, postgres
from tests.storage.builders import (
    DISTRIBUTIONS,
    a_record,
    begun,
    let_go_of_the_lease,
    open_it,
    run_one,
)
from tests.storage.pgbouncer import running_pooler
from tests.storage.proxy import Proxy

ANSWER_SECONDS = 1.0
ALIKE = ("study-3985819", "study-4420602")
"""Their checksums are the same in the 31 bits that a lock of PostgreSQL has."""


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


@pytest.mark.parametrize("what", ["link down", "server stopped"])
def test_a_silent_server_is_an_error_in_time_and_loses_nothing(
    url: str, home: Path, what: str, cluster: postgres.Cluster, proxy: Proxy, is_short: None
) -> None:
    silence = proxy.silent if what == "link down" else cluster.stopped_in_its_tracks
    with open_it(url, home) as study:
        # One that is silent for a moment is outlasted.
        proxy.fall_silent()
        soon(0.5, proxy.pass_on)
        run_one(study)
        trial = study.ask(DISTRIBUTIONS)
        record = begun(study, trial, a_record(trial.number))
        safe = r"(not answered|timeout expired).*safe in .*spool\.jsonl"
        with silence(), within(2 * ANSWER_SECONDS + 9.0):
            with pytest.raises(EnvironmentFault, match=safe):
                study.tell(trial, record)
            with pytest.raises(EnvironmentFault, match=r"not answered|timeout expired"):
                list_studies(url, home)
        run_one(study)
        assert study.recover() == ()
        assert [record.number for record in study.records()] == [0, 1, 2]
        assert states(study) == {TrialState.COMPLETE}


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
        for wait in (
            lambda: run_one(study),
            lambda: read_study("study", url=url, home=home),
            lambda: open_it(url, home, name="other"),
        ):
            with proxy.silent(), within(1.5):
                soon(0.3, ctrl_c)
                with pytest.raises(KeyboardInterrupt):
                    wait()
            # All works again that was given up.
            run_one(study)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://sweep:wrong@127.0.0.1:{port}/postgres", "authentication failed.*check"),
        ("postgresql://sweep:{password}@127.0.0.1:{port}/nowhere", "does not exist.*createdb"),
        ("postgresql://sweep@nowhere.invalid/sweep", "check the host's name"),
    ],
)
def test_a_server_that_refuses_for_good_is_not_waited_for(
    cluster: postgres.Cluster, home: Path, url: str, words: str
) -> None:
    password = postgres.quote(postgres.PASSWORD, safe="")
    with within(10.0), pytest.raises(EnvironmentFault, match=words):
        open_it(url.format(port=cluster.port, password=password), home)


@pytest.mark.faults
def test_a_server_restarted_and_statements_cancelled_in_a_study_lose_and_double_nothing(
    cluster: postgres.Cluster, direct: str, home: Path
) -> None:
    name = direct.rpartition("/")[2]
    cancel = f"SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
    over = threading.Event()
    told: list[TrialRecord] = []

    def disturb() -> None:
        for _ in range(5):
            before = len(told)
            while len(told) < before + 3:
                cluster.execute(cancel)
            cluster.restart()
        over.set()

    thread = threading.Thread(target=disturb, daemon=True)
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
    carried = a_record(2, batch=8)
    study.carry(carried, params={"micro_batch_size": 8}, distributions=DISTRIBUTIONS)
    study.add_wall_seconds(2.0)
    study.note(ended={"reason": "exhausted"})
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
    first = driver.start(direct, home, moment="abandon")
    first.wait_for("begun 0")
    first.signal(signal.SIGSTOP)
    cluster.execute(
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
    )
    with open_it(direct, home) as second:
        second.recover()
        trial = second.ask(DISTRIBUTIONS)
        begun(second, trial, a_record(trial.number))
        if has_ended:
            let_go_of_the_lease(second)
        first.signal(signal.SIGCONT)
        (said,), _ = first.end()
        assert ("no longer driven from here" if has_ended else "is driven by") in said
        (running,) = read_study("study", url=direct, home=home).running
        assert running.number == trial.number


# Who drives what


def test_a_driver_holds_one_connection(cluster: postgres.Cluster, direct: str, home: Path) -> None:
    name = direct.rpartition("/")[2]
    count = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}'"

    def held() -> int:
        with postgres.connected(cluster.url("postgres")) as connection:
            return int(connection.exec_driver_sql(count).scalar_one())

    with open_it(direct, home) as study:
        trial = study.ask(DISTRIBUTIONS)
        assert held() == 1
        study.tell(trial, begun(study, trial, a_record(trial.number)))
        assert held() == 1
    assert held() == 0


def test_the_list_says_who_drives_which_study(direct: str, home: Path) -> None:
    open_it(direct, home, name="left").close()
    other = driver.start(direct, home, study="other", moment="wait", trials=1)
    other.wait_for("told")
    with open_it(direct, home, name="mine") as study:
        trial = study.ask(DISTRIBUTIONS)
        begun(study, trial, a_record(trial.number))
        # As from another host, which has none of the files.
        listed = list_studies(direct, home / "nowhere")
    assert other.kill() == []
    lines = [line for line in listed if isinstance(line, StudySnapshot)]
    told = {s.name: (s.holder, tuple(t.number for t in s.running)) for s in lines}
    theirs = f"{os.uname().nodename}:{other.pid}"
    assert told == {"left": (None, ()), "other": (theirs, ()), "mine": (this_driver(), (0,))}
    # Other locks are not taken for a study's.
    with postgres.connected(direct) as connection:
        connection.exec_driver_sql("SELECT pg_advisory_lock(1), pg_advisory_lock(-7)")
        assert {line.holder for line in list_studies(direct, home)} == {None}


def test_studies_whose_names_have_one_checksum_are_driven_at_a_time(
    direct: str, home: Path
) -> None:
    name, other = ALIKE
    assert zlib.crc32(name.encode()) & 0x7FFFFFFF == zlib.crc32(other.encode()) & 0x7FFFFFFF
    with open_it(direct, home, name=name), open_it(direct, home, name=other):
        driven = {s.name for s in list_studies(direct, home) if s.holder is not None}
        assert driven == {name, other}


def test_of_many_that_want_one_study_one_drives_and_the_next_takes_over_from_a_killed_one(
    direct: str, home: Path
) -> None:
    wanting = [driver.start(direct, home, trials=1000) for _ in range(4)]
    # Whoever may not drive it ends without a word.
    while len(driving := [one for one in wanting if one.is_running()]) > 1:
        time.sleep(0.01)
    (first,) = driving
    first.wait_for("told 2")
    numbers = [int(line.split()[1]) for line in first.kill() if line.startswith("told")]
    with open_it(direct, home) as study:
        study.recover()
        kept = [r.number for r in study.records() if r.measurement]
    # The last may have been told or not.
    assert kept == list(range(len(kept)))
    assert len(kept) - max(numbers, default=2) in (1, 2)


# A pooler between a driver and its server works, or is refused with the reason


def tables(url: str) -> set[str]:
    engine = sqlalchemy.create_engine(url.replace("postgresql", "postgresql+psycopg", 1))
    names = set(sqlalchemy.inspect(engine).get_table_names())
    engine.dispose()
    return names


def test_a_study_is_driven_through_a_pooler_in_session_mode_by_one_driver(
    cluster: postgres.Cluster, direct: str, home: Path
) -> None:
    with running_pooler(cluster, "session", pool_size=3) as port:
        url = cluster.through(port, direct)
        with open_it(url, home) as study:
            told = run_one(study)
            holder = read_study("study", url=url, home=home).holder
            assert holder == read_study("study", url=direct, home=home).holder is not None
            for way in (url, direct):
                with pytest.raises(EnvironmentFault, match="is driven by"):
                    open_it(way, home)
        with open_it(direct, home) as study:
            assert study.records() == (told,)


@pytest.mark.parametrize(
    ("mode", "pool_size", "words"),
    [
        ("session", 2, "default_pool_size"),
        ("transaction", 20, "session mode"),
        ("statement", 20, "session mode"),
    ],
)
@pytest.mark.usefixtures("is_short")
def test_an_unfit_pooler_is_refused_before_anything_is_created(
    cluster: postgres.Cluster, direct: str, home: Path, mode: str, pool_size: int, words: str
) -> None:
    with running_pooler(cluster, mode, pool_size=pool_size) as port:
        url = cluster.through(port, direct)
        with pytest.raises(EnvironmentFault, match=words):
            open_it(url, home)
        assert not home.exists()
        assert tables(direct) == set()
        if mode == "transaction":
            # A study can be read through it.
            with open_it(direct, home) as study:
                told = run_one(study)
                snapshot = read_study("study", url=url, home=home)
            assert snapshot.records == (told,)
            assert snapshot.holder is not None


# Tables of another version, application or owner are left as they are


def execute(url: str, *statements: str) -> None:
    engine = sqlalchemy.create_engine(url.replace("postgresql", "postgresql+psycopg", 1))
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def refused(url: str, home: Path, words: str) -> None:
    before = tables(url)
    for action in (lambda: open_it(url, home), lambda: list_studies(url, home)):
        with pytest.raises(EnvironmentFault, match=words):
            action()
    assert tables(url) == before


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_tables_of_another_optuna_are_refused_until_they_are_upgraded(
    kind: str, home: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/sweep.db"
    if kind == "postgresql":
        url = request.getfixturevalue("direct")
    with open_it(url, home) as study:
        told = run_one(study)
    execute(url, "UPDATE alembic_version SET version_num = 'v3.0.0.d'")
    refused(url, home, "optuna storage upgrade")
    # What that command does.
    there = url.replace("postgresql", "postgresql+psycopg", 1)
    RDBStorage(there, skip_compatibility_check=True).upgrade()
    with open_it(url, home) as study:
        assert study.records() == (told,)
    # A table that a later version renamed is not made again.
    newer = "UPDATE alembic_version SET version_num = 'v9.0.0.a'"
    execute(url, newer, "ALTER TABLE trial_heartbeats RENAME TO beats")
    refused(url, home, "pip install -U optuna")


MIGRATIONS = "CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)"


@pytest.mark.parametrize(
    "statements",
    [
        (MIGRATIONS, "INSERT INTO alembic_version VALUES ('4b2')", "CREATE TABLE users (id INT)"),
        (MIGRATIONS,),
        ("CREATE TABLE studies (title VARCHAR(32))",),
    ],
    ids=["its migrations", "no migration yet", "a table of that name"],
)
def test_the_database_of_another_application_is_refused_and_left(
    direct: str, home: Path, statements: tuple[str, ...]
) -> None:
    execute(direct, *statements)
    refused(direct, home, "another application's")
    assert not home.exists()


def test_a_role_that_may_only_read_reads_and_is_told_what_it_lacks(
    cluster: postgres.Cluster, direct: str, home: Path
) -> None:
    name = direct.rpartition("/")[2]
    cluster.execute("CREATE ROLE reader LOGIN PASSWORD 'guest'")
    reader = f"postgresql://reader:guest@127.0.0.1:{cluster.port}/{name}"
    with open_it(direct, home) as study:
        told = run_one(study)
        execute(direct, "GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader")
        snapshot = read_study("study", url=reader, home=home)
        assert snapshot.records == (told,)
        # The driver is another role's, of which little is shown but its name.
        assert snapshot.holder is not None
        with pytest.raises(EnvironmentFault, match="is driven by"):
            open_it(reader, home)
    for study_name in ("study", "new"):
        with pytest.raises(EnvironmentFault, match=r"permission denied.*grant"):
            open_it(reader, home, name=study_name)
    # So is a server that only reads.
    cluster.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    assert read_study("study", url=direct, home=home).records == (told,)
    with pytest.raises(EnvironmentFault, match=r"read-only.*primary"):
        open_it(direct, home, name="other")
    assert [line.name for line in list_studies(direct, home)] == ["study"]
    assert not (home / "new").exists()
