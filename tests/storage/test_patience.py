from __future__ import annotations

import sqlite3
from itertools import pairwise
from pathlib import Path

import pytest
from optuna.exceptions import StorageInternalError
from optuna.storages._rdb.models import StudyModel
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, OperationalError, PendingRollbackError

from search_spaces.errors import Interrupted
from storage.database import close, open_for_writing, patiently
from storage.patience import Patience, waits_end_when, waits_told_to
from storage.urls import parse_url


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


def test_who_listens_hears_of_a_long_wait_alone_about_once_a_second() -> None:
    told: list[tuple[str, float, float]] = []
    with waits_told_to(lambda *wait: told.append(wait)):
        Database("database is locked", back_at=1.0).written_patiently()
        assert told == []
        Database("database is locked", back_at=20.0).written_patiently()
    assert {(state, limit) for state, _, limit in told} == {("is locked by another process", 60.0)}
    waited = [seconds for _, seconds, _ in told]
    assert waited[0] >= 3.0
    assert all(1.0 <= after - before < 1.5 for before, after in pairwise(waited))


def test_who_asked_to_stop_does_not_wait_for_long() -> None:
    database = Database("database is locked", back_at=1000.0)
    with (
        waits_end_when(lambda: database.now > 5.0),
        pytest.raises(Interrupted, match="is locked by another process"),
    ):
        database.written_patiently()
    assert 5.0 < database.now < 5.5
    # Asked long before: what only takes a moment is still waited for.
    short = Database("database is locked", back_at=1.5)
    with waits_end_when(lambda: True):
        assert short.written_patiently() == "written"


def test_all_that_is_tried_from_the_first_fault_on_shares_one_minute() -> None:
    database = Database("database is locked", back_at=1000.0)
    patience = Patience(seconds=60.0, clock=lambda: database.now, sleep=database.sleep)
    # As where a lease is found to be lost, and then taken again.
    patience.begin()
    database.now += 50.0
    with pytest.raises(StorageInternalError):
        patiently(database.write, patience=patience)
    assert database.now <= 60.0
    # It is forgotten with the fault.
    database.back_at = database.now + 5.0
    assert patiently(database.write, patience=patience) == "written"


def test_each_further_attempt_has_a_session_and_connections_of_its_own(tmp_path: Path) -> None:
    storage = open_for_writing(parse_url(f"sqlite:///{tmp_path}/sweep.db"))
    tried = []

    def write() -> str:
        session = storage.scoped_session()
        tried.append(session)
        if len(tried) == 1:
            # A flush that fails, and that nobody rolls back.
            session.add_all([StudyModel(study_id=1, study_name="x") for _ in range(2)])
            with pytest.raises(IntegrityError):
                session.flush()
        session.execute(text("SELECT 1"))
        return "written"

    patience = Patience(seconds=5.0)
    with pytest.raises(PendingRollbackError):
        patiently(write, patience=patience, passes=lambda _: False)
    tried.clear()
    storage.remove_session()
    assert patiently(write, patience=patience, storage=storage) == "written"
    assert len(set(map(id, tried))) == 2
    close(storage)


def test_a_fault_that_waiting_cannot_help_is_raised_at_once() -> None:
    database = Database("database or disk is full", back_at=1.0)
    with pytest.raises(StorageInternalError):
        database.written_patiently()
    assert (database.attempts, database.pauses) == (1, [])
