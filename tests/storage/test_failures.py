"""What a database's errors mean: whether they are tried again, and what is said of them."""

from __future__ import annotations

import sqlite3

import psycopg
import pytest
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from storage import database
from storage.database import reason, retried


def as_optuna_raises(error: Exception) -> StorageInternalError:
    raised = StorageInternalError("An exception is raised during the commit.")
    raised.__cause__ = error
    return raised


def refused(words: str) -> OperationalError:
    return OperationalError("", {}, psycopg.OperationalError(f"connection failed: {words}"))


def of_file(words: str) -> OperationalError:
    return OperationalError("UPDATE", {}, sqlite3.OperationalError(words))


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
    "error",
    [
        refused("Connection refused"),
        refused("server closed the connection unexpectedly"),
        refused("SSL connection has been closed unexpectedly"),
        of_file("database is locked"),
        DBAPIError.instance("", {}, psycopg.errors.AdminShutdown("shut down"), psycopg.Error),
        DBAPIError.instance(
            "", {}, psycopg.errors.ReadOnlySqlTransaction("in a read-only"), psycopg.Error
        ),
    ],
)
def test_what_may_be_over_soon_is_tried_again(error: Exception) -> None:
    assert attempts(error) == attempts(as_optuna_raises(error)) == 3


@pytest.mark.parametrize(
    "error",
    [
        refused('FATAL:  password authentication failed for user "sweep"'),
        of_file("database or disk is full"),
        of_file("attempt to write a readonly database"),
        IntegrityError("INSERT", {}, psycopg.errors.NotNullViolation("null")),
    ],
)
def test_what_waiting_does_not_help_is_raised_at_once(error: Exception) -> None:
    assert attempts(error) == attempts(as_optuna_raises(error)) == 1


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (refused('FATAL:  password authentication failed for user "sweep"'), "check the user"),
        (refused('FATAL:  database "sweep" does not exist'), "createdb"),
        (refused('FATAL:  no pg_hba.conf entry for host "1.2.3.4"'), "sslmode=require"),
        (refused('FATAL:  permission denied for database "sweep"'), "grant"),
        (refused("SSL error: certificate verify failed"), "sslrootcert"),
        (refused("failed to resolve host 'db'"), "check the host's name"),
        (of_file("database or disk is full"), "free some space"),
        (of_file("attempt to write a readonly database"), "make the file and its directory"),
        (of_file("database disk image is malformed"), "put a copy in its place"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(error: Exception, advice: str) -> None:
    assert advice in reason(error)
    assert advice in reason(as_optuna_raises(error))
