"""Owns the lease on a PostgreSQL server: an advisory lock, and whose session has it.

The server drops the lock with the session, however its client ends. Knows nothing of trials.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import sqlalchemy
from sqlalchemy.exc import SQLAlchemyError

from search_spaces.errors import EnvironmentFault
from storage.database import connect_apart
from storage.holder import Holder, holder_of, session_name, taken
from storage.patience import Patience
from storage.pooler import refuse_shared_sessions, server_process
from storage.urls import PostgresUrl

if TYPE_CHECKING:
    # The driver is an extra.
    from storage.postgres import WatchedConnection

_GRACE_SECONDS = 1.0
"""What the server takes to end a session of ours that broke."""
# Several applications may take such locks in one database: keys that are no study's are dropped.
_LOCKS = sqlalchemy.text(
    "SELECT CAST(l.classid AS bigint) AS high, CAST(l.objid AS bigint) AS low, "
    "a.application_name, a.pid "
    "FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
    "WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
    "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_TRY = sqlalchemy.text("SELECT pg_try_advisory_lock(:key)")
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
    _name: str = field(init=False, default="")
    """Of the session that has or had it: this driver's alone."""

    def acquire(self) -> None:
        """Take the lease."""
        self.release()
        former, self._name = self._name, session_name()
        connection = self._connect(self._name)
        try:
            held = _locks(connection).get(_key(self.study))
            if held is not None and held.application_name != former:
                raise self._taken(connection)
            refuse_shared_sessions(connection, self.url, another=partial(self._connect, "sweep"))
            if not self._try(connection) and not self._try_after(former, connection):
                raise self._taken(connection)
            self._process = server_process(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _taken(self, connection: sqlalchemy.Connection) -> EnvironmentFault:
        return taken(self.study, holders(connection, [self.study]).get(self.study))

    def _connect(self, name: str) -> sqlalchemy.Connection:
        return connect_apart(self.url, application_name=name, patience=self.patience)

    def _try(self, connection: sqlalchemy.Connection) -> bool:
        return bool(connection.execute(_TRY, {"key": _key(self.study)}).scalar_one())

    def _try_after(self, former: str, connection: sqlalchemy.Connection) -> bool:
        """Take the lock from a session of our own that broke, if the server has not noticed."""
        row = _locks(connection).get(_key(self.study))
        if row is None or not former or row.application_name != former:
            return False
        connection.execute(_TERMINATE, {"process": row.pid})
        deadline = self.patience.clock() + _GRACE_SECONDS
        while not (is_ours := self._try(connection)) and self.patience.clock() < deadline:
            self.patience.sleep(0.05)
        return is_ours

    def is_held(self) -> bool:
        """Whether the connection that holds the lock is alive, and still the same session."""
        session = self._session
        return session is not None and session.server_process() == self._process

    def lend(self) -> WatchedConnection | None:
        """Lend the connection that holds the lock to who writes: a driver then has one in all.

        None where it is lent already, or gone: the next `is_held` will tell.
        """
        session = self._session
        return session if session is not None and session.lend() else None

    @property
    def _session(self) -> WatchedConnection | None:
        if self._connection is None:
            return None
        session: Any = self._connection.connection.dbapi_connection
        return cast("WatchedConnection | None", session)

    def release(self) -> None:
        """Give it up; the server drops the lock with the connection."""
        session, connection, self._connection = self._session, self._connection, None
        if session is not None:
            session.end()
        if connection is not None:
            with suppress(SQLAlchemyError):
                connection.close()

    def holder(self) -> Holder | None:
        """Return who has it now."""
        with self._connect("sweep status") as connection:
            return holders(connection, [self.study]).get(self.study)


def holders(connection: sqlalchemy.Connection, studies: Iterable[str]) -> dict[str, Holder]:
    """Return who drives each of some studies, by its name; nothing of what nobody drives.

    One statement, however many they are.
    """
    locks = _locks(connection)
    found = {study: locks[key] for study in studies if (key := _key(study)) in locks}
    return {study: holder_of(row.application_name or "") for study, row in found.items()}


def _locks(connection: sqlalchemy.Connection) -> dict[int, Any]:
    """Return the sessions that have advisory locks in this database, by key."""
    return {_signed(row.high << 32 | row.low): row for row in connection.execute(_LOCKS)}


def _key(study: str) -> int:
    digest = hashlib.sha256(f"qlora-sweep:{study}".encode()).digest()
    return int.from_bytes(digest[:8], signed=True)


def _signed(value: int) -> int:
    return int.from_bytes(value.to_bytes(8), signed=True)
