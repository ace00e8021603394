"""The way to a database: Optuna's storage over SQLite or PostgreSQL, a retry, errors in words."""

from __future__ import annotations

import copy
import re
import sqlite3
import stat
import time
from collections.abc import Callable, Container, Generator, Iterator
from contextlib import contextmanager, suppress
from json import JSONDecodeError
from typing import Any, TypeVar
from urllib.parse import quote

import optuna
import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import exc
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, install_extra, words_of
from qlora_sweep.search_spaces.redaction import redact
from qlora_sweep.storage import files
from qlora_sweep.storage.urls import DatabaseUrl, PostgresUrl, SqliteUrl

T = TypeVar("T")

FAILURES = (exc.SQLAlchemyError, StorageInternalError, JSONDecodeError)
"""What a database raises, and what Optuna makes of it."""
_LOCK_SECONDS = 30.0
"""How long a SQLite statement waits for other processes."""
_ANSWER_SECONDS = 20.0
"""How long a connection to a server may be silent while an answer is due."""
_RETRY_SECONDS = (0.2, 1.0, 3.0)
"""Pauses before what failed is tried again: a connection was lost."""
DAMAGED = "damaged"
"""User attribute of a trial whose rows Optuna cannot read: why. None is stored."""
RESTART_SECONDS = (10.0, 20.0)
"""Further pauses of a driver, which outlasts a server that restarts."""
_CONNECT: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    # Poolers hand each statement to another server process, which knows of nothing prepared.
    "prepare_threshold": None,
}
_SESSION = """SET lock_timeout = '10s'; SET statement_timeout = '60s';
SET idle_in_transaction_session_timeout = '60s'; SET tcp_keepalives_idle = 30;
SET tcp_keepalives_interval = 10; SET tcp_keepalives_count = 3"""
"""A server must notice by itself that a client is gone, to free its locks."""
_THREE = (
    "does the server run? A driver needs three connections while it starts: close other sessions, "
    "or raise max_connections, of a pooler default_pool_size"
)
_RESTORE = "put a copy in its place, or choose another --storage"
_LASTING = {
    r"authentication failed|no password|requires? (a )?password": "check the user and the password",
    r"pg_hba\.conf": "see the server's pg_hba.conf, or try '?sslmode=require' behind the URL",
    r'database "[^"]*" does not exist': "create it first, with `createdb`",
    r"(resolve|translate) host": "check the host's name, and the network",
    r"has not answered|timeout expired": _THREE,
    r"statement pooling mode": "a pooler in statement mode: name the server, or session mode",
    r"permission denied": "grant this user the right to it",
    r"No space left|disk (is )?full": "free some space there, then try again",
    r"disk I/O error": "free some space there, or raise a file's limit (`ulimit -f`)",
    r"certificate|does not support SSL": "see sslmode and sslrootcert of the URL",
    r"readonly database|unable to open": "make the file and its directory writable",
    r"malformed|not a database": _RESTORE,
}
"""What to do about a failure that waiting does not help, by a pattern of its words."""
_PASSING = {
    r"Connection refused": "does the server run on that host and port?",
    r"too many (clients|connections)|connection slots|no more connections|query_wait": _THREE,
    r"database is locked": "another process has it open: close that one",
    r"in a read-only": "a standby only reads: name the primary, or '?target_session_attrs=primary'",
}
"""The same of what may be over soon."""
_OWN_COLUMNS = {"studies": "study_name", "trials": "study_id"}
"""A column of Optuna's in tables whose names another application may well have."""


