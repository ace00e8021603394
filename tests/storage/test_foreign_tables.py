"""Whose tables a database has: those of another version or application are left as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy

from search_spaces.errors import EnvironmentFault
from storage.reading import list_studies, read_study
from tests.storage import postgres
from tests.storage.builders import open_it, run_one


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/sweep.db"
    cluster: postgres.Cluster = request.getfixturevalue("cluster")
    return cluster.new_database()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def execute(url: str, *statements: str) -> None:
    engine = sqlalchemy.create_engine(url.replace("postgresql", "postgresql+psycopg", 1))
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def tables(url: str) -> set[str]:
    engine = sqlalchemy.create_engine(url.replace("postgresql", "postgresql+psycopg", 1))
    names = set(sqlalchemy.inspect(engine).get_table_names())
    engine.dispose()
    return names


def refused(url: str, home: Path, words: str) -> None:
    for action in (lambda: open_it(url, home), lambda: list_studies(url, home)):
        with pytest.raises(EnvironmentFault, match=words):
            action()


def test_tables_of_a_newer_optuna_are_refused_and_left(url: str, home: Path) -> None:
    with open_it(url, home) as study:
        run_one(study)
    # What a later version renamed is not put back beside it.
    execute(
        url,
        "UPDATE alembic_version SET version_num = 'v9.0.0.a'",
        "ALTER TABLE trial_heartbeats RENAME TO beats",
    )
    before = tables(url)
    refused(url, home, r"no longer compatible.*pip install -U optuna")
    assert tables(url) == before


def test_tables_of_an_older_optuna_are_refused_until_they_are_upgraded_as_is_said(
    url: str, home: Path
) -> None:
    with open_it(url, home) as study:
        told = run_one(study)
    execute(url, "UPDATE alembic_version SET version_num = 'v3.0.0.d'")
    refused(url, home, r"no longer compatible.*optuna storage upgrade")
    there = url.replace("postgresql", "postgresql+psycopg", 1)
    command = [Path(sys.executable).with_name("optuna"), "storage", "upgrade", "--storage", there]
    subprocess.run(command, check=True, capture_output=True)
    with open_it(url, home) as study:
        assert study.records() == (told,)


@pytest.mark.parametrize(
    "statements",
    [
        (
            "CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)",
            "INSERT INTO alembic_version VALUES ('4b2d1f')",
            "CREATE TABLE users (id INTEGER)",
        ),
        ("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)",),
        ("CREATE TABLE studies (title VARCHAR(32))",),
    ],
    ids=["its migrations", "no migration yet", "a table of that name"],
)
def test_the_database_of_another_application_is_refused_and_left(
    url: str, home: Path, statements: tuple[str, ...]
) -> None:
    execute(url, *statements)
    before = tables(url)
    refused(url, home, "another application's.*create a database for sweep")
    assert tables(url) == before
    assert not home.exists()


# Roles


def a_role(cluster: postgres.Cluster, url: str, name: str, *grants: str) -> str:
    """Make a role that may only do what is granted, and return its URL of a database."""
    database = url.rpartition("/")[2]
    cluster.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'guest'")
    for grant in grants:
        cluster.execute(f"GRANT {grant} TO {name}", database=database)
    return f"postgresql://{name}:guest@127.0.0.1:{cluster.port}/{database}"


def test_a_role_that_may_only_read_reads_and_is_told_what_it_lacks(
    cluster: postgres.Cluster, home: Path, tmp_path: Path
) -> None:
    url = cluster.new_database()
    with open_it(url, home) as study:
        told = run_one(study)
        reader = a_role(cluster, url, "reader", "SELECT ON ALL TABLES IN SCHEMA public")
        snapshot = read_study("study", url=reader, home=home)
        assert snapshot.records == (told,)
        # The driver is another role's, of which little is shown but its name.
        assert (snapshot.holder, snapshot.driven_since is None) != (None, True)
        with pytest.raises(EnvironmentFault, match="is driven by"):
            open_it(reader, home)
    for name in ("study", "new"):
        with pytest.raises(EnvironmentFault, match=r"permission denied.*grant this user the right"):
            open_it(reader, home, name=name)
    assert [line.name for line in list_studies(url, home)] == ["study"]
    assert not (home / "new").exists()


def test_a_server_that_only_reads_is_said_at_once(cluster: postgres.Cluster, home: Path) -> None:
    url = cluster.new_database()
    with open_it(url, home) as study:
        told = run_one(study)
    name = url.rpartition("/")[2]
    cluster.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    assert read_study("study", url=url, home=home).records == (told,)
    empty = cluster.new_database()
    other = empty.rpartition("/")[2]
    cluster.execute(f"ALTER DATABASE {other} SET default_transaction_read_only = on")
    with pytest.raises(EnvironmentFault, match=r"read-only.*name the primary"):
        open_it(empty, home, name="other")
    assert tables(empty) == set()
