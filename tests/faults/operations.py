"""Where faults are injected: what a driver does that can fail, each with what can befall it.

Only a process of its own may install one of these: nothing puts back what is replaced.
"""

from __future__ import annotations

import io
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage, RDBStorage
from sqlalchemy.engine.default import DefaultDialect

from tests.faults.kinds import KINDS, Fault
from tests.faults.obedient_worker import MESSAGE_FAULTS


class Injector:
    """Counts the operations of one kind in this process and lets one of them go wrong.

    Args:
        fault: what goes wrong.
        on_strike: told before it does.
        is_over: asked before it does, and nothing does then.
    """

    def __init__(
        self, fault: Fault, *, on_strike: Callable[[], None], is_over: Callable[[], bool]
    ) -> None:
        self._fault, self._kind = fault, KINDS[fault.kind]
        self._on_strike, self._is_over = on_strike, is_over
        self.count = 0

    def __call__(self, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Do the operation, unless it is the one that goes wrong."""
        if not self.is_next():
            return operation(*args, **options)
        if self._kind.is_after:
            # Also where the operation fails by itself, as the making of what is there does.
            try:
                return operation(*args, **options)
            finally:
                self._kind.strike()
        self._kind.strike()
        # What kills or raises does not return; what blocks or asks to stop does.
        return operation(*args, **options)

    def write(self, write: Callable[[bytes], int], data: Any) -> int:
        """Write, or half of it where the disk is full then."""
        if self.is_next():
            if self._kind.is_after or self._kind.is_partial:
                write(bytes(data)[: len(data) if self._kind.is_after else len(data) // 2])
            self._kind.strike()
        return write(data)

    def is_next(self) -> bool:
        """Count one, and return whether it is the one that goes wrong."""
        self.count += 1
        is_struck = self.count == self._fault.n and not self._is_over()
        if is_struck:
            self._on_strike()
        return is_struck


@dataclass(frozen=True)
class Operation:
    """Something that a driver does many times in a study.

    Attributes:
        install: replaces it in this process by what counts and strikes; told where studies are.
        kinds: what can befall it.
        is_of_opening: whether only those count that come before the first run, in a new database.
        confirms: whether the study's winner is confirmed; statement for statement it is the same.
        has_worker: whether the study's worker is a process, which sees to the fault.
    """

    install: Callable[[Injector, Path], None]
    kinds: tuple[str, ...]
    is_of_opening: bool = False
    confirms: bool = True
    has_worker: bool = False


def _replace(owner: Any, name: str, injector: Injector) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def replaced(*args: Any, **options: Any) -> Any:
        return injector(original, *args, **options)

    setattr(owner, name, replaced)


def _storage_calls(injector: Injector, _: Path) -> None:
    for name in dir(BaseStorage):
        if not name.startswith("_") and name not in ("remove_session", "check_trial_is_updatable"):
            _replace(RDBStorage, name, injector)


def _statements(injector: Injector, _: Path) -> None:
    for name in ("do_execute", "do_executemany", "do_execute_no_params"):
        _replace(DefaultDialect, name, injector)


def _commits(injector: Injector, _: Path) -> None:
    _replace(DefaultDialect, "do_commit", injector)


def _connections(injector: Injector, _: Path) -> None:
    _replace(sqlite3, "connect", injector)


def _openings(injector: Injector, home: Path) -> None:
    """Of files below the studies' directory, the lock's too; SQLite opens its own."""

    def opening(original: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(file: Any, *args: Any, **options: Any) -> Any:
            known = injector if _is_below(file, home) else _at_once
            return known(original, file, *args, **options)

        return replaced

    io.open = opening(io.open)  # type: ignore[assignment]
    os.open = opening(os.open)


def _at_once(operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return operation(*args, **options)


def _is_below(file: Any, home: Path) -> bool:
    """Whether a path, or a descriptor of a file, is one of a study's files."""
    try:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        return Path(path).is_relative_to(home)
    except (OSError, TypeError, ValueError):
        return False


def _writes(injector: Injector, home: Path) -> None:
    """Of Python's files below the studies' directory, as the system sees them."""
    open_file, write = io.open, os.write

    class Counted(io.FileIO):
        def write(self, data: Any) -> int:
            return injector.write(super().write, data)

    def opening(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+") or not _is_below(file, home):
            return open_file(file, mode, *args, **options)
        raw = Counted(file, mode.replace("b", "").replace("t", ""))
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding=options.get("encoding", "utf-8"))

    def writing(descriptor: int, data: Any) -> int:
        if not _is_below(descriptor, home):
            return write(descriptor, data)
        return injector.write(lambda part: write(descriptor, part), data)

    io.open = opening  # type: ignore[assignment]
    os.fdopen = opening
    os.write = writing


def _syncs(injector: Injector, _: Path) -> None:
    _replace(os, "fsync", injector)


def _renames(injector: Injector, _: Path) -> None:
    for name in ("rename", "replace", "unlink", "link", "mkdir", "truncate", "ftruncate"):
        _replace(os, name, injector)


def _elsewhere(_: Injector, __: Path) -> None:
    """The runner asks itself between two signs of life of a trial, or its worker does."""


_DEATHS = ("killed", "interrupted", "interrupted twice")
_DATABASE = ("out of memory", "database I/O error", "database full", "locked", "blocked")
_CLOCK = ("clock forward", "clock back")
_SYSTEM = ("out of memory", "I/O error", "interrupted call")

OPERATIONS: dict[str, Operation] = {
    "storage call": Operation(
        _storage_calls, (*_DEATHS, "killed after", "out of memory", "blocked", *_CLOCK)
    ),
    "SQL statement": Operation(
        _statements, ("killed", "interrupted twice", *_DATABASE, "locked after"), confirms=False
    ),
    "SQL statement of a new database": Operation(
        _statements, (*_DEATHS, *_DATABASE, "locked after"), is_of_opening=True, confirms=False
    ),
    "commit": Operation(
        _commits,
        (*_DEATHS, "killed after", *_DATABASE, "answer lost", "locked after"),
        confirms=False,
    ),
    "connection": Operation(_connections, (*_DEATHS, *_DATABASE)),
    "file opening": Operation(_openings, (*_DEATHS, *_SYSTEM, "disk full", "too many open files")),
    "file write": Operation(_writes, (*_DEATHS, "killed after", *_SYSTEM, "disk full")),
    "fsync": Operation(_syncs, (*_DEATHS, "killed after", *_SYSTEM, "disk full", "blocked")),
    "file name": Operation(_renames, (*_DEATHS, "killed after", *_SYSTEM, "disk full")),
    "worker's message": Operation(_elsewhere, MESSAGE_FAULTS, confirms=False, has_worker=True),
    "beat": Operation(_elsewhere, (*_DEATHS, "out of memory", "blocked", *_CLOCK)),
}
"""Every place of a driver in which something can go wrong, by what the page calls it."""
