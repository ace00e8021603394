"""Owns what a database's errors mean: whether they pass by themselves, and what to do if not.

Knows nothing of connections. An error that carries a code is told by that: PostgreSQL's SQLSTATE,
SQLite's extended code. A server that refuses a connection sends none that libpq would hand on, so
there its words decide, and where they are in another language waiting is tried.
"""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Iterator

from sqlalchemy.exc import (
    DBAPIError,
    InvalidRequestError,
    MultipleResultsFound,
    NoResultFound,
    NoSuchTableError,
    OperationalError,
    ResourceClosedError,
    SQLAlchemyError,
)
from sqlalchemy.exc import InterfaceError as SqlInterfaceError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from search_spaces.errors import words_of
from storage.patience import SILENT

_PASSING = (
    "08",  # connection exceptions, and what poolers say of their own
    "40",  # serialization, deadlock
    "55P03",  # lock not available
    "55006",  # object in use
    "25P",  # a transaction that failed, or was idle or at work for too long
    "57014",  # query cancelled: by a timeout, or somebody
    "57P01",
    "57P02",
    "57P03",  # shut down, crashed, not ready yet
    "57P05",  # idle for too long
    "53200",  # out of memory
    "53300",  # too many connections
    "58000",
    "58030",  # a system or input/output error of the server's
    # Read-only: after a failover another connection may lead to the new primary.
    "25006",
)
_PASSING_SQLITE = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL", "SQLITE_IOERR")
_LASTING_SQLITE = (
    # What a disk, a quota or a file's limit takes no more of.
    "SQLITE_IOERR_WRITE",
    "SQLITE_IOERR_FSYNC",
    "SQLITE_IOERR_DIR_FSYNC",
    "SQLITE_IOERR_TRUNCATE",
    "SQLITE_IOERR_CORRUPTFS",
)
_REFUSED = re.compile(
    r"authentication failed|no password supplied|no pg_hba\.conf entry|role .* does not exist"
    r"|database .* does not exist|permission denied|is not permitted to log in"
    r"|not currently accepting connections|pg_hba\.conf rejects|does not support SSL"
    r"|certificate|SSL error: (?!.*(EOF|closed))|invalid (connection option|sslmode|port)"
    r"|root\.crt|unsupported startup parameter|requires? (a )?password|no such user"
    r"|statement pooling mode",
    re.IGNORECASE,
)
_UNREACHABLE = re.compile(
    r"Connection refused|(resolve|translate) host|timeout expired|not answered|No route|unreachable"
    r"|No such file|read-only",
    re.IGNORECASE,
)
_STATES = (
    (r"locked|lock timeout", "is locked by another process"),
    (r"Connection refused|No route|unreachable|resolve host|closed the", "cannot be reached"),
    (r"starting up|recovery mode|shutting down|terminating", "is restarting"),
    (r"too many|connection slots", "has no connection left"),
    (r"read-only", "only reads"),
    (r"already exists|duplicate key|UNIQUE|is being created", "is being set up by another driver"),
)
_ADVICE = (
    (
        r"authentication failed|no password supplied|requires? (a )?password",
        "check the user and the password, in SWEEP_STORAGE, ~/.pgpass or PGPASSWORD",
    ),
    (
        r"pg_hba\.conf",
        "the server does not let this user in from this host: see its pg_hba.conf, or try "
        "'?sslmode=require' behind the URL",
    ),
    (r'database "[^"]*" does not exist', "create it first, with `createdb`"),
    (r"resolve host|translate host name", "check the host's name, and the network"),
    (r"Connection refused", "does the server run on that host and port?"),
    (r"starting up|recovery mode|shutting down", "wait until it is ready, then try again"),
    (
        r"too many (clients|connections)|connection slots|no more connections allowed",
        "each driver holds one, and two more while it creates the tables: close other sessions, or "
        "raise max_connections",
    ),
    (r"query_wait_timeout", "the pooler has no connection to its server left: raise its pool size"),
    (
        r"statement pooling mode",
        "a connection pooler in statement mode, which keeps nothing together: name the server "
        "itself, or the pooler's session mode (to read, its transaction mode will do)",
    ),
    (r"permission denied", "grant this user the right to it"),
    (
        r"read-only transaction|in a read-only",
        "a standby only reads: name the primary, or all hosts with "
        "'?target_session_attrs=read-write'",
    ),
    (r"No space left|disk (is )?full", "free some space there; the same command then goes on"),
    (r"certificate|SSL", "see sslmode and sslrootcert of the URL"),
    (r"readonly database", "make the file and its directory writable"),
    (
        r"malformed|not a database",
        "the file is damaged or something else: put a copy in its place, or choose another "
        "--storage",
    ),
    (r"disk I/O error", "see whether the disk, a quota or a limit on file sizes is used up"),
    (r"timeout expired", "the server does not answer"),
    (r"has not answered", "when it does again, the same command goes on"),
)


