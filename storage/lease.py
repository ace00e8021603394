"""Owns the right to drive a study: one driver at a time, freed by the system when it dies.

A lock on a file for SQLite, an advisory lock for PostgreSQL. Knows nothing of trials.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy
from filelock import FileLock, Timeout
from sqlalchemy.exc import SQLAlchemyError

from search_spaces.errors import EnvironmentFault
from storage import files
from storage.database import connect_apart
from storage.patience import READER, Patience
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


def lease_for(url: DatabaseUrl, study: str, *, patience: Patience | None = None) -> Lease:
    """Return the lease of ``study``, not yet taken.

    Args:
        url: of the database.
        study: its name.
        patience: how long a server's answers are waited for; a reader's where nobody drives.
    """
    match url:
        case SqliteUrl():
            return FileLease(url.path, study)
        case PostgresUrl():
            return AdvisoryLease(url, study, patience or replace(READER))


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
            mode=files.PRIVATE_FILE,
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
            files.refuse_others(self.path)
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
            with files.open_reading(self.path) as file:
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
        words = files.read_bytes(self.path).decode(errors="replace").split()
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
    "SELECT a.application_name, a.backend_start, a.pid "
    "FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
    "WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND l.classid = CAST(:high AS oid) AND l.objid = CAST(:low AS oid)"
)
_TRY = sqlalchemy.text("SELECT pg_try_advisory_lock(:key)")
_PROCESS = sqlalchemy.text("SELECT pg_backend_pid()")
_TERMINATE = sqlalchemy.text("SELECT pg_terminate_backend(:process)")


@dataclass(eq=False)
class AdvisoryLease:
    """An advisory lock on a connection of its own, whose application name says who holds it."""

    url: PostgresUrl
    study: str
    patience: Patience
    _connection: sqlalchemy.Connection | None = field(default=None, init=False)
    _process: int | None = field(default=None, init=False)
    """The server's process that has the lock."""
    _name: str = field(init=False)
    """Of this driver alone: two containers may well have a host's name and a process in common."""

    def __post_init__(self) -> None:
        self._name = f"sweep {this_driver()[-_NAME_LIMIT + 15 :]} {secrets.token_hex(4)}"

    def acquire(self) -> None:
        """Take the lease."""
        self.release()
        connection = connect_apart(self.url, application_name=self._name, patience=self.patience)
        try:
            self._refuse_pooler(connection)
            if not self._try(connection) and not self._try_after_ourselves(connection):
                raise _taken(self.study, _advisory_holder(connection, self._key))
            self._process = _process(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    @property
    def _key(self) -> int:
        digest = hashlib.sha256(f"qlora-sweep:{self.study}".encode()).digest()
        return int.from_bytes(digest[:8], signed=True)

    def _try(self, connection: sqlalchemy.Connection) -> bool:
        return bool(connection.execute(_TRY, {"key": self._key}).scalar_one())

    def _try_after_ourselves(self, connection: sqlalchemy.Connection) -> bool:
        """Take the lock from a connection of our own that broke, if the server has not noticed."""
        row = _lock_row(connection, self._key)
        if row is None or row[0] != self._name:
            return False
        connection.execute(_TERMINATE, {"process": row[2]})
        deadline = self.patience.clock() + _GRACE_SECONDS
        while not (is_ours := self._try(connection)) and self.patience.clock() < deadline:
            self.patience.sleep(0.05)
        return is_ours

    def _refuse_pooler(self, connection: sqlalchemy.Connection) -> None:
        """Refuse a pooler that hands a session of the server to one client after another.

        A pooler names a process that is none of the server's. Where a second connection comes to
        the same process as the first, the lock would be everybody's.
        """
        driver: Any = connection.connection.dbapi_connection
        if (process := _process(connection)) == driver.info.backend_pid:
            return
        with connect_apart(self.url, application_name="sweep", patience=self.patience) as second:
            if _process(second) == process:
                raise EnvironmentFault(
                    f"database {self.url}: a connection pooler in transaction mode, which cannot "
                    "hold a study's lock; name the server itself, or the pooler's session mode"
                )

    def is_held(self) -> bool:
        """Whether the connection that holds the lock is alive, and still the same session."""
        if self._connection is None:
            return False
        try:
            return _process(self._connection) == self._process
        except SQLAlchemyError:
            return False

    def release(self) -> None:
        """Give it up; the server drops the lock with the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError):
                connection.close()

    def holder(self) -> Holder | None:
        """Return who has it now."""
        with connect_apart(
            self.url, application_name="sweep status", patience=self.patience
        ) as connection:
            return _advisory_holder(connection, self._key)


def _process(connection: sqlalchemy.Connection) -> int:
    return int(connection.execute(_PROCESS).scalar_one())


def _lock_row(connection: sqlalchemy.Connection, key: int) -> tuple[str, Any, int] | None:
    """Return the name, the start and the process of the session that has a lock."""
    high, low = (key >> 32) & 0xFFFFFFFF, key & 0xFFFFFFFF
    row = connection.execute(_HOLDER, {"high": high, "low": low}).first()
    return None if row is None else (str(row.application_name), row.backend_start, int(row.pid))


def _advisory_holder(connection: sqlalchemy.Connection, key: int) -> Holder | None:
    row = _lock_row(connection, key)
    if row is None:
        return None
    name, start, _ = row
    since = None if start is None else start.astimezone(UTC).isoformat(timespec="seconds")
    words = name.removeprefix("sweep ").split()
    return Holder(words[0] if words else "another process", since)
