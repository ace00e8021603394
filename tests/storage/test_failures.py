from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import (
    DBAPIError,
    IntegrityError,
    InterfaceError,
    InvalidRequestError,
    NoSuchTableError,
    OperationalError,
    PendingRollbackError,
    ResourceClosedError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from storage.failures import InDoubtError, is_passing, is_passing_at_first, reason, state
from storage.urls import parse_url


def as_optuna_raises(error: Exception) -> StorageInternalError:
    raised = StorageInternalError("An exception is raised during the commit.")
    raised.__cause__ = error
    return raised


def of_server(code: str) -> StorageInternalError:
    return as_optuna_raises(DBAPIError("UPDATE", {}, psycopg.errors.lookup(code)("message")))


def refused(words: str) -> OperationalError:
    return OperationalError("", {}, psycopg.OperationalError(f"connection failed: {words}"))


@pytest.mark.parametrize(
    "code",
    [
        *("08006", "08P01", "25006", "25P02", "25P03", "40001", "40003", "40P01", "53200"),
        *("53300", "55P03", "57014", "57P01", "57P02", "57P03", "57P05", "58030"),
    ],
)
def test_what_a_server_is_over_soon_passes(code: str) -> None:
    assert is_passing(of_server(code))


@pytest.mark.parametrize(
    "code",
    ["22001", "23505", "28P01", "3D000", "42501", "42601", "42P01", "53100", "54000", "57P04"],
)
def test_what_somebody_must_mend_does_not_pass(code: str) -> None:
    assert not is_passing(of_server(code))


@pytest.mark.parametrize(
    "words",
    [
        "Connection refused",
        "FATAL:  the database system is starting up",
        "FATAL:  the database system is in recovery mode",
        "FATAL:  sorry, too many clients already",
        "failed to resolve host 'db': [Errno -3] Temporary failure in name resolution",
        "server closed the connection unexpectedly",
        "SSL SYSCALL error: EOF detected",
        "SSL error: unexpected eof while reading, closed",
        "connection timeout expired",
        "FATAL:  das Datenbanksystem startet",
    ],
)
def test_a_connection_that_fails_for_now_passes(words: str) -> None:
    assert is_passing(refused(words))


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ('FATAL:  password authentication failed for user "sweep"', "check the user"),
        ("fe_sendauth: no password supplied", "check the user"),
        ('FATAL:  database "sweep" does not exist', "createdb"),
        ('FATAL:  role "sweep" does not exist', "does not exist"),
        ('FATAL:  no pg_hba.conf entry for host "1.2.3.4", no encryption', "sslmode=require"),
        ('FATAL:  permission denied for database "sweep"', "grant"),
        ("server does not support SSL, but SSL was required", "sslmode"),
        ("SSL error: certificate verify failed", "sslrootcert"),
    ],
)
def test_a_connection_that_is_refused_for_good_says_what_to_do(words: str, advice: str) -> None:
    error = refused(words)
    assert not is_passing(error)
    assert advice in reason(error)


def test_only_a_server_that_is_there_is_waited_for_from_the_start() -> None:
    assert is_passing_at_first(refused("FATAL:  the database system is not yet accepting ..."))
    assert is_passing_at_first(refused("server closed the connection unexpectedly"))
    assert is_passing_at_first(of_server("57P03"))
    assert is_passing_at_first(of_server("53300"))
    for words in ("Connection refused", "connection timeout expired", "failed to resolve host 'a'"):
        assert not is_passing_at_first(refused(words))
    assert not is_passing_at_first(refused('FATAL:  database "sweep" does not exist'))


@pytest.mark.parametrize(
    "error",
    [
        PendingRollbackError("Can't reconnect until invalid transaction is rolled back."),
        ResourceClosedError("This Connection is closed"),
        InvalidRequestError("This session is provisioning a new connection"),
        PoolTimeoutError("QueuePool limit"),
        InterfaceError("SELECT", {}, psycopg.InterfaceError("the cursor is closed")),
    ],
)
def test_what_a_failure_left_of_a_session_passes_with_a_new_one(error: Exception) -> None:
    assert is_passing(error)
    assert is_passing(as_optuna_raises(error))


@pytest.mark.parametrize(
    "error",
    [
        NoSuchTableError("trials"),
        IntegrityError("INSERT", {}, psycopg.errors.UniqueViolation("twice")),
        ValueError("ours"),
    ],
)
def test_a_mistake_does_not_pass(error: Exception) -> None:
    assert not is_passing(error)


def of_sqlite(name: str, words: str) -> OperationalError:
    error = sqlite3.OperationalError(words)
    error.sqlite_errorname = name
    return OperationalError("UPDATE", {}, error)


@pytest.mark.parametrize(
    ("name", "words", "is_short"),
    [
        ("SQLITE_BUSY", "database is locked", True),
        ("SQLITE_BUSY_SNAPSHOT", "database is locked", True),
        ("SQLITE_LOCKED_SHAREDCACHE", "database table is locked", True),
        ("SQLITE_PROTOCOL", "locking protocol", True),
        ("SQLITE_IOERR_LOCK", "disk I/O error", True),
        ("SQLITE_IOERR_READ", "disk I/O error", True),
        ("SQLITE_IOERR_WRITE", "disk I/O error", False),
        ("SQLITE_IOERR_FSYNC", "disk I/O error", False),
        ("SQLITE_FULL", "database or disk is full", False),
        ("SQLITE_READONLY", "attempt to write a readonly database", False),
        ("SQLITE_READONLY_DBMOVED", "attempt to write a readonly database", False),
        ("SQLITE_CORRUPT", "database disk image is malformed", False),
        ("SQLITE_CANTOPEN", "unable to open database file", False),
    ],
)
def test_of_sqlites_errors_those_pass_that_another_process_is_the_cause_of(
    name: str, words: str, is_short: bool
) -> None:
    error = of_sqlite(name, words)
    in_doubt = InDoubtError()
    in_doubt.__cause__ = error.orig
    assert is_passing(error) is is_passing(in_doubt) is is_short


def test_sqlite_names_its_errors_as_is_expected_here(tmp_path: Path) -> None:
    path = tmp_path / "sweep.db"
    with closing(sqlite3.connect(path, timeout=0)) as one, closing(sqlite3.connect(path)) as two:
        two.execute("CREATE TABLE t (a)")
        two.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError) as busy:
            one.execute("INSERT INTO t VALUES (1)")
        two.rollback()
        one.execute("PRAGMA max_page_count = 2")
        with pytest.raises(sqlite3.OperationalError) as full:
            one.execute("INSERT INTO t VALUES (zeroblob(100000))")
    assert is_passing(OperationalError("", {}, busy.value))
    assert not is_passing(OperationalError("", {}, full.value))
    assert "free some space" in reason(OperationalError("", {}, full.value))


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("database or disk is full", "free some space"),
        ("attempt to write a readonly database", "make the file and its directory writable"),
        ("database disk image is malformed", "put a copy in its place"),
        ("disk I/O error", "quota"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_what_to_do(words: str, advice: str) -> None:
    assert advice in reason(of_sqlite("SQLITE_ERROR", words))


def test_who_waits_is_told_what_the_matter_is_without_secrets() -> None:
    assert state(of_sqlite("SQLITE_BUSY", "database is locked")) == "is locked by another process"
    assert state(refused("Connection refused")) == "cannot be reached"
    assert state(refused("FATAL:  the database system is starting up")) == "is restarting"
    assert state(refused("s3cret")) == "does not answer"
    parse_url("postgresql://sweep:s3cret@127.0.0.1/sweep")
    assert "s3cret" not in reason(refused("for 's3cret'"))
