"""Owns the way to a database: open it, translate its errors, outlast the short ones.

The one module that opens Optuna's storages and SQLAlchemy's engines. Knows nothing of trials.
"""

from __future__ import annotations

import sqlite3
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import sqlalchemy
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from search_spaces.errors import EnvironmentFault, install_extra, words_of
from storage.urls import DatabaseUrl, PostgresUrl, SqliteUrl

if TYPE_CHECKING:
    # What only looks at a study does without Optuna, which takes longer to import than to read.
    from optuna.storages import RDBStorage

    from storage.sampler_view import SearchStorage

T = TypeVar("T")

_WRITER_SECONDS = 2.0
"""How long a writer's SQLite statement waits for other processes, before it is tried again."""
_READER_SECONDS = 10.0
"""The same for a reader, which does not try again."""
SCHEMA = "v3.2.0.a"
"""The newest version of Optuna's tables that is known here."""
_CONNECT_SECONDS = 10
_CREATION_ATTEMPTS = 8
_KEEPALIVES = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}


@dataclass(frozen=True)
class Patience:
    """How long to go on trying while a database is locked or away."""

    seconds: float = 60.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


PATIENCE = Patience()


def patiently(
    action: Callable[[], T], *, patience: Patience, before_retry: Callable[[], None] = lambda: None
) -> T:
    """Return ``action()``, tried again with growing pauses while it fails for a reason that passes.

    Args:
        action: must be safe to repeat.
        patience: how long to go on.
        before_retry: tidies up what a failed attempt may have left.
    """
    deadline, pause, attempt = patience.clock() + patience.seconds, 0.1, 0
    while True:
        try:
            if attempt:
                before_retry()
            return action()
        except failures() as error:
            if not _is_transient(error) or patience.clock() + pause > deadline:
                raise
        patience.sleep(pause)
        pause, attempt = min(2 * pause, 8.0), attempt + 1