class Storage(RDBStorage):
    """Optuna's storage, with transactions of several operations."""

    left_out: Container[int] = ()
    """Numbers of trials whose results are not sound: samplers see them as failed."""

    def _get_trials(self, *args: Any, **kwargs: Any) -> list[FrozenTrial]:
        # What Optuna's cache and every sampler read.
        try:
            trials = super()._get_trials(*args, **kwargs)
        except ValueError as error:
            # A time that is none: no row of the table can be had then.
            raise StorageInternalError(str(error)) from error
        return [_without_result(t) if t.number in self.left_out else t for t in trials]

    def _build_frozen_trial_from_trial_model(self, trial: Any) -> FrozenTrial:
        # Text, parameters or values that were edited: the other trials can still be had.
        try:
            return super()._build_frozen_trial_from_trial_model(trial)
        except (ValueError, LookupError, TypeError) as error:
            damaged = optuna.trial.create_trial(state=TrialState.FAIL)
            damaged.number = trial.number
            damaged._trial_id = trial.trial_id
            if not trial.state.is_finished():
                damaged.state = trial.state
            damaged.user_attrs = {DAMAGED: f"its rows cannot be read: {words_of(error)}"}
            return damaged

    def trials_of(self, study: str, *states: TrialState) -> list[FrozenTrial]:
        """Return a study's trials, of some states or all. Raises `KeyError` where it is gone.

        Not through Optuna's cache, in which one of two trials of a number is hidden.
        """
        number = self.get_study_id_from_name(study)
        return self.get_all_trials(number, deepcopy=False, states=states or None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make one transaction of all that is written and read meanwhile: all of it or nothing."""
        with self.engine.begin() as connection:
            self.remove_session()
            self.scoped_session.configure(bind=connection, join_transaction_mode="rollback_only")
            try:
                yield
                if not connection.in_transaction():
                    # Optuna passed over a failure, which rolled everything back.
                    raise exc.PendingRollbackError("the transaction was rolled back")
            finally:
                self.remove_session()
                self.scoped_session.configure(
                    bind=self.engine, join_transaction_mode="conditional_savepoint"
                )


def _without_result(trial: FrozenTrial) -> FrozenTrial:
    bare = copy.copy(trial)
    bare.state = TrialState.FAIL
    bare.values = None
    bare.intermediate_values = {}
    bare.user_attrs = {}
    bare.system_attrs = {}
    return bare


S = TypeVar("S", bound=Storage)


def close(storage: RDBStorage) -> None:
    """Let go of a session and of all connections, in whatever state a failure has left them."""
    with suppress(*FAILURES):
        storage.remove_session()
    storage.scoped_session.registry.clear()
    storage.engine.dispose()


def retried(action: Callable[[], T], *, more_seconds: tuple[float, ...] = ()) -> T:
    """Return ``action()``, tried again where a connection was lost or something was locked.

    Args:
        action: safe to repeat, also after it was committed.
        more_seconds: further pauses before it is given up.
    """
    for pause in _RETRY_SECONDS + more_seconds:
        try:
            return action()
        except FAILURES as error:
            if not _may_pass(error):
                raise
            time.sleep(pause)
    return action()


def _may_pass(error: BaseException) -> bool:
    text = str(_original(error))
    cause: BaseException | None = error
    if isinstance(error, StorageInternalError):
        cause = error.__cause__
    if re.search(r"already exists|UNIQUE constraint|duplicate key|read-only", text):
        return True
    # The last is what an earlier fault, which Optuna passed over, left of a transaction.
    kinds = exc.OperationalError | exc.InterfaceError | exc.InternalError | exc.InvalidRequestError
    return isinstance(cause, kinds) and not any(re.search(known, text) for known in _LASTING)


def open_for_writing(url: DatabaseUrl) -> Storage:
    """Open the database, created where it is missing.

    Raises:
        EnvironmentFault: the directory, the file or the server is not to be had.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with faults(url):
        if isinstance(url, SqliteUrl) and not _is_file(url):
            # No connection creates it, so that a file that vanishes is noticed.
            with files.writing(url.path, "the database "):
                files.make_directory(url.path.parent)
                # Another driver may have made it in the meantime. Its journals take on its rights.
                with suppress(FileExistsError):
                    files.create(url.path)
        # Of processes that create tables at once one is first, and the others try again.
        return retried(
            lambda: _storage(url, Storage, "BEGIN IMMEDIATE", has_tables=has_tables(url))
        )


def open_for_reading(url: DatabaseUrl, *, kind: type[S] = Storage) -> S | None:  # type: ignore[assignment]
    """Open the database without ever writing to it; None where it holds no studies yet.

    Raises:
        EnvironmentFault: the file or the server is not to be had.
    """
    with faults(url):
        if (isinstance(url, SqliteUrl) and not _is_file(url)) or not has_tables(url):
            return None
        return _storage(url, kind, "BEGIN", has_tables=True)


def _storage(url: DatabaseUrl, kind: type[S], begin: str, *, has_tables: bool) -> S:
    """Open Optuna's storage.

    Args:
        url: of the database.
        kind: class of the storage.
        begin: how a transaction of SQLite begins: with the right to write, as one that takes it
            later may find it taken; or with one moment to read.
        has_tables: whether Optuna's tables are there.
    """
    text = str(url)
    if isinstance(url, PostgresUrl):
        text = url.text
    # Optuna formats the text, so braces are doubled.
    text = text.replace("{", "{{").replace("}", "}}")
    options = engine_options(url, is_reader=begin == "BEGIN")
    try:
        storage = kind(text, engine_kwargs=options, skip_table_creation=has_tables)
    except RuntimeError as error:
        # Optuna's own, of tables of another version.
        raise EnvironmentFault(f"database {url}: {redact(str(error))}") from None
    if isinstance(url, SqliteUrl):
        sqlalchemy.event.listen(storage.engine, "begin", lambda c: c.exec_driver_sql(begin))
    return storage


def engine_options(
    url: DatabaseUrl,
    *,
    is_reader: bool = False,
    name: str = "sweep",
    connected: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Return what SQLAlchemy makes an engine by.

    Args:
        url: of the database.
        is_reader: whether nothing may be written through it.
        name: what other sessions of a server know it by.
        connected: takes a lock for each connection to a server; all is written through one then.
    """
    if isinstance(url, SqliteUrl):
        return {"creator": lambda: _connect_file(url, is_reader=is_reader), "poolclass": NullPool}
    options: dict[str, Any] = {"creator": lambda: _connect_server(url, name, connected)}
    if connected is not None:
        return options | {"pool_pre_ping": True, "pool_size": 1, "max_overflow": 0}
    if is_reader:
        execution = {"postgresql_readonly": True, "isolation_level": "REPEATABLE READ"}
        options["execution_options"] = execution
    return options | {"poolclass": NullPool}


def has_tables(url: DatabaseUrl) -> bool:
    """Whether Optuna's tables are there, all of them.

    Raises:
        EnvironmentFault: those of another application are.
    """
    text = "sqlite://" if isinstance(url, SqliteUrl) else url.text
    engine = sqlalchemy.create_engine(text, **engine_options(url, is_reader=True))
    try:
        inspector = sqlalchemy.inspect(engine)
        names = set(inspector.get_table_names())
        foreign = {"alembic_version"} & names
        if foreign and "version_info" in names:
            # Optuna makes the first of them last: a process that is stopped before begins anew.
            return True
        for table in names & _OWN_COLUMNS.keys():
            if _OWN_COLUMNS[table] not in (c["name"] for c in inspector.get_columns(table)):
                foreign.add(table)
    finally:
        engine.dispose()
    if foreign:
        tables = f"another application's tables ({', '.join(sorted(foreign))})"
        raise EnvironmentFault(f"database {url} has {tables}: create a database for sweep")
    return False


@contextmanager
def faults(url: DatabaseUrl) -> Iterator[None]:
    """Translate what the database or its driver raises to `EnvironmentFault`, without passwords.

    The originals are not chained: they may quote the URL.
    """
    try:
        yield
    except FAILURES as error:
        raise EnvironmentFault(f"database {url}: {reason(error)}") from None
    except ImportError as error:
        # Its own words, where the library of PostgreSQL's client is missing.
        if error.name != "psycopg" and "pq wrapper" not in str(error):
            raise
        missing = f"the PostgreSQL driver is not installed: {install_extra('postgresql')}"
        raise EnvironmentFault(f"database {url}: {missing}") from None


def reason(error: BaseException) -> str:
    """Return the driver's own first line, which names the fault, and what to do about it.

    SQL and parameters are not in it, nor any password.
    """
    original = _original(error)
    if isinstance(original, ValueError):
        return f"what is stored cannot be read: {words_of(original)}: {_RESTORE}"
    said = words_of(original)
    for pattern, advice in (_LASTING | _PASSING).items():
        if re.search(pattern, str(original)):
            return f"{said}: {advice}"
    return said


def _original(error: BaseException) -> BaseException:
    """Return what the database's driver raised, or the first error where no driver did."""
    if isinstance(error, exc.DBAPIError) and error.orig is not None:
        return error.orig
    if error.__cause__ is None:
        return error
    return _original(error.__cause__)


def _connect_file(url: SqliteUrl, *, is_reader: bool) -> sqlite3.Connection:
    """Connect to the file; never creates it, and only reads one that is write-protected."""
    connection = sqlite3.connect(
        f"file:{quote(str(url.path))}?mode=rw",
        uri=True,
        timeout=_LOCK_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    if is_reader:
        connection.execute("PRAGMA query_only = ON")
    return connection


def _connect_server(url: PostgresUrl, name: str, connected: Callable[[Any], None] | None) -> Any:
    # Imported here: the driver is an extra.
    import psycopg
    from psycopg import waiting

    class Connection(psycopg.Connection[Any]):  # type: ignore[misc] # psycopg's is Any here
        """A connection that is given up where the server is silent, or whoever waits is
        interrupted: the kernel acknowledges for a server that is stopped."""

        def wait(self, gen: Generator[Any, Any, Any], *_: Any, **__: Any) -> Any:
            try:
                return waiting.wait_selector(_bounded(gen), self.pgconn.socket, interval=0.1)
            except TimeoutError as silence:
                self.pgconn.finish()
                raise psycopg.OperationalError(str(silence)) from None
            except BaseException as error:
                if not isinstance(error, psycopg.Error):
                    self.pgconn.finish()
                raise

    parsed = make_url(url.text)
    _, typed = parsed.get_dialect()().create_connect_args(parsed)
    connection = Connection.connect(**_CONNECT | {"application_name": name} | dict(typed))
    try:
        connection.autocommit = True
        if is_direct(connection):
            connection.execute(_SESSION)
        if connected is not None:
            connected(connection)
        connection.autocommit = False
    except BaseException:
        connection.close()
        raise
    return connection


def is_direct(connection: Any) -> bool:
    """Whether a connection of psycopg's leads to the server itself: a pooler names a process of
    its own, and its sessions may be somebody else's a moment later."""
    (process,) = connection.execute("SELECT pg_backend_pid()").fetchone()
    return bool(process == connection.info.backend_pid)


def _bounded(gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Pass on what psycopg waits for. Raises `TimeoutError` where no answer comes in time."""
    asked = time.monotonic()
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if ready:
                asked = time.monotonic()
            elif time.monotonic() - asked > _ANSWER_SECONDS:
                raise TimeoutError(f"the server has not answered for {_ANSWER_SECONDS:.0f} s")
            wanted = gen.send(ready)
    except StopIteration as answered:
        return answered.value


def _is_file(url: SqliteUrl) -> bool:
    try:
        kind = url.path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise EnvironmentFault(f"cannot open database {url}: {error.strerror}") from error
    if stat.S_ISDIR(kind):
        raise InputError(f"database {url}: {url.path} is a directory: name a file in it")
    if not stat.S_ISREG(kind):
        raise EnvironmentFault(f"database {url}: {url.path} is no file: name another, or remove it")
    return True