class InDoubtError(Exception):
    """A connection was lost or a commit failed, and nobody knows what became of its transaction."""


class BeingCreatedError(SQLAlchemyError):
    """Another driver creates the tables at this moment."""


def failures() -> tuple[type[Exception], ...]:
    """Return what a database raises; what Optuna makes of it only where Optuna is in use."""
    module = sys.modules.get("optuna.exceptions")
    optunas = () if module is None else (module.StorageInternalError,)
    return (SQLAlchemyError, InDoubtError, *optunas)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, the last first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def is_passing(error: BaseException) -> bool:
    """Whether waiting may help: a lock that another process holds, a server that restarts."""
    for cause in causes(error):
        match cause:
            case (
                DBAPIError(orig=sqlite3.Error() as original)
                | InDoubtError(__cause__=sqlite3.Error() as original)
            ):
                return _is_passing_in_sqlite(original)
            case InDoubtError() | BeingCreatedError():
                return True
            case DBAPIError():
                return _is_passing_in_postgresql(cause)
            case NoSuchTableError() | NoResultFound() | MultipleResultsFound():
                return False
            case InvalidRequestError() | ResourceClosedError() | PoolTimeoutError():
                # What an earlier fault left of a session; the next attempt has a new one.
                return True
    return False


def _original(error: BaseException) -> BaseException:
    """Return what the database's driver raised, or the error where no driver did."""
    for cause in causes(error):
        match cause:
            case DBAPIError(orig=BaseException() as original):
                return original
            case InDoubtError(__cause__=BaseException() as original):
                return original
    return error


def is_pool_spent(error: BaseException) -> bool:
    """Whether a pooler let us in and then has no connection to its server for us."""
    return re.search(r"query_wait_timeout|not answered", str(_original(error))) is not None


def state(error: BaseException) -> str:
    """Return what is the matter with a database, for who waits: a few words, and no secret."""
    text = str(_original(error))
    return next((words for pattern, words in _STATES if re.search(pattern, text)), SILENT)


def is_passing_at_first(error: BaseException) -> bool:
    """Whether waiting may help where a database was never reached before.

    A host that nobody knows, that refuses or that is silent has more likely been mistyped.
    """
    return is_passing(error) and not _UNREACHABLE.search(str(_original(error)))


def reason(error: BaseException) -> str:
    """Return the driver's own first line, which names the fault, and what to do about it.

    SQL and parameters are not in it, nor any password.
    """
    original = _original(error)
    line, whole = words_of(original), str(original)
    advice = next((words for pattern, words in _ADVICE if re.search(pattern, whole)), None)
    return line if advice is None else f"{line}: {advice}"


def _is_passing_in_sqlite(error: sqlite3.Error) -> bool:
    name = getattr(error, "sqlite_errorname", None)
    if name is None:
        return "locked" in str(error) or "busy" in str(error)
    return name.startswith(_PASSING_SQLITE) and not name.startswith(_LASTING_SQLITE)


def _is_passing_in_postgresql(error: DBAPIError) -> bool:
    code: str | None = getattr(error.orig, "sqlstate", None)
    if code is not None:
        # A pooler gives what it will never do a code of connections that were lost.
        return code.startswith(_PASSING) and "pooling mode" not in str(error.orig)
    if isinstance(error, OperationalError | SqlInterfaceError):
        return _REFUSED.search(str(error.orig)) is None
    return error.connection_invalidated
