"""Owns the right to drive a study: one driver at a time, freed by the system when it dies.

A lock on a file for SQLite, an advisory lock for PostgreSQL. Knows nothing of trials.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Protocol

import sqlalchemy
from sqlalchemy.exc import SQLAlchemyError

from search_spaces.errors import EnvironmentFault
from storage.database import connect_apart
from storage.urls import DatabaseUrl, PostgresUrl, SqliteUrl

_GRACE_SECONDS = 1.0
"""A reader that looks who holds a lock holds it itself for an instant; a driver waits that out."""
_NAME_LIMIT = 63
"""PostgreSQL cuts an application name here."""


@dataclass(frozen=True)
class Holder:
    """Who drives a study."""

    who: str
    """``host:pid``."""
    since: str | None = None
    """UTC, ISO 8601; None where the database does not tell."""

    def __str__(self) -> str:
        return self.who if self.since is None else f"{self.who} since {self.since}"


class Lease(Protocol):
    """The right to drive one study.

    Raises `EnvironmentFault` where the lock file cannot be had, and SQLAlchemy's own errors where
    the server cannot: the caller decides how long to wait for it.
    """

    def acquire(self) -> None:
        """Take the lease. Raises `EnvironmentFault` naming the holder where another has it."""
        ...

    def is_held(self) -> bool:
        """Whether it is still ours; a connection may drop, a lock file may be deleted."""
        ...

    def release(self) -> None:
        """Give it up. Idempotent."""
        ...

    def holder(self) -> Holder | None:
        """Return who has it now, ourselves included; None where nobody does. Creates nothing."""
        ...


def lease_for(url: DatabaseUrl, study: str) -> Lease:
    """Return the lease of ``study``, not yet taken."""
    match url:
        case SqliteUrl():
            return FileLease(url.path, study)
        case PostgresUrl():
            return AdvisoryLease(url, study)


def this_driver() -> str:
    """Return ``host:pid`` of this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _taken(study: str, holder: Holder | None) -> EnvironmentFault:
    return EnvironmentFault(
        f"study '{study}' is driven by {holder or 'another process'}; wait for it, stop it, "
        "or start another study with --study"
    )


@dataclass(eq=False)
class FileLease:
    """A lock on ``<database>.<study>.lock``, which says who holds it and stays behind empty."""

    database: Path
    study: str
    sleep: Callable[[float], None] = time.sleep
    _file: IO[str] | None = field(default=None, init=False)
    _locked: os.stat_result | None = field(default=None, init=False)

    @property
    def path(self) -> Path:
        """The lock file."""
        return self.database.with_name(f"{self.database.name}.{self.study}.lock")

    def acquire(self) -> None:
        """Take the lease."""
        self.release()
        for _ in range(20):
            if self._try():
                return
            self.sleep(_GRACE_SECONDS / 20)
        raise _taken(self.study, self._written())

    def _try(self) -> bool:
        try:
            file = self.path.open("a+", encoding="utf-8")
        except OSError as error:
            raise EnvironmentFault(
                f"cannot open the study's lock {self.path}: {error.strerror}"
            ) from error
        if not _lock(file, self.path):
            file.close()
            return False
        file.truncate(0)
        file.write(f"{this_driver()} {datetime.now(UTC).isoformat(timespec='seconds')}\n")
        file.flush()
        self._file, self._locked = file, _stat(self.database)
        return True

    def is_held(self) -> bool:
        """Whether lock and database are still the files under their names.

        SQLite would go on writing into a database that was deleted, and nobody would ever read it.
        """
        if self._file is None or not _is_same(os.fstat(self._file.fileno()), self.path):
            return False
        return self._locked is not None and _is_same(self._locked, self.database)

    def release(self) -> None:
        """Give it up."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None

    def holder(self) -> Holder | None:
        """Return who has it now."""
        if self._file is not None:
            return self._written()
        try:
            with self.path.open(encoding="utf-8") as file:
                return None if _lock(file, self.path, shared=True) else self._written()
        except OSError:
            return None

    def _written(self) -> Holder | None:
        words = self.path.read_text(encoding="utf-8").split()
        return Holder(*words) if len(words) == 2 else Holder("another process")


def _lock(file: IO[str], path: Path, *, shared: bool = False) -> bool:
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise EnvironmentFault(
            f"cannot lock {path}: {error.strerror}; put the database on a local disk"
        ) from error
    # Somebody may have deleted the file between open and lock; locking it would keep nobody out.
    return _is_same(os.fstat(file.fileno()), path)


def _is_same(file: os.stat_result, path: Path) -> bool:
    there = _stat(path)
    return there is not None and os.path.samestat(file, there)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


_HOLDER = sqlalchemy.text(
    "SELECT a.application_name, a.backend_start "
    "FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
    "WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND l.classid = CAST(:high AS oid) AND l.objid = CAST(:low AS oid)"
)


@dataclass(eq=False)
class AdvisoryLease:
    """An advisory lock on a connection of its own, whose application name says who holds it."""

    url: PostgresUrl
    study: str
    _connection: sqlalchemy.Connection | None = field(default=None, init=False)

    def acquire(self) -> None:
        """Take the lease."""
        self.release()
        connection = connect_apart(
            self.url, application_name=f"sweep {this_driver()}"[-_NAME_LIMIT:]
        )
        try:
            # The server would otherwise keep the lock of a vanished host for hours.
            for name, value in (("idle", 60), ("interval", 10), ("count", 3)):
                connection.exec_driver_sql(f"SET tcp_keepalives_{name} = {value}")
            query = sqlalchemy.text("SELECT pg_try_advisory_lock(:key)")
            if not connection.execute(query, {"key": self._key}).scalar_one():
                raise _taken(self.study, _advisory_holder(connection, self._key))
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    @property
    def _key(self) -> int:
        digest = hashlib.sha256(f"qlora-sweep:{self.study}".encode()).digest()
        return int.from_bytes(digest[:8], signed=True)

    def is_held(self) -> bool:
        """Whether the connection that holds the lock is alive."""
        if self._connection is None:
            return False
        try:
            self._connection.exec_driver_sql("SELECT 1")
        except SQLAlchemyError:
            return False
        return True

    def release(self) -> None:
        """Give it up; the server drops the lock with the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def holder(self) -> Holder | None:
        """Return who has it now."""
        with connect_apart(self.url, application_name="sweep status") as connection:
            return _advisory_holder(connection, self._key)


def _advisory_holder(connection: sqlalchemy.Connection, key: int) -> Holder | None:
    high, low = (key >> 32) & 0xFFFFFFFF, key & 0xFFFFFFFF
    row = connection.execute(_HOLDER, {"high": high, "low": low}).first()
    if row is None:
        return None
    since = None if row[1] is None else row[1].astimezone(UTC).isoformat(timespec="seconds")
    return Holder(row[0].removeprefix("sweep "), since)
