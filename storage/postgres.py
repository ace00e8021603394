"""Owns connections to PostgreSQL on which no wait is endless, and which Ctrl-C ends at once.

What keeps a link alive in the kernel sees nothing of a server that is stopped: the kernel goes on
acknowledging for it. So each answer is also waited for here, on this side's clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import psycopg
from psycopg import waiting
from psycopg.pq import TransactionStatus
from sqlalchemy.engine import make_url

from storage.patience import LOOK_SECONDS, Patience, SilentError
from storage.urls import PostgresUrl

_SILENT_LINK = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""In seconds, and the last in milliseconds: what was sent must be acknowledged within that time."""
_WRITER = {
    "lock_timeout": "5s",
    "statement_timeout": "40s",
    # Locks of a transaction whose client is gone must be free before its next attempts give up.
    "idle_in_transaction_session_timeout": "15s",
}
_READER = {
    "lock_timeout": "10s",
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "10min",
}
_KEPT = {"idle_session_timeout": "0"}
"""A study's lease is silent for as long as its trials last."""
_HELD = {
    # The server would otherwise keep the lock of a vanished host for hours.
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "60s",
}
# A version that does not know a setting goes without it. Behind a pooler, which names a process
# of its own, the session is somebody else's a moment later: nothing of it is changed.
_SET = (
    "SELECT pg_catalog.set_config(s.name, wanted.value, false) "
    "FROM unnest(%s::text[], %s::text[]) AS wanted (name, value) "
    "JOIN pg_catalog.pg_settings s ON s.name = wanted.name WHERE pg_catalog.pg_backend_pid() = %s"
)


class WatchedConnection(psycopg.Connection[Any]):  # type: ignore[misc] # psycopg's is Any here
    """A connection that waits no longer than its patience."""

    patience: Patience
    is_lent: bool = False
    """Whether somebody else uses it, who closes it for giving it back."""
    has_failed: bool = False
    """Whether a statement failed on it, for what may be its session's own: it is lent no more."""

    def lend(self) -> bool:
        """Let somebody else use it in transactions of their own; False where it is of no use."""
        is_idle = self.info.transaction_status is TransactionStatus.IDLE
        if self.is_lent or self.has_failed or self.closed or not is_idle:
            return False
        self.is_lent, self.autocommit = True, False
        return True

    def close(self) -> None:
        """Close it, or give it back as it was lent."""
        if self.is_lent and not self.closed:
            with suppress(psycopg.Error):
                if self.info.transaction_status is not TransactionStatus.IDLE:
                    self.rollback()
                self.is_lent, self.autocommit = False, True
                return
        super().close()

    def end(self) -> None:
        """Close it, whoever uses it."""
        self.is_lent = False
        self.close()

    def server_process(self) -> int | None:
        """Return which of the server's processes answers; None where none does.

        No transaction is begun by it that goes on.
        """
        is_within = self.info.transaction_status is not TransactionStatus.IDLE
        try:
            row = self.execute("SELECT pg_backend_pid()").fetchone()
            if not is_within and not self.autocommit:
                self.rollback()
        except psycopg.Error:
            return None
        return None if row is None else int(row[0])

    def wait(
        self,
        gen: Generator[Any, Any, Any],
        interval: float = LOOK_SECONDS,
        timeout: float | None = None,
    ) -> Any:
        """Wait for the server while its patience lasts.

        psycopg's own asks the server to cancel what it is at when it is interrupted, which takes
        ten seconds of a server that is silent. Here the connection is given up.
        """
        try:
            # The one of its ways to wait that says in every version when nothing came.
            return waiting.wait_selector(
                _watched(gen, self.patience), self.pgconn.socket, interval=interval
            )
        except SilentError as silence:
            self.pgconn.finish()
            raise psycopg.OperationalError(str(silence)) from None
        except BaseException as error:
            if not isinstance(error, psycopg.Error):
                # An answer that may still come would be taken for that to something else.
                self.pgconn.finish()
            raise


def _watched(gen: Generator[Any, Any, Any], patience: Patience) -> Generator[Any, Any, Any]:
    """Pass on what psycopg waits for, and look at the patience whenever nothing came of it."""
    is_first, asked_seconds = patience.begin(), patience.clock()
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if ready:
                asked_seconds = patience.clock()
            else:
                patience.look(asked_seconds=asked_seconds)
            wanted = gen.send(ready)
    except StopIteration as answered:
        if is_first:
            patience.end()
        return answered.value


class Connector:
    """Opens connections, for SQLAlchemy.

    Args:
        url: of the database; what it says of timeouts goes before ours.
        patience: ends each wait, that for the connection too.
        is_reader: may wait longer between two statements.
        application_name: what other sessions know it by; a lease's connection has one.
        borrow: lends a connection that is there already; None where it has none to lend.
    """

    def __init__(
        self,
        url: PostgresUrl,
        patience: Patience,
        *,
        is_reader: bool = False,
        application_name: str = "",
        borrow: Callable[[], WatchedConnection | None] = lambda: None,
    ) -> None:
        parsed = make_url(url.text)
        _, typed = parsed.get_dialect()().create_connect_args(parsed)
        ours: dict[str, Any] = {"connect_timeout": patience.connect_seconds, **_SILENT_LINK}
        if application_name:
            ours["application_name"] = application_name
        # Poolers hand each statement to another server process, which knows of nothing prepared.
        self._arguments = {**ours, **typed, "prepare_threshold": None}
        self._settings = (_READER if is_reader else _WRITER) | _KEPT
        if application_name:
            self._settings |= _HELD
        self._patience = patience
        self._borrow = borrow
        self._opened: WeakSet[WatchedConnection] = WeakSet()

    def __call__(self) -> WatchedConnection:
        """Return a new connection, or one that is lent."""
        lent = self._borrow()
        if lent is not None:
            return lent
        connection = _beside(lambda: WatchedConnection.connect(**self._arguments), self._patience)
        connection.patience = self._patience
        try:
            _configure(connection, self._settings)
        except BaseException:
            connection.close()
            raise
        self._opened.add(connection)
        return connection

    def close(self) -> None:
        """Close all that it opened, for whom an error has kept from it."""
        for connection in list(self._opened):
            connection.close()


def _configure(connection: WatchedConnection, settings: dict[str, str]) -> None:
    """Bound what the server does for this session, for a client that it loses sight of."""
    connection.autocommit = True
    values = list(settings), list(settings.values()), connection.info.backend_pid
    connection.execute(_SET, values)
    connection.autocommit = False


def _beside(connect: Callable[[], WatchedConnection], patience: Patience) -> WatchedConnection:
    """Connect in a thread of its own, while this one can be interrupted.

    The system's look-up of a name can be neither bounded nor cut short.
    """
    future: Future[WatchedConnection] = Future()

    def work() -> None:
        try:
            future.set_result(connect())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    is_first = patience.begin()
    try:
        while not wait([future], timeout=LOOK_SECONDS).done:
            # Each address has its own time; all of them have what is left.
            patience.look(asked_seconds=patience.clock())
    except SilentError as silence:
        future.add_done_callback(_close)
        raise psycopg.OperationalError(str(silence)) from None
    except BaseException:
        future.add_done_callback(_close)
        raise
    connection = future.result()
    if is_first:
        patience.end()
    return connection


def _close(late: Future[WatchedConnection]) -> None:
    """Close a connection that nobody waits for any more."""
    with suppress(psycopg.Error):
        late.result().close()
