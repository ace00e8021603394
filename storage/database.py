"""Owns the way to a database: open it, outlast the faults that pass, translate the others.

The one module that opens Optuna's storages and SQLAlchemy's engines. Knows nothing of trials.
"""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import sqlalchemy
from sqlalchemy.pool import NullPool

from search_spaces.errors import EnvironmentFault, install_extra
from search_spaces.redaction import redact
from storage import files
from storage.failures import (
    BeingCreatedError,
    InDoubtError,
    causes,
    failures,
    is_passing,
    is_passing_at_first,
    reason,
    state,
)
from storage.patience import PATIENCE, READER, Patience
from storage.tables import SCHEMA, schema_of
from storage.urls import DatabaseUrl, PostgresUrl, SqliteUrl

if TYPE_CHECKING:
    # What only looks at a study does without Optuna, which takes longer to import than to read.
    from optuna.storages import RDBStorage

    from storage.postgres import Connector, WatchedConnection
    from storage.sampler_view import SearchStorage

T = TypeVar("T")
Borrow = Callable[[], "WatchedConnection | None"]

_WRITER_SECONDS = 2.0
"""How long a writer's SQLite statement waits for other processes, before it is tried again."""
_READER_SECONDS = 10.0
"""The same for a reader, which does not try again."""
_PAUSE_MOST_SECONDS = 3.0
# Of two numbers, as no study's lock is.
_TRY_CREATING = sqlalchemy.text("SELECT pg_try_advisory_lock(1903980641, 1)")
_CREATED = sqlalchemy.text("SELECT pg_advisory_unlock(1903980641, 1)")
_KEPT_CONNECTIONS = {"pool_size": 1, "max_overflow": 4}
"""A driver needs a second one for moments; what it keeps, each of a team holds for hours."""


def patiently(
    action: Callable[[], T],
    *,
    patience: Patience,
    before_retry: Callable[[], None] = lambda: None,
    storage: RDBStorage | None = None,
    passes: Callable[[BaseException], bool] = is_passing,
) -> T:
    """Return ``action()``, tried again with growing pauses while it fails for a reason that passes.

    Args:
        action: must be safe to repeat, also where it did all that it should and nobody was told.
        patience: how long to go on.
        before_retry: tidies up what a failed attempt may have left.
        storage: what it goes through; each further attempt has a session and connections of its
            own, as an earlier one's may be of no use any more.
        passes: whether a failure may pass.

    Raises:
        Interrupted: somebody asked to stop meanwhile.
    """
    pause, is_again = 0.1, False
    try:
        while True:
            try:
                if is_again:
                    if storage is not None:
                        close(storage)
                    before_retry()
                return action()
            except failures() as error:
                if not passes(error):
                    raise
                patience.begin(state(error))
                if patience.waited_seconds() + pause > patience.seconds:
                    raise
            patience.pause(pause)
            pause, is_again = min(2 * pause, _PAUSE_MOST_SECONDS), True
    finally:
        patience.end()


def close(storage: RDBStorage) -> None:
    """Let go of a session and of all connections, in whatever state a failure has left them."""
    try:
        storage.remove_session()
    except failures():
        # It rolls back over a connection that is gone; the next session has another.
        storage.scoped_session.registry.clear()
    storage.engine.dispose()


