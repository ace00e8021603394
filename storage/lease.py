"""The right to drive a study: one driver at a time, freed by the system when that one dies.

For SQLite a lock on a file beside the database. On PostgreSQL an advisory lock of the one
connection through which a driver writes: where that is lost, so is the lock, and the next
connection has to take it again before anything is written.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import sqlalchemy

from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.storage import files
from qlora_sweep.storage.database import (
    Storage,
    close,
    engine_options,
    faults,
    is_direct,
    open_for_writing,
)
from qlora_sweep.storage.urls import DatabaseUrl, PostgresUrl, SqliteUrl

_GRACE_SECONDS = 1.0
"""A reader that looks who holds a lock holds it for an instant, and a session that was closed
takes a moment to end: a driver waits that out."""
_NAMED = re.compile(r"sweep (\S+) ([0-9a-f]{8})[0-9a-f]{6}")
"""A session's name: who drives, the second in which it began, and what tells it from others."""
_NAME_BYTES = 63
_KEY = "((CAST(l.classid AS bigint) << 32) | CAST(l.objid AS bigint))"
"""Of a lock whose key is one number: PostgreSQL shows its halves."""
_HELD = f"""SELECT {_KEY} AS key, a.application_name AS name, a.pid
FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


@dataclass(frozen=True)
class Holder:
    """Who drives a study."""

    who: str = "another process"
    """``host:pid``."""
    since: str | None = None
    """UTC, ISO 8601; None where that is not known."""

    def __str__(self) -> str:
        if self.since is None:
            return self.who
        return f"{self.who} since {self.since}"


def this_driver() -> str:
    """Return ``host:pid`` of this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def open_leased(
    url: DatabaseUrl, study: str, undo: Callable[[Callable[[], None]], object]
) -> Storage:
    """Open a database as the one driver of a study.

    Args:
        url: of the database, which is created where it is missing.
        study: its name.
        undo: is given what closes it and gives up the lease.

    Raises:
        EnvironmentFault: another process drives it, or the database is not to be had.
    """
    if isinstance(url, SqliteUrl):
        # The lock is a file beside the database, whose directory is made first.
        storage = open_for_writing(url)
        undo(storage.engine.dispose)
        lease = FileLease(url.path, study)
        undo(lease.release)
        lease.acquire()
        return storage
    own = f"{int(time.time()):08x}{secrets.token_hex(3)}"
    # Of a long name the first letters go; bytes are what is counted.
    who = this_driver().encode()[-(_NAME_BYTES - len(f"sweep  {own}")) :]
    name = f"sweep {who.decode(errors='ignore')} {own}"
    with faults(url):
        options = engine_options(url, name=name, connected=lambda c: _lock(c, url, study, name))
        engine = sqlalchemy.create_engine(url.text, **options)
        undo(engine.dispose)
        # Before anything is created: where this connection fails, no study can be driven.
        engine.connect().close()
    storage = open_for_writing(url)
    close(storage)
    storage.engine = engine
    storage.scoped_session.configure(bind=engine)
    return storage


def holders(
    engine: sqlalchemy.Engine, url: DatabaseUrl, studies: Iterable[str]
) -> dict[str, Holder]:
    """Return who drives each of some studies, on whatever host, of those that are driven.

    Args:
        engine: of the database; a server is asked once for all of them.
        url: of the database.
        studies: their names.
    """
    found = {}
    if isinstance(url, SqliteUrl):
        for study in studies:
            holder = FileLease(url.path, study).holder()
            if holder is not None:
                found[study] = holder
        return found
    with engine.connect() as connection:
        names = {row.key: row.name for row in connection.execute(sqlalchemy.text(_HELD))}
    for study in studies:
        if _key(study) in names:
            found[study] = _holder_of(names[_key(study)])
    return found


