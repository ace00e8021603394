"""A pooler between a driver and its server: works, or is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy

from search_spaces.errors import EnvironmentFault
from storage import database
from storage.reading import list_studies, read_study
from tests.storage import postgres
from tests.storage.builders import open_it, run_one
from tests.storage.pgbouncer import running_pooler


@pytest.fixture
def direct(cluster: postgres.Cluster) -> str:
    return cluster.new_database()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def tables(cluster: postgres.Cluster, url: str) -> list[str]:
    with postgres.connected(url) as connection:
        return sqlalchemy.inspect(connection).get_table_names()


@pytest.mark.parametrize("pool_size", [3, 20])
def test_a_study_is_driven_through_a_pooler_in_session_mode_by_one_driver(
    cluster: postgres.Cluster, direct: str, home: Path, pool_size: int
) -> None:
    with running_pooler(cluster, "session", pool_size=pool_size) as port:
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


@pytest.mark.parametrize("pool_size", [1, 2])
def test_a_pooler_of_few_sessions_is_refused_with_what_to_raise(
    cluster: postgres.Cluster,
    direct: str,
    home: Path,
    pool_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(database, "_ANSWER_SECONDS", 1.0)
    with running_pooler(cluster, "session", pool_size=pool_size) as port:
        url = cluster.through(port, direct)
        with pytest.raises(EnvironmentFault, match=r"needs three.*default_pool_size"):
            open_it(url, home)
    assert not home.exists()


def test_a_pooler_in_transaction_mode_is_refused_before_anything_is_created(
    cluster: postgres.Cluster, direct: str, home: Path
) -> None:
    with running_pooler(cluster, "transaction", pool_size=20) as port:
        url = cluster.through(port, direct)
        with pytest.raises(EnvironmentFault, match=r"in transaction mode.*session mode"):
            open_it(url, home)
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
            lambda: open_it(url, home),
            lambda: list_studies(url, home),
        ):
            with pytest.raises(EnvironmentFault, match=r"statement mode.*session mode"):
                action()
    assert tables(cluster, direct) == []