def open_for_writing(
    url: DatabaseUrl, *, patience: Patience | None = None, borrow: Borrow = lambda: None
) -> SearchStorage:
    """Open the database, created where it is missing.

    Args:
        url: of the database.
        patience: how long a server that is there is waited for, where it is not ready or cuts the
            connection; one that cannot be reached is said at once.
        borrow: lends a connection to a server that is there already.

    Raises:
        EnvironmentFault: the directory, the file or the server is not to be had.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    patience = patience or replace(PATIENCE)
    with opening(url):
        match url:
            case SqliteUrl():
                create, passes = partial(_create_file, url), _is_creation_race
            case PostgresUrl():
                create, passes = partial(_create_on_server, url, patience, borrow), _passes_at_first
        # Of processes that create tables at once one is first, and the others try again.
        storage = patiently(create, patience=patience, passes=passes)
        sqlalchemy.event.listen(storage.engine, "handle_error", _raise_in_doubt)
    return storage


def open_for_reading(url: DatabaseUrl) -> RDBStorage | None:
    """Open the database without ever writing to it; None where it holds no studies yet.

    Raises:
        EnvironmentFault: the file or the server is not to be had.
    """
    from optuna.storages import RDBStorage

    with opening(url):
        options = _reader(url)
        if options is None:
            return None
        text = _optuna_text(url)
        storage = RDBStorage(text, engine_kwargs=dict(options), skip_table_creation=True)
        _read_at_once(storage.engine)
    return storage


@contextmanager
def reader_of(url: DatabaseUrl) -> Iterator[sqlalchemy.Engine | None]:
    """Open the database for statements that only read, each connection's of one moment.

    None where it holds no studies yet. Whatever fails meanwhile is translated.

    Raises:
        EnvironmentFault: the file or the server is not to be had.
    """
    with opening(url):
        options = _reader(url)
        engine = None if options is None else _plain_engine(url, options)
        if engine is not None:
            _read_at_once(engine)
    try:
        with faults(url):
            yield engine
    finally:
        if engine is not None:
            engine.dispose()


def _reader(url: DatabaseUrl) -> dict[str, Any] | None:
    """Return how an engine is made that never writes; None where there are no studies yet."""
    options: dict[str, Any]
    match url:
        case SqliteUrl():
            if not _is_file(url):
                return None
            options = {"creator": lambda: _connect(url, is_reader=True)}
        case PostgresUrl():
            execution = {"postgresql_readonly": True, "isolation_level": "REPEATABLE READ"}
            connect = _connector(url, replace(READER), is_reader=True)
            options = {"execution_options": execution, "creator": connect}
    return None if _schema(url, options) is None else options


def _read_at_once(engine: sqlalchemy.Engine) -> None:
    if engine.dialect.name == "sqlite":
        # One snapshot per session, so that a trial's state and its attributes belong together.
        _begin_with(engine, "BEGIN")


def connect_apart(
    url: PostgresUrl, *, application_name: str, patience: Patience
) -> sqlalchemy.Connection:
    """Return a connection of its own, in autocommit, under a name that other sessions can read."""
    connector = _connector(url, patience, application_name=application_name)
    engine = sqlalchemy.create_engine(
        url.text, poolclass=NullPool, isolation_level="AUTOCOMMIT", creator=connector
    )
    try:
        return engine.connect()
    except BaseException:
        # What SQLAlchemy asks a new connection first may fail too, and it lets go of it unclosed.
        connector.close()
        raise


def _connector(url: PostgresUrl, patience: Patience, **options: Any) -> Connector:
    # Imported here: the driver is an extra.
    from storage.postgres import Connector

    return Connector(url, patience, **options)


@contextmanager
def faults(url: DatabaseUrl) -> Iterator[None]:
    """Translate what the database or its driver raises to `EnvironmentFault`, without passwords.

    The originals are not chained: they may quote the URL.
    """
    try:
        yield
    except failures() as error:
        raise EnvironmentFault(f"database {url}: {reason(error)}") from None


@contextmanager
def opening(url: DatabaseUrl) -> Iterator[None]:
    """Translate as `faults`, and what only opening can raise: no driver, or what Optuna refuses."""
    try:
        with faults(url):
            yield
    except ImportError:
        raise EnvironmentFault(
            f"database {url}: the PostgreSQL driver is not installed: {install_extra('postgresql')}"
        ) from None
    except RuntimeError as error:
        raise EnvironmentFault(f"database {url}: {redact(str(error))}") from None


def _create_file(url: SqliteUrl) -> SearchStorage:
    _prepare_file(url)
    _schema(url, {"creator": lambda: _connect(url, is_reader=True)})
    storage = _create(url, {"creator": lambda: _connect(url)}, is_there=False)
    # Optuna reads before it writes. A transaction that starts as a reader cannot wait for the write
    # lock without risking a deadlock, so each takes it at its start.
    _begin_with(storage.engine, "BEGIN IMMEDIATE")
    return storage


def _create_on_server(url: PostgresUrl, patience: Patience, borrow: Borrow) -> SearchStorage:
    connector = _connector(url, patience, borrow=borrow)
    options = {"pool_pre_ping": True, "creator": connector, **_KEPT_CONNECTIONS}
    try:
        if _schema(url, {"creator": connector}) is not None:
            storage = _create(url, options, is_there=True)
        else:
            with _creating_alone(_plain_engine(url, {"creator": connector})):
                storage = _create(url, options, is_there=False)
    except BaseException:
        connector.close()
        raise
    sqlalchemy.event.listen(storage.engine, "handle_error", _note_failed)
    return storage


@contextmanager
def _creating_alone(engine: sqlalchemy.Engine) -> Iterator[None]:
    """Keep others of a team that begins at once from creating the same tables meanwhile.

    Each would hold transactions while it reads Optuna's migrations, and fail at the end.
    """
    with engine.connect() as connection:
        is_ours = connection.execute(_TRY_CREATING).scalar_one()
        # The lock is the session's; no transaction stays open for as long as that takes.
        connection.commit()
        if not is_ours:
            raise BeingCreatedError("it is being created")
        try:
            yield
        finally:
            connection.execute(_CREATED)
            connection.commit()


def _note_failed(context: sqlalchemy.ExceptionContext) -> None:
    """Let the next attempt have a session of its own: this one may only read, or know no table."""
    if context.connection is not None and not context.connection.invalidated:
        driver: Any = context.connection.connection.dbapi_connection
        driver.has_failed = True


def _create(url: DatabaseUrl, options: dict[str, Any], *, is_there: bool) -> SearchStorage:
    """Open Optuna's storage for writing.

    Args:
        url: of the database.
        options: of its engine.
        is_there: whether its tables are there, of the version that is known here. To look itself,
            Optuna needs a second connection beside its first.
    """
    from storage.sampler_view import SearchStorage

    text = _optuna_text(url)
    if is_there:
        storage = SearchStorage(
            text,
            engine_kwargs=dict(options),
            skip_table_creation=True,
            skip_compatibility_check=True,
        )
        if storage.get_head_version() == SCHEMA:
            return storage
        # An Optuna that has gone further: it says itself what it makes of them.
        close(storage)
    return SearchStorage(text, engine_kwargs=dict(options))


def _raise_in_doubt(context: sqlalchemy.ExceptionContext) -> None:
    """Raise what Optuna does not know where a transaction may have gone through or not.

    It creates a trial again, up to five times, where one failed. Whoever tries again here looks
    first. A server says of a COMMIT that it failed, and that is so; a file's may fail afterwards.
    """
    error = context.original_exception
    is_lost = context.is_disconnect and not context.is_pre_ping
    is_commit = context.statement is None and context.connection is not None
    if is_lost or (is_commit and isinstance(error, sqlite3.Error)):
        raise InDoubtError("a transaction's outcome is not known") from error


def _connect(url: SqliteUrl, *, is_reader: bool = False) -> sqlite3.Connection:
    """Connect to the file; never creates it, and only reads one that is write-protected."""
    connection = sqlite3.connect(
        f"file:{quote(str(url.path))}?mode=rw",
        uri=True,
        timeout=_READER_SECONDS if is_reader else _WRITER_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    if is_reader:
        connection.execute("PRAGMA query_only = ON")
        # What somebody wrote by hand need not be text; it is for whoever reads it to say so.
        connection.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
    return connection


def _begin_with(engine: sqlalchemy.Engine, statement: str) -> None:
    sqlalchemy.event.listen(
        engine, "begin", lambda connection: connection.exec_driver_sql(statement)
    )


def _optuna_text(url: DatabaseUrl) -> str:
    """Return the URL as Optuna takes it: it formats the text, so braces are doubled."""
    text = url.text if isinstance(url, PostgresUrl) else str(url)
    return text.replace("{", "{{").replace("}", "}}")


def _prepare_file(url: SqliteUrl) -> None:
    """Create directory and file: no connection ever does, so a file that vanishes is noticed."""
    if _is_file(url):
        return
    try:
        files.make_directory(url.path.parent)
        # Another driver may have made it in the meantime. Its journals take on its rights.
        with suppress(FileExistsError):
            files.create(url.path)
    except OSError as error:
        raise EnvironmentFault(f"cannot create database {url}: {error.strerror}") from error


def _is_file(url: SqliteUrl) -> bool:
    try:
        kind = url.path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise EnvironmentFault(f"cannot open database {url}: {error.strerror}") from error
    if stat.S_ISDIR(kind):
        raise EnvironmentFault(f"database {url}: {url.path} is a directory; name a file in it")
    if not stat.S_ISREG(kind):
        raise EnvironmentFault(f"database {url}: {url.path} is no file: remove it, or name another")
    return True


def _schema(url: DatabaseUrl, options: dict[str, Any]) -> str | None:
    """Return the version of the tables that a reader finds; None where there are none yet."""
    engine = _plain_engine(url, options)
    return schema_of(engine, url, unchecked=partial(_storage_of_any_version, url, options))


def _storage_of_any_version(url: DatabaseUrl, options: dict[str, Any]) -> RDBStorage:
    from optuna.storages import RDBStorage

    return RDBStorage(
        _optuna_text(url),
        engine_kwargs=dict(options),
        skip_table_creation=True,
        skip_compatibility_check=True,
    )


def _plain_engine(url: DatabaseUrl, options: dict[str, Any]) -> sqlalchemy.Engine:
    text = url.text if isinstance(url, PostgresUrl) else "sqlite://"
    return sqlalchemy.create_engine(text, poolclass=NullPool, **options)


def _passes_at_first(error: BaseException) -> bool:
    return is_passing_at_first(error) or _is_creation_race(error)


def _is_creation_race(error: BaseException) -> bool:
    words = ("already exists", "UNIQUE constraint", "duplicate key", "locked")
    return any(word in str(cause) for cause in causes(error) for word in words)