def _take(attempt: Callable[[], bool], study: str, holder: Callable[[], Holder | None]) -> None:
    """Take a lease within a moment. Raises `EnvironmentFault` where another driver has it."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while not attempt():
        if time.monotonic() > deadline:
            driven = f"study '{study}' is driven by {holder() or Holder()}"
            raise EnvironmentFault(f"{driven}; wait for it, stop it, or take another --study")
        time.sleep(0.05)


@dataclass(eq=False)
class FileLease:
    """A lock on ``<database>.<study>.lock``, a file that names its holder and stays until the
    study is removed."""

    database: Path
    study: str
    _file: IO[bytes] | None = field(default=None, init=False)

    @property
    def path(self) -> Path:
        """The lock file."""
        return self.database.with_name(f"{self.database.name}.{self.study}.lock")

    def acquire(self) -> None:
        """Take the lease. Raises `EnvironmentFault` naming the holder where another has it."""
        try:
            if self.path.exists() and self.path.stat().st_nlink > 1:
                # Another name's lock would be another lock.
                raise OSError(errno.EMLINK, "it is a hard link; remove its other name")
            self._file = file = files.open_append(self.path)
            _take(self._lock, self.study, self._written)
            file.truncate(0)
            os.write(file.fileno(), f"{this_driver()} {_iso(time.time())}\n".encode())
        except OSError as error:
            why = error.strerror
            if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
                why = f"{why}; put the database on a local disk"
            raise EnvironmentFault(f"cannot lock the study by {self.path}: {why}") from error

    def _lock(self) -> bool:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Another process may have replaced the file: the one that has the name holds the lease.
        return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())

    def release(self) -> None:
        """Give it up. Idempotent."""
        if self._file is not None:
            self._file.close()

    def holder(self) -> Holder | None:
        """Return who has it now, ourselves included; None where it is free. Creates nothing."""
        try:
            with files.open_reading(self.path) as file:
                # A shared lock conflicts with the driver's alone.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._written()
        except FileNotFoundError:
            return None
        except OSError as error:
            return Holder(f"somebody, perhaps ({self.path}: {error.strerror})")
        return None

    def _written(self) -> Holder:
        words = files.read_bytes(self.path).decode(errors="replace").split()
        if len(words) != 2:
            return Holder()
        return Holder(*words)


def _lock(connection: Any, url: PostgresUrl, study: str, name: str) -> None:
    """Take a study's lock for a new connection to a server, which is in autocommit.

    Args:
        connection: psycopg's.
        url: of the database.
        study: its name.
        name: of this driver's sessions.

    Raises:
        EnvironmentFault: another driver has it, or a pooler shares its sessions.
    """
    key = _key(study)

    def ask(query: str, *values: object) -> Any:
        return connection.execute(query, values).fetchone()

    def holder() -> Holder | None:
        held = ask(f"{_HELD} AND {_KEY} = {key}")
        return held and _holder_of(held[1])

    def attempt() -> bool:
        held = ask(f"{_HELD} AND {_KEY} = {key}")
        if held is not None and held[1] == name:
            # A connection of our own that broke, which the server has not noticed.
            ask("SELECT pg_terminate_backend(%s)", held[2])
        return held is None and bool(ask("SELECT pg_try_advisory_lock(%s::bigint)", key)[0])

    process = ask("SELECT pg_backend_pid()")
    info = connection.info
    if not is_direct(connection):
        with type(connection).connect(info.dsn, password=info.password) as other:
            # A session that is another client's after each statement holds no lock.
            is_shared = other.execute("SELECT pg_backend_pid()").fetchone() == process
        if is_shared:
            pooler = "a connection pooler in transaction mode, which cannot hold a study's lock"
            raise EnvironmentFault(f"database {url}: {pooler}; name the server, or session mode")
    _take(attempt, study, holder)


def _holder_of(session: str) -> Holder:
    found = _NAMED.match(session or "")
    if found is None:
        return Holder()
    return Holder(found[1], _iso(int(found[2], 16)))


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _key(study: str) -> int:
    """Return a study's key, in 63 bits; other applications take such locks, too."""
    digest = hashlib.sha256(f"qlora-sweep {study}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
