"""What a database's URL and its errors mean: what is tried again, and what is said of them."""

from __future__ import annotations

import sqlite3
import traceback
from datetime import datetime, tzinfo
from pathlib import Path

import psycopg
import pytest
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.storage import database, records
from qlora_sweep.storage.database import faults, reason, retried
from qlora_sweep.storage.urls import PostgresUrl, SqliteUrl, parse_url
from tests.storage.builders import open_it


def as_optuna_raises(error: Exception) -> StorageInternalError:
    raised = StorageInternalError("An exception is raised during the commit.")
    raised.__cause__ = error
    return raised


def refused(words: str) -> OperationalError:
    return OperationalError("", {}, psycopg.OperationalError(f"connection failed: {words}"))


def of_file(words: str) -> OperationalError:
    return OperationalError("UPDATE", {}, sqlite3.OperationalError(words))


def of_server(error: psycopg.Error) -> Exception:
    return DBAPIError.instance("", {}, error, psycopg.Error)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(database, "RESTART_SECONDS", ())


def attempts(error: Exception) -> int:
    tried = []

    def attempt() -> None:
        tried.append(error)
        raise error

    with pytest.raises(type(error)):
        retried(attempt)
    return len(tried)


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (refused("Connection refused"), 3),
        (refused("SSL connection has been closed unexpectedly"), 3),
        (of_file("database is locked"), 3),
        (of_server(psycopg.errors.AdminShutdown("shut down")), 3),
        (of_server(psycopg.errors.ReadOnlySqlTransaction("in a read-only")), 3),
        # What waiting does not help is raised at once.
        (refused('FATAL:  password authentication failed for user "sweep"'), 1),
        (of_file("database or disk is full"), 1),
        (of_file("attempt to write a readonly database"), 1),
        (IntegrityError("INSERT", {}, psycopg.errors.NotNullViolation("null")), 1),
    ],
)
def test_only_a_fault_that_may_pass_is_tried_again(error: Exception, times: int) -> None:
    assert attempts(error) == attempts(as_optuna_raises(error)) == times


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (refused('FATAL:  no pg_hba.conf entry for host "1.2.3.4"'), "sslmode=require"),
        (refused("SSL error: certificate verify failed"), "sslrootcert"),
        (of_file("database or disk is full"), "free some space"),
        (of_file("attempt to write a readonly database"), "make the file and its directory"),
    ],
)
def test_the_message_of_a_fault_says_what_to_do(error: Exception, advice: str) -> None:
    assert advice in reason(as_optuna_raises(error))


def test_one_file_or_database_has_one_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    known = SqliteUrl(tmp_path / "real" / "x.db")
    for path in ("real/x.db", f"{tmp_path}/link/x.db", f"{tmp_path}/real/x.db"):
        assert parse_url(f"sqlite:///{path}") == known
    for scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        url = parse_url(f"{scheme}://sweep:pw@db.example:5432/studies")
        assert isinstance(url, PostgresUrl)
        assert url.text == "postgresql+psycopg://sweep:pw@db.example:5432/studies"
        assert str(url) == "postgresql://sweep:***@db.example:5432/studies"
        assert "pw" not in repr(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("runs/sweep.db", "did you mean 'sqlite:///runs/sweep.db'"),
        ("mysql://u:secret@h/d", "known are sqlite and postgresql"),
        ("sqlite://u:secret@h/d", "three slashes"),
        ("sqlite:///:memory:", "path of a file"),
        ("sqlite:///u:secret@h/d?z=1", "without options"),
        ("postgresql://u:secret@h", "names no database"),
        ("postgresql://u:sec@ret:x@h:port/d", "malformed"),
        ("postgresql://u:sec@ret@h/d", "an '@' in a password is written %40"),
        ("u:secret@h/d", "did you mean 'postgresql:"),
    ],
)
def test_a_wrong_url_is_refused_without_its_password(url: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_url(url)
    assert "sec" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("quoted", ["p@ss/1", "p%40ss%2F1"])
def test_a_password_that_a_driver_quotes_is_in_no_message_and_no_traceback(quoted: str) -> None:
    raised = OperationalError("SELECT", {}, Exception(f"no {quoted} here\nDETAIL: {quoted}"))
    with (
        pytest.raises(EnvironmentFault, match=r"u:\*\*\*@h/d: no \*\*\* here$") as caught,
        faults(parse_url("postgresql://u:p%40ss%2F1@h/d")),
    ):
        raise raised
    assert quoted not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("year", [1970, 2201])
def test_a_clock_that_is_decades_off_is_a_fault(
    year: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime(year, 1, 1, tzinfo=tz)

    monkeypatch.setattr(records, "datetime", Clock)
    with pytest.raises(EnvironmentFault, match=f"says {year}-.*set it"):
        open_it(f"sqlite:///{tmp_path}/sweep.db", tmp_path)
