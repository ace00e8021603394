from __future__ import annotations

import sqlite3
from itertools import pairwise

import pytest
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import OperationalError

from storage.database import patiently
from storage.patience import Patience


class Database:
    """Fails until its clock reads ``back_at`` seconds; the clock moves when somebody waits."""

    def __init__(self, message: str, *, back_at: float) -> None:
        self.message, self.back_at = message, back_at
        self.now, self.attempts, self.tidied = 0.0, 0, 0
        self.tried_at: list[float] = []

    @property
    def pauses(self) -> list[float]:
        """Between the attempts."""
        return [round(after - before, 6) for before, after in pairwise(self.tried_at)]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def write(self) -> str:
        self.attempts += 1
        self.tried_at.append(self.now)
        if self.now < self.back_at:
            cause = OperationalError("UPDATE", {}, sqlite3.OperationalError(self.message))
            raise StorageInternalError("commit") from cause
        return "written"

    def tidy(self) -> None:
        self.tidied += 1

    def written_patiently(self) -> str:
        patience = Patience(seconds=60.0, clock=lambda: self.now, sleep=self.sleep)
        return patiently(self.write, patience=patience, before_retry=self.tidy)


def test_a_short_fault_is_outlasted_and_tidied_up_after() -> None:
    database = Database("database is locked", back_at=2.0)
    assert database.written_patiently() == "written"
    assert database.tidied == database.attempts - 1
    assert database.pauses == sorted(database.pauses)


def test_a_long_fault_is_raised_after_a_minute() -> None:
    database = Database("database is locked", back_at=1000.0)
    with pytest.raises(StorageInternalError):
        database.written_patiently()
    assert 50.0 < database.now <= 60.0
    assert max(database.pauses) <= 8.0


def test_a_fault_that_waiting_cannot_help_is_raised_at_once() -> None:
    database = Database("database or disk is full", back_at=1.0)
    with pytest.raises(StorageInternalError):
        database.written_patiently()
    assert (database.attempts, database.pauses) == (1, [])
