"""A PostgreSQL server that is silent, stopped, restarted, pooled, somebody else's or shared."""

from __future__ import annotations

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
from optuna.trial import TrialState

from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.storage import database
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.lease import this_driver
from qlora_sweep.storage.reading import list_studies
from qlora_sweep.storage.study import OpenStudy
from tests.storage import driver, postgres
from tests.storage.builders import (
    DISTRIBUTIONS,
    a_record,
    begun,
    open_it,
    read_it,
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
    monkeypatch.setattr(database, "_RETRY_SECONDS", ())
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


@pytest.mark.parametrize(
    "is_stopped",
    [False, pytest.param(True, marks=pytest.mark.faults)],
    ids=["link down", "server stopped"],
)
@pytest.mark.usefixtures("is_short")
def test_a_silent_server_is_an_error_in_time_and_loses_nothing(
    url: str, home: Path, is_stopped: bool, cluster: postgres.Cluster, proxy: Proxy
) -> None:
    silence = cluster.stopped_in_its_tracks if is_stopped else proxy.silent
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
            lambda: read_it(url, home),
        ):
            with proxy.silent(), within(1.5):
                soon(0.3, ctrl_c)
                with pytest.raises(KeyboardInterrupt):
                    wait()
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


# A pooler between a driver and its server works, or is refused with the reason


def tables(url: str) -> set[str]:
    with postgres.connected(url) as connection:
        return set(sqlalchemy.inspect(connection).get_table_names())


def test_a_study_is_driven_through_a_pooler_in_session_mode_by_one_driver(
    cluster: postgres.Cluster, direct: str, home: Path
) -> None:
    with running_pooler(cluster, "session", pool_size=3) as port:
        url = cluster.through(port, direct)
        with open_it(url, home) as study:
            told = run_one(study)
            holder = read_it(url, home).holder
            assert holder == read_it(direct, home).holder is not None
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
        if mode == "transaction":
            assert tables(direct) == set()
            # A study can be read through it.
            with open_it(direct, home) as study:
                told = run_one(study)
                snapshot = read_it(url, home)
            assert snapshot.records == (told,)
            assert snapshot.holder is not None


# Tables of another version, application or owner are left as they are


def execute(url: str, *statements: str) -> None:
    with postgres.connected(url) as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def refused(url: str, home: Path, words: str) -> None:
    before = tables(url)
    for action in (lambda: open_it(url, home), lambda: list_studies(url, home)):
        with pytest.raises(EnvironmentFault, match=words):
            action()
    assert tables(url) == before


def test_tables_of_another_optuna_are_refused_until_they_are_upgraded(
    direct: str, home: Path
) -> None:
    with open_it(direct, home) as study:
        told = run_one(study)
    execute(direct, "UPDATE alembic_version SET version_num = 'v3.0.0.d'")
    refused(direct, home, "optuna storage upgrade")
    # What that command does.
    there = direct.replace("postgresql", "postgresql+psycopg", 1)
    storage = RDBStorage(there, skip_compatibility_check=True, skip_table_creation=True)
    storage.upgrade()
    storage.engine.dispose()
    with open_it(direct, home) as study:
        assert study.records() == (told,)
    # A table that a later version renamed is not made again.
    newer = "UPDATE alembic_version SET version_num = 'v9.0.0.a'"
    execute(direct, newer, "ALTER TABLE trial_heartbeats RENAME TO beats")
    refused(direct, home, "pip install -U optuna")


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
    cluster: postgres.Cluster, direct: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server that only reads may be one that is about to be promoted.
    monkeypatch.setattr(database, "_RETRY_SECONDS", ())
    monkeypatch.setattr(database, "RESTART_SECONDS", ())
    name = direct.rpartition("/")[2]
    cluster.execute("CREATE ROLE reader LOGIN PASSWORD 'guest'")
    reader = f"postgresql://reader:guest@127.0.0.1:{cluster.port}/{name}"
    with open_it(direct, home) as study:
        told = run_one(study)
        execute(direct, "GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader")
        snapshot = read_it(reader, home)
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
    assert read_it(direct, home).records == (told,)
    with pytest.raises(EnvironmentFault, match=r"read-only.*primary"):
        open_it(direct, home, name="other")
    assert [line.name for line in list_studies(direct, home)] == ["study"]
    assert not (home / "new").exists()