def open_for_writing(url: DatabaseUrl) -> SearchStorage:
    """Open the database, created where it is missing.

    Raises:
        EnvironmentFault: the directory, the file or the server is not to be had.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with _opening(url):
        match url:
            case SqliteUrl():
                _prepare_file(url)
                storage = _create(url, {"creator": lambda: _connect(url)})
                # Optuna reads before it writes. A transaction that starts as a reader cannot wait
                # for the write lock without risking a deadlock, so each takes it at its start.
                _begin_with(storage.engine, "BEGIN IMMEDIATE")
            case PostgresUrl():
                storage = _create(url, {"pool_pre_ping": True, "connect_args": _arguments()})
    return storage


def open_for_reading(url: DatabaseUrl) -> RDBStorage | None:
    """Open the database without ever writing to it; None where it holds no studies yet.

    Raises:
        EnvironmentFault: the file or the server is not to be had.
    """
    options = _reader(url)
    if options is None:
        return None
    with _opening(url):
        if _schema(url, options) is None:
            return None
        return _storage_for_reading(url, options)


def _storage_for_reading(url: DatabaseUrl, options: dict[str, Any]) -> RDBStorage:
    from optuna.storages import RDBStorage

    storage = RDBStorage(_optuna_text(url), engine_kwargs=dict(options), skip_table_creation=True)
    _read_at_once(storage.engine)
    return storage


@contextmanager
def reader_of(url: DatabaseUrl) -> Iterator[sqlalchemy.Engine | None]:
    """Open the database for statements that only read, each connection's of one moment.

    None where it holds no studies yet. Whatever fails meanwhile is translated.

    Raises:
        EnvironmentFault: the file or the server is not to be had.
    """
    with _opening(url):
        engine = _engine_for_reading(url)
    try:
        with faults(url):
            yield engine
    finally:
        if engine is not None:
            engine.dispose()


def _engine_for_reading(url: DatabaseUrl) -> sqlalchemy.Engine | None:
    options = _reader(url)
    schema = None if options is None else _schema(url, options)
    if options is None or schema is None:
        return None
    if schema != SCHEMA:
        # Optuna knows which others it can read, and says what to do about the rest.
        close(_storage_for_reading(url, options))
    engine = sqlalchemy.create_engine(_plain_text(url), poolclass=NullPool, **options)
    _read_at_once(engine)
    return engine


def _reader(url: DatabaseUrl) -> dict[str, Any] | None:
    """Return how an engine is made that never writes; None where there is no file."""
    match url:
        case SqliteUrl():
            return {"creator": lambda: _connect(url, is_reader=True)} if _is_file(url) else None
        case PostgresUrl():
            execution = {"postgresql_readonly": True, "isolation_level": "REPEATABLE READ"}
            return {"execution_options": execution, "connect_args": _arguments()}


def _read_at_once(engine: sqlalchemy.Engine) -> None:
    if engine.dialect.name == "sqlite":
        # One snapshot per session, so that a trial's state and its attributes belong together.
        _begin_with(engine, "BEGIN")


def close(storage: RDBStorage) -> None:
    """Close every connection of a storage."""
    storage.remove_session()
    storage.engine.dispose()


def connect_apart(url: PostgresUrl, *, application_name: str) -> sqlalchemy.Connection:
    """Return a connection of its own, in autocommit, under a name that other sessions can read."""
    engine = sqlalchemy.create_engine(
        url.text,
        poolclass=NullPool,
        isolation_level="AUTOCOMMIT",
        connect_args={**_arguments(), "application_name": application_name},
    )
    return engine.connect()


@contextmanager
def faults(url: DatabaseUrl) -> Iterator[None]:
    """Translate what the database or its driver raises to `EnvironmentFault`, without passwords.

    The originals are not chained: they may quote the URL.
    """
    try:
        yield
    except failures() as error:
        raise EnvironmentFault(f"database {url}: {_reason(error, url)}") from None


@contextmanager
def _opening(url: DatabaseUrl) -> Iterator[None]:
    """Translate what only opening can raise: no driver, or a schema of another Optuna."""
    try:
        with faults(url):
            yield
    except ImportError:
        raise EnvironmentFault(
            f"database {url}: the PostgreSQL driver is not installed: {install_extra('postgresql')}"
        ) from None
    except RuntimeError as error:
        raise EnvironmentFault(f"database {url}: {_scrubbed(str(error), url)}") from None


def _create(url: DatabaseUrl, options: dict[str, Any]) -> SearchStorage:
    """Open for writing; of two processes that create tables at once, one fails and tries again."""
    from storage.sampler_view import SearchStorage

    for attempt in range(1, _CREATION_ATTEMPTS + 1):
        try:
            return SearchStorage(_optuna_text(url), engine_kwargs=dict(options))
        except failures() as error:
            if attempt == _CREATION_ATTEMPTS or not _is_creation_race(error):
                raise
            time.sleep(0.05 * attempt)
    raise AssertionError("unreachable")


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


def _arguments() -> dict[str, Any]:
    return {"connect_timeout": _CONNECT_SECONDS, **_KEEPALIVES}


def _optuna_text(url: DatabaseUrl) -> str:
    """Return the URL as Optuna takes it: it formats the text, so braces are doubled."""
    text = url.text if isinstance(url, PostgresUrl) else str(url)
    return text.replace("{", "{{").replace("}", "}}")


def _prepare_file(url: SqliteUrl) -> None:
    """Create directory and file: no connection ever does, so a file that vanishes is noticed."""
    if _is_file(url):
        return
    try:
        url.path.parent.mkdir(parents=True, exist_ok=True)
        url.path.touch()
    except OSError as error:
        raise EnvironmentFault(f"cannot create database {url}: {error.strerror}") from error


def _is_file(url: SqliteUrl) -> bool:
    try:
        is_directory = stat.S_ISDIR(url.path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise EnvironmentFault(f"cannot open database {url}: {error.strerror}") from error
    if is_directory:
        raise EnvironmentFault(f"database {url}: {url.path} is a directory; name a file in it")
    return True


def _schema(url: DatabaseUrl, options: dict[str, Any]) -> str | None:
    """Return the version of the tables as Optuna's migrations name it; None where there is none."""
    engine = sqlalchemy.create_engine(_plain_text(url), poolclass=NullPool, **options)
    with engine.connect() as connection:
        if not sqlalchemy.inspect(connection).has_table("alembic_version"):
            return None
        version = sqlalchemy.text("SELECT version_num FROM alembic_version")
        row = connection.execute(version).first()
    return None if row is None else str(row[0])


def _plain_text(url: DatabaseUrl) -> str:
    return url.text if isinstance(url, PostgresUrl) else "sqlite://"


def failures() -> tuple[type[Exception], ...]:
    """Return what a database raises; what Optuna makes of it only where Optuna is in use."""
    module = sys.modules.get("optuna.exceptions")
    return (SQLAlchemyError,) if module is None else (SQLAlchemyError, module.StorageInternalError)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _is_transient(error: BaseException) -> bool:
    """Whether waiting may help: a lock that another process holds, a connection that dropped."""
    for cause in _causes(error):
        if isinstance(cause, DBAPIError) and isinstance(cause.orig, sqlite3.Error):
            return "locked" in str(cause.orig) or "busy" in str(cause.orig)
        if isinstance(cause, OperationalError | InterfaceError):
            return True
        if isinstance(cause, DBAPIError):
            return cause.connection_invalidated
    return False


def _is_creation_race(error: BaseException) -> bool:
    words = ("already exists", "UNIQUE constraint", "duplicate key", "locked")
    return any(word in str(cause) for cause in _causes(error) for word in words)


def _reason(error: BaseException, url: DatabaseUrl) -> str:
    """Return the driver's own first line, which names the fault without SQL and parameters."""
    originals = [
        cause.orig for cause in _causes(error) if isinstance(cause, DBAPIError) and cause.orig
    ]
    return _scrubbed(words_of(originals[0] if originals else error), url)


def _scrubbed(text: str, url: DatabaseUrl) -> str:
    for secret in url.secrets if isinstance(url, PostgresUrl) else ():
        text = text.replace(secret, "***").replace(quote(secret, safe=""), "***")
    return text
