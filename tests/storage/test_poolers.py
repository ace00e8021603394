"""A pooler between a driver and its server: works, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy

from search_spaces.errors import EnvironmentFault
from storage.patience import Patience
from storage.reading import list_studies, read_study
from tests.storage import postgres
from tests.storage.builders import open_it, run_one
from tests.storage.pgbouncer import running_pooler

PATIENCE = Patience(seconds=12.0, answer_seconds=3.0)


@pytest.fixture
def direct(cluster: postgres.Cluster) -> str:
    return cluster.new_database()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def tables(cluster: postgres.Cluster, url: str) -> list[str]:
    with postgres.connected(url) as connection:
        return sqlalchemy.inspect(connection).get_table_names()


@contextmanager
def busy(url: str, count: int) -> Iterator[None]:
    """Make a pooler open so many connections to its server, which it keeps from then on."""
    with ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(postgres.connected(url, isolation="READ COMMITTED"))
            connection.exec_driver_sql("SELECT 1")
    yield


@pytest.mark.parametrize("pool_size", [3, 20])
def test_a_study_is_driven_through_a_pooler_in_session_mode_by_one_driver(
    cluster: postgres.Cluster, direct: str, home: Path, pool_size: int
) -> None:
    with running_pooler(cluster, "session", pool_size=pool_size) as port:
        url = cluster.through(port, direct)
        with open_it(url, home, patience=replace(PATIENCE)) as study:
            told = run_one(study)
            holder = read_study("study", url=url, home=home).holder
            assert holder == read_study("study", url=direct, home=home).holder is not None
            for way in (url, direct):
                with pytest.raises(EnvironmentFault, match="is driven by"):
                    open_it(way, home, patience=replace(PATIENCE))
        with open_it(direct, home) as study:
            assert study.records() == (told,)


@pytest.mark.parametrize("pool_size", [1, 2])
def test_a_pooler_of_few_sessions_is_refused_with_what_to_raise(
    cluster: postgres.Cluster, direct: str, home: Path, pool_size: int
) -> None:
    with running_pooler(cluster, "session", pool_size=pool_size) as port:
        url = cluster.through(port, direct)
        with pytest.raises(EnvironmentFault, match=r"no three connections.*default_pool_size"):
            open_it(url, home, patience=replace(PATIENCE))
    assert tables(cluster, direct) == []
    assert not home.exists()


@pytest.mark.parametrize(
    ("pool_size", "more", "others"),
    [
        (1, "", 0),
        (20, "", 0),
        # A client that asks again is given another one of the sessions that are there.
        (20, "server_round_robin = 1", 5),
        (20, "server_lifetime = 3600", 5),
    ],
)
def test_a_pooler_in_transaction_mode_is_refused_before_anything_is_created(
    cluster: postgres.Cluster, direct: str, home: Path, pool_size: int, more: str, others: int
) -> None:
    with running_pooler(cluster, "transaction", pool_size=pool_size, more=more) as port:
        url = cluster.through(port, direct)
        with (
            busy(url, others),
            pytest.raises(EnvironmentFault, match=r"in transaction mode.*session mode"),
        ):
            open_it(url, home, patience=replace(PATIENCE))
    assert tables(cluster, direct) == []
    assert not home.exists()


def test_studies_are_read_through_a_pooler_in_transaction_mode(
    cluster: postgres.Cluster, direct: str, home: Path
) -> None:
    with (
        running_pooler(cluster, "transaction", pool_size=2) as port,
        open_it(direct, home) as open_,
    ):
        told = run_one(open_)
        url = cluster.through(port, direct)
        snapshot = read_study("study", url=url, home=home)
        assert snapshot.records == (told,)
        assert snapshot.holder is not None
        (line,) = list_studies(url, home)
        assert line.name == "study"


def test_a_pooler_in_statement_mode_is_refused_to_writers_and_readers(
    cluster: postgres.Cluster, direct: str, home: Path
) -> None:
    with running_pooler(cluster, "statement") as port:
        url = cluster.through(port, direct)
        for action in (
            lambda: open_it(url, home, patience=replace(PATIENCE)),
            lambda: list_studies(url, home),
        ):
            with pytest.raises(EnvironmentFault, match=r"statement mode.*session mode"):
                action()
    assert tables(cluster, direct) == []
