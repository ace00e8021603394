"""What can go wrong, as values: a fault is an operation, which one of its kind in a run, and what.

Another operation is one line in `operations.OPERATIONS`, another kind of fault one line in `KINDS`.
"""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo

from tests.faults.obedient_worker import MESSAGE_FAULTS

BLOCKED_SECONDS = 0.3
JUMP_SECONDS = 3 * 86400.0
DONE, FAULT, INTERRUPTED, KILLED = 0, 3, 130, -signal.SIGKILL
"""How a driver may end: all is done, the environment is at fault, interrupted, or killed."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong in one run of a driver."""

    operation: str
    kind: str
    n: int
    """Which operation of its kind, from 1."""

    def __str__(self) -> str:
        return f"{self.kind} at {self.operation} {self.n}"


@dataclass(frozen=True)
class Kind:
    """A way in which an operation goes wrong.

    Attributes:
        strike: what happens in place of the operation, or after it; may raise, kill or return.
        ends: the exit codes that a driver may have after it.
        is_after: whether the operation is done before, so that only its answer is lost.
        is_partial: whether half of what was to be written is.
    """

    strike: Callable[[], None]
    ends: frozenset[int]
    is_after: bool = False
    is_partial: bool = False


def _signalling(number: signal.Signals, times: int = 1) -> Callable[[], None]:
    def strike() -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)

    return strike


def _raising(error: BaseException) -> Callable[[], None]:
    def strike() -> None:
        raise error

    return strike


def _os(number: int) -> Callable[[], None]:
    return _raising(OSError(number, os.strerror(number)))


def _sql(words: str) -> Callable[[], None]:
    return _raising(sqlite3.OperationalError(words))


def _jump(seconds: float) -> Callable[[], None]:
    """Return what sets the wall clock of this process, as somebody does, or a network that is back.

    What measures a time that passes is not set by it.
    """
    now = time.time

    class Set(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return super().now(tz) + timedelta(seconds=seconds)

    def strike() -> None:
        time.time = lambda: now() + seconds
        for module in list(sys.modules.values()):
            if vars(module).get("datetime") is datetime:
                module.datetime = Set  # type: ignore[attr-defined]

    return strike


_ANY_END = frozenset({DONE, FAULT})
"""Where something else than the study was at stake, a driver may go on."""

KINDS: dict[str, Kind] = {
    "killed": Kind(_signalling(signal.SIGKILL), frozenset({KILLED})),
    "killed after": Kind(_signalling(signal.SIGKILL), frozenset({KILLED}), is_after=True),
    "interrupted": Kind(_signalling(signal.SIGINT), frozenset({INTERRUPTED, DONE})),
    "interrupted twice": Kind(_signalling(signal.SIGINT, 2), frozenset({INTERRUPTED, DONE})),
    "out of memory": Kind(_raising(MemoryError()), frozenset({FAULT})),
    "blocked": Kind(lambda: time.sleep(BLOCKED_SECONDS), frozenset({DONE})),
    "clock forward": Kind(_jump(JUMP_SECONDS), frozenset({DONE})),
    "clock back": Kind(_jump(-JUMP_SECONDS), frozenset({DONE})),
    "locked": Kind(_sql("database is locked"), frozenset({DONE})),
    "database I/O error": Kind(_sql("disk I/O error"), _ANY_END),
    "database full": Kind(_sql("database or disk is full"), _ANY_END),
    "answer lost": Kind(_sql("disk I/O error"), _ANY_END, is_after=True),
    "locked after": Kind(_sql("database is locked"), frozenset({DONE}), is_after=True),
    "I/O error": Kind(_os(errno.EIO), _ANY_END),
    "disk full": Kind(_os(errno.ENOSPC), _ANY_END, is_partial=True),
    "too many open files": Kind(_os(errno.EMFILE), _ANY_END),
    "interrupted call": Kind(_os(errno.EINTR), _ANY_END),
    # Those of a message are the worker's doing: see `obedient_worker`.
    **{
        kind: Kind(lambda: None, frozenset({KILLED if "driver" in kind else DONE}))
        for kind in MESSAGE_FAULTS
    },
}
