"""Owns the right to drive a study: one driver at a time, freed by the system when it dies.

A lock on a file for SQLite, which is here, a server's for PostgreSQL. Knows nothing of trials.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import sqlalchemy
from filelock import FileLock, Timeout

from search_spaces.errors import EnvironmentFault
from storage import advisory, files
from storage.advisory import AdvisoryLease
from storage.holder import Holder, now, taken, this_driver
from storage.patience import READER, Patience
from storage.urls import DatabaseUrl, PostgresUrl, SqliteUrl

_GRACE_SECONDS = 1.0
"""A reader that looks who holds a lock holds it itself for an instant; a driver waits that out."""


class Lease(Protocol):
    """The right to drive one study.

    Raises `EnvironmentFault` where the lock file cannot be had, and SQLAlchemy's own errors where
    the server cannot: the caller decides how long to wait for it.
    """

    def acquire(self) -> None:
        """Take the lease. Raises `EnvironmentFault` naming the holder where another has it."""

    def is_held(self) -> bool:
        """Whether it is still ours; a connection may drop, a lock file may be deleted."""

    def release(self) -> None:
        """Give it up. Idempotent."""

    def holder(self) -> Holder | None:
        """Return who has it now, ourselves included; None where nobody does. Creates nothing."""


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


def holders(
    engine: sqlalchemy.Engine, url: DatabaseUrl, studies: Iterable[str]
) -> dict[str, Holder]:
    """Return who drives each of some studies, on whatever host, by its name.

    Args:
        engine: of the database; a server is asked once for all of them.
        url: of the database.
        studies: their names; nothing is returned of one that nobody drives.
    """
    match url:
        case SqliteUrl():
            found = {study: FileLease(url.path, study).holder() for study in studies}
            return {study: holder for study, holder in found.items() if holder is not None}
        case PostgresUrl():
            with engine.connect() as connection:
                return advisory.holders(connection, studies)


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
            raise taken(self.study, self._written()) from None
        except OSError as error:
            has_no_locks = error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)
            advice = "; put the database on a local disk" if has_no_locks else ""
            raise EnvironmentFault(
                f"cannot lock the study by {self.path}: {error.strerror}{advice}"
            ) from error

    def _sign(self, descriptor: int) -> None:
        """Write who holds the lock into its file, through the descriptor that is locked."""
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{this_driver()} {now()}\n".encode())
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
