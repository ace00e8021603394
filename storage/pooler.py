"""Owns whether a pooler is between this process and a server, and whether it can be driven through.

A lease is a session's. A pooler that hands a session from one client to the next after each
transaction would leave the lock with whoever comes next: everybody, or nobody, would have it.
"""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy
from sqlalchemy.exc import SQLAlchemyError

from search_spaces.errors import EnvironmentFault
from storage.failures import is_pool_spent
from storage.urls import PostgresUrl

_NOTICE_SECONDS = 5.0
"""What a notice takes through a session of one's own is milliseconds."""
_PROCESS = sqlalchemy.text("SELECT pg_backend_pid()")
_NOTIFY = sqlalchemy.text("SELECT pg_notify(:channel, '')")


def server_process(connection: sqlalchemy.Connection) -> int:
    """Return which of the server's processes answers."""
    return int(connection.execute(_PROCESS).scalar_one())


def refuse_shared_sessions(
    connection: sqlalchemy.Connection, url: PostgresUrl, *, another: Callable[[], Any]
) -> None:
    """Raise where a session of the server is not one client's for as long as that is connected.

    A notice reaches a session that listens while its client is idle. Where that client has no
    session between two transactions there is nobody to hand it to. Comparing which of the server's
    processes answer is not enough: a pool of several may well give two clients two of them.

    Args:
        connection: in autocommit, of which that is asked.
        url: of the database.
        another: opens another connection.

    Raises:
        EnvironmentFault: it is shared, or the pooler has no three of them, as many as a driver
            needs to create the tables.
    """
    process, channel = server_process(connection), f"sweep_{secrets.token_hex(8)}"
    # What greets us in between names a process that is none of the server's.
    if process == _driver(connection).info.backend_pid:
        return
    # Not taken back where the session is shared: whose it would be by then nobody knows.
    connection.exec_driver_sql(f"LISTEN {channel}")
    try:
        with another() as second, another() as third:
            is_shared = process in (server_process(second), server_process(third))
            if not is_shared:
                second.execute(_NOTIFY, {"channel": channel})
    except SQLAlchemyError as error:
        if is_pool_spent(error):
            raise EnvironmentFault(
                f"database {url}: a connection pooler that has no three connections to the server "
                "for us, which a driver needs while it starts: raise its pool size "
                "(default_pool_size, pool_size), or name the server itself"
            ) from None
        raise
    if is_shared or not _hears(connection, channel):
        raise EnvironmentFault(
            f"database {url}: a connection pooler in transaction mode, which cannot "
            "hold a study's lock; name the server itself, or the pooler's session mode"
        )
    connection.exec_driver_sql(f"UNLISTEN {channel}")


def _hears(connection: sqlalchemy.Connection, channel: str) -> bool:
    """Whether a notice comes while this client asks for nothing, which would get it a session."""
    wire = _driver(connection).pgconn
    deadline = time.monotonic() + _NOTICE_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        select.select([wire.socket], [], [], left)
        wire.consume_input()
        while (notice := wire.notifies()) is not None:
            if notice.relname == channel.encode():
                return True
    return False


def _driver(connection: sqlalchemy.Connection) -> Any:
    return connection.connection.dbapi_connection
