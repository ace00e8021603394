"""The right to drive a study: one driver at a time, freed by the system when that one dies.

For SQLite a lock on a file beside the database. On PostgreSQL an advisory lock of the one
connection through which a driver writes: where that is lost, so is the lock, and the next
connection has to take it again before anything is written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import sqlalchemy

from search_spaces.errors import EnvironmentFault
from storage import files
from storage.database import Storage, close, engine_options, is_direct, open_for_writing, opening
from storage.urls import DatabaseUrl, PostgresUrl, SqliteUrl

_GRACE_SECONDS = 1.0
"""A reader that looks who holds a lock holds it for an instant, and a session that was closed
takes a moment to end: a driver waits that out."""
_APPLICATION = 1903980641
"""The first half of each study's key: other applications may take such locks, too."""
_NAMED = re.compile(r"sweep (\S+) ([0-9a-f]{8})[0-9a-f]{6}")
"""A session's name: who drives, the second in which it began, and what tells it from others."""
_NAME_BYTES = 63
_HELD = f"""SELECT CAST(l.objid AS bigint) AS key, a.application_name AS name, a.pid
FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.classid = {_APPLICATION}
AND l.objsubid = 2 AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


@dataclass(frozen=True)
class Holder:
    """Who drives a study."""

    who: str
    """``host:pid``."""
    since: str | None = None
    """UTC, ISO 8601; None where that is not known."""

    def __str__(self) -> str:
        return self.who if self.since is None else f"{self.who} since {self.since}"


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
        lease.acquire()
        undo(lease.release)
        return storage
    session = _Session(url, study)
    with opening(url):
        engine = sqlalchemy.create_engine(
            url.text, **engine_options(url, name=session.name, connected=session.lock)
        )
        undo(engine.dispose)
        # Nothing is created through what nothing can be driven.
        engine.connect().close()
    storage = open_for_writing(url)
    close(storage)
    storage.engine = engine
    storage.scoped_session.configure(bind=engine)
    return storage


def holders(
    engine: sqlalchemy.Engine, url: DatabaseUrl, studies: Iterable[str]
) -> dict[str, Holder]:
    """Return who drives each of some studies, on whatever host; nothing of what nobody drives.

    Args:
        engine: of the database; a server is asked once for all of them.
        url: of the database.
        studies: their names.
    """
    if isinstance(url, SqliteUrl):
        found = {study: FileLease(url.path, study).holder() for study in studies}
        return {study: holder for study, holder in found.items() if holder is not None}
    with engine.connect() as connection:
        names = {row.key: row.name for row in connection.execute(sqlalchemy.text(_HELD))}
    return {study: _holder_of(names[_key(study)]) for study in studies if _key(study) in names}


def _taken(study: str, holder: Holder | None) -> EnvironmentFault:
    return EnvironmentFault(
        f"study '{study}' is driven by {holder or 'another process'}; wait for it, stop it, "
        "or start another study with --study"
    )


def _tried(attempt: Callable[[], bool]) -> bool:
    """Return whether something went well within a moment."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while not (is_done := attempt()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_done


@dataclass(eq=False)
class FileLease:
    """A lock on ``<database>.<study>.lock``, a file that names its holder and stays behind."""

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
            self._file = files.open_append(self.path)
            if not _tried(self._lock):
                self.release()
                raise _taken(self.study, self._written())
            self._file.truncate(0)
            os.write(self._file.fileno(), f"{this_driver()} {_iso(time.time())}\n".encode())
        except OSError as error:
            self.release()
            has_no_locks = error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)
            advice = "; put the database on a local disk" if has_no_locks else ""
            raise EnvironmentFault(
                f"cannot lock the study by {self.path}: {error.strerror}{advice}"
            ) from error

    def _lock(self) -> bool:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Whoever has a file of that name by now has the lease.
        return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())

    def release(self) -> None:
        """Give it up. Idempotent."""
        if self._file is not None:
            self._file.close()

    def holder(self) -> Holder | None:
        """Return who has it now, ourselves included; None where nobody does. Creates nothing."""
        try:
            with files.open_reading(self.path) as file:
                # A shared lock waits for nobody but the driver.
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
        return Holder(*words) if len(words) == 2 else Holder("another process")


class _Session:
    """What the connections of one driver to a server have in common.

    Two containers may well have a host's name and a process in common, so each has a name.
    """

    def __init__(self, url: PostgresUrl, study: str) -> None:
        self._url, self._study = url, study
        own = f"{int(time.time()):08x}{secrets.token_hex(3)}"
        # A name of many letters loses its first ones; bytes are what is counted.
        who = this_driver().encode()[-(_NAME_BYTES - len(f"sweep  {own}")) :]
        self.name = f"sweep {who.decode(errors='ignore')} {own}"

    def lock(self, connection: Any) -> None:
        """Take the study's lock for a new connection, which is in autocommit.

        Raises:
            EnvironmentFault: another driver has it, or a pooler shares its sessions.
        """
        key = _key(self._study)

        def attempt() -> bool:
            held = connection.execute(f"{_HELD} AND l.objid = {key}").fetchone()
            if held is not None and held[1] == self.name:
                # A connection of our own that broke, which the server has not noticed.
                connection.execute("SELECT pg_terminate_backend(%s)", (held[2],))
            query = "SELECT pg_try_advisory_lock(%s, %s)"
            return held is None and bool(
                connection.execute(query, (_APPLICATION, key)).fetchone()[0]
            )

        self._refuse_shared_sessions(connection)
        if not _tried(attempt):
            held = connection.execute(f"{_HELD} AND l.objid = {key}").fetchone()
            raise _taken(self._study, None if held is None else _holder_of(held[1]))

    def _refuse_shared_sessions(self, connection: Any) -> None:
        """Raise where a pooler gives our session to its next client after each statement."""
        if is_direct(connection):
            return
        process = connection.execute("SELECT pg_backend_pid()").fetchone()
        with type(connection).connect(connection.info.dsn, password=connection.info.password) as o:
            if o.execute("SELECT pg_backend_pid()").fetchone() == process:
                raise EnvironmentFault(
                    f"database {self._url}: a connection pooler in transaction mode, which cannot "
                    "hold a study's lock; name the server itself, or the pooler's session mode"
                )


def _holder_of(session: str) -> Holder:
    found = _NAMED.match(session or "")
    if found is None:
        return Holder("another process")
    return Holder(found[1], _iso(int(found[2], 16)))


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _key(study: str) -> int:
    return zlib.crc32(study.encode()) & 0x7FFFFFFF
