"""Owns the right to drive a study: one driver at a time, freed by the system when it dies.

A lock on a file for SQLite, an advisory lock for PostgreSQL. Knows nothing of trials.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import sqlalchemy
from filelock import FileLock, Timeout
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
    """A lock on ``<database>.<study>.lock``, a file that names its holder and stays behind.

    The system frees it with the process, however that ends; a forked child lets go of it at once.
    """

    database: Path
    study: str
    _lock: FileLock = field(init=False)
    _locked: tuple[os.stat_result, os.stat_result | None] | None = field(default=None, init=False)
    """The lock file and the database as they were when the lease was taken."""

    def __post_init__(self) -> None:
        self._lock = FileLock(
            self.path,
            timeout=_GRACE_SECONDS,
            # The lease is the process's: whichever thread asks, and whichever gives it up.
            thread_local=False,
            # On a file system without locks a file's mere existence would have to do, and outlive a
            # driver that was killed; nor may the file go with the lock, or two drivers could each
            # lock a file of this name.
            fallback_to_soft=False,
            preserve_lock_file=True,
            on_acquired=self._sign,
        )

    @property
    def path(self) -> Path:
        """The lock file."""
        return self.database.with_name(f"{self.database.name}.{self.study}.lock")

    def acquire(self) -> None:
        """Take the lease."""
        self.release()
        try:
            self._lock.acquire()
        except Timeout:
            raise _taken(self.study, self._written()) from None
        except OSError as error:
            has_no_locks = error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)
            advice = "; put the database on a local disk" if has_no_locks else ""
            raise EnvironmentFault(
                f"cannot lock the study by {self.path}: {error.strerror}{advice}"
            ) from error

    def _sign(self, descriptor: int) -> None:
        """Write who holds the lock into its file, through the descriptor that is locked."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{this_driver()} {since}\n".encode())
        self._locked = os.fstat(descriptor), _stat(self.database)

    def is_held(self) -> bool:
        """Whether lock and database are still the files under their names.

        filelock knows its descriptor alone, and SQLite would go on writing into a database that was
        deleted: nobody would be kept out of what nobody would ever read.
        """
        if not self._lock.is_locked or self._locked is None:
            return False
        lock, database = self._locked
        return _is_same(lock, self.path) and _is_same(database, self.database)

    def release(self) -> None:
        """Give it up."""
        self._lock.release()

    def holder(self) -> Holder | None:
        """Return who has it now."""
        try:
            with self.path.open(encoding="utf-8") as file:
                # filelock has exclusive locks alone, by which two readers would take each other for
                # the driver, and which need a file that they may write to. Its lock on Linux and
                # macOS is a flock, and a shared one waits for nobody but the driver.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._written()
        except OSError:
            return None
        return None

    def _written(self) -> Holder:
        words = self.path.read_text(encoding="utf-8").split()
        return Holder(*words) if len(words) == 2 else Holder("another process")


def _is_same(file: os.stat_result | None, path: Path) -> bool:
    there = _stat(path)
    return file is not None and there is not None and os.path.samestat(file, there)


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
