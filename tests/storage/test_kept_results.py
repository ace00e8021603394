"""Results whose trial in the database is no longer what they are results of."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import Trial

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault
from storage.directory import OutcomeFile, beside_log
from storage.reading import read_study
from storage.records import (
    Attempt,
    Crashed,
    Errand,
    Lost,
    Outcome,
    OutOfMemory,
    TrialRecord,
    Verdict,
)
from storage.study import OpenStudy
from storage.transfer import remove_study
from tests.storage.builders import (
    BUDGET,
    DISTRIBUTIONS,
    STARTED_AT,
    a_record,
    an_attempt,
    begun,
    fits,
    let_go_of_the_lease,
    open_it,
    run_one,
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def url(home: Path) -> str:
    return f"sqlite:///{home}/sweep.db"


def begin(
    study: OpenStudy, outcome: Outcome | None = None, *, batch: int = 8
) -> tuple[Trial, TrialRecord]:
    trial = study.ask(DISTRIBUTIONS, params={"micro_batch_size": batch})
    return trial, begun(study, trial, a_record(trial.number, outcome, batch=batch))


def execute(url: str, *statements: str) -> None:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database, database:
        for statement in statements:
            database.execute(statement)


def fail_from_outside(url: str, number: int) -> None:
    execute(url, f"UPDATE trials SET state = 'FAIL' WHERE number = {number}")


def complete_from_outside(url: str, number: int) -> None:
    execute(
        url,
        f"UPDATE trials SET state = 'COMPLETE' WHERE number = {number}",
        "INSERT INTO trial_values (trial_id, objective, value, value_type) "
        f"SELECT trial_id, 0, 5.0, 'FINITE' FROM trials WHERE number = {number}",
    )


def delete_trial(url: str, number: int) -> None:
    which = f"(SELECT trial_id FROM trials WHERE number = {number})"
    tables = ("user_attributes", "system_attributes", "params", "values")
    execute(
        url,
        *(f"DELETE FROM trial_{table} WHERE trial_id IN {which}" for table in tables),
        f"DELETE FROM trials WHERE number = {number}",
    )


FROM_OUTSIDE = (fail_from_outside, complete_from_outside, delete_trial)


@pytest.mark.parametrize("meddle", FROM_OUTSIDE)
def test_a_result_whose_trial_was_closed_from_outside_is_kept_and_said_and_the_loop_goes_on(
    home: Path, url: str, meddle: Callable[[str, int], None]
) -> None:
    said: list[str] = []
    with open_it(url, home, warn=said.append) as study:
        run_one(study, batch=1)
        trial, record = begin(study)
        meddle(url, trial.number)
        stored = study.tell(trial, record)
        assert isinstance(stored.outcome, Lost)
        assert "ended as fits" in stored.outcome.detail
        assert study._spool.read().records[-1] == record
        command = f"sweep run SPACE --study study --from {home}/study/spool.jsonl"
        assert [command in line and "trial 1 (fits)" in line for line in said] == [True]
        assert study.ledger.to_retry() == ()
        assert study.ledger.trials_spent() == 2
        assert study.tell(*begin(study, batch=2)).verdict is Verdict.FITS
    snapshot = read_study("study", url=url, home=home)
    assert [w for w in snapshot.warnings if command in w]
    assert sorted(r.config.micro_batch_size for r in snapshot.records) == [1, 2]
    said.clear()
    with open_it(url, home, warn=said.append) as study:
        study.recover()
    assert any(command in line for line in said)


def test_a_result_that_another_driver_took_for_lost_is_kept_and_said(home: Path, url: str) -> None:
    with open_it(url, home) as study:
        trial, record = begin(study)
        let_go_of_the_lease(study)
        with open_it(url, home) as other:
            other.recover()
            assert [r.verdict for r in other.records()] == [Verdict.LOST]
        with pytest.raises(EnvironmentFault, match=r"no longer driven from here.*is safe in"):
            study.tell(trial, record)
    assert "is kept in" in read_study("study", url=url, home=home).warnings[0]


def test_a_database_restored_from_a_copy_gets_no_result_of_the_trial_that_had_the_number(
    home: Path, url: str
) -> None:
    with open_it(url, home) as study:
        run_one(study, batch=1)
    shutil.copy(home / "sweep.db", home / "copy.db")
    with open_it(url, home) as study:
        run_one(study, fits(7777.0), batch=2)
    shutil.copy(home / "copy.db", home / "sweep.db")
    with open_it(url, home) as study:
        begin(study, batch=8)
    (warning,) = read_study("study", url=url, home=home).warnings
    assert "the result of trial 1 (fits) is kept in" in warning
    with open_it(url, home) as study:
        study.recover()
        (_, lost) = study.records()
        assert (lost.verdict, lost.config.micro_batch_size) == (Verdict.LOST, 8)


@pytest.mark.parametrize("is_in_place", [False, True], ids=["moved there", "written over it"])
def test_a_copy_put_back_in_the_middle_of_a_run_loses_nothing_and_mixes_nothing_up(
    home: Path, url: str, is_in_place: bool
) -> None:
    said: list[str] = []
    with open_it(url, home, warn=said.append) as study:
        run_one(study, batch=1)
        shutil.copy(home / "sweep.db", home / "copy.db")
        newer = run_one(study, fits(7777.0), batch=2)
        trial, record = begin(study, fits(8888.0))
        if is_in_place:
            shutil.copy(home / "copy.db", home / "sweep.db")
        else:
            (home / "copy.db").replace(home / "sweep.db")
        assert study.tell(trial, record).verdict is Verdict.LOST
        later = run_one(study, fits(1.0), batch=4)
    assert any("trial 2 (fits)" in line for line in said)
    snapshot = read_study("study", url=url, home=home)
    assert [r.config.micro_batch_size for r in snapshot.records] == [1, 4]
    assert snapshot.records[-1].attempt_id == later.attempt_id
    (warning,) = snapshot.warnings
    assert "trials 1 (fits), 2 (fits) are kept" in warning
    with open_it(url, home) as study:
        study.recover()
        kept = study.lacking(study._spool.read().records)
        assert [r.attempt_id for r in kept] == [newer.attempt_id, record.attempt_id]


def test_once_the_configuration_was_measured_again_nothing_is_left_to_say(
    home: Path, url: str
) -> None:
    with open_it(url, home) as study:
        trial, record = begin(study)
        fail_from_outside(url, trial.number)
        study.tell(trial, record)
    with open_it(url, home) as study:
        run_one(study, batch=8)
        assert len(study._spool.read().records) == 2
    assert read_study("study", url=url, home=home).warnings == ()


def test_a_disk_that_takes_no_spool_does_not_keep_a_result_from_a_healthy_database(
    tmp_path: Path,
) -> None:
    home, url, said = tmp_path / "runs", f"sqlite:///{tmp_path}/elsewhere.db", list[str]()
    with open_it(url, home, warn=said.append) as study:
        shutil.rmtree(home)
        home.write_text("not a directory any more")
        record = run_one(study)
        assert study.records() == (record,)
        (line,) = said
        assert str(home) in line
        assert "is in the database alone" in line
        trial, record = begin(study)
        (tmp_path / "elsewhere.db").unlink()
        with pytest.raises(EnvironmentFault, match=rf"{url}.*nowhere.*{home}"):
            study.tell(trial, record)


def test_a_study_goes_on_where_its_directory_takes_no_files_at_all(tmp_path: Path) -> None:
    home, url, said = tmp_path / "runs", f"sqlite:///{tmp_path}/elsewhere.db", list[str]()
    home.write_text("a file")
    with open_it(url, home, warn=said.append) as study:
        study.recover()
        record = run_one(study)
    assert read_study("study", url=url, home=home).records == (record,)
    assert any("study.json" in line for line in said)


# What a worker left whose driver died.


OTHER = Attempt(id="other", study="another", number=0, started_at=STARTED_AT)


def left_behind(study: OpenStudy) -> OutcomeFile:
    return OutcomeFile(study._spool.path.with_name("outcome.json"))


def test_what_several_workers_left_are_the_results_of_trials_whose_driver_died(
    home: Path, url: str
) -> None:
    with open_it(url, home) as study:
        directory = study._spool.path.parent
        for name, batch in (("worker.log", 4), ("worker-1.log", 8)):
            _, record = begin(study, batch=batch)
            attempt = an_attempt(study, record)
            beside_log(directory / name).write(attempt, record.config, fits(1000.0 + batch))
    with open_it(url, home) as study:
        assert study.recover() == ()
        assert [r.outcome for r in study.records()] == [fits(1004.0), fits(1008.0)]
        told = study.records()[-1]
        assert (told.attempt_id, told.started_at) == (record.attempt_id, STARTED_AT)
        assert told.device_seconds == 4.0
    removed = remove_study("study", url=url, home=home)
    assert {path.name for path in removed.files} >= {"outcome.json", "outcome-1.json"}
    assert removed.left == ()


@pytest.mark.parametrize(
    ("left", "verdict"),
    [
        (fits(peak=BUDGET + 1), Verdict.OOM),
        (OutOfMemory(stage="forward"), Verdict.OOM),
        (OutOfMemory(stage="forward", flags=("neighbour",)), Verdict.LOST),
        (Crashed(phase="measure"), Verdict.CRASHED),
    ],
    ids=["over the budget", "out of memory", "a neighbour's doing", "crashed"],
)
def test_what_a_worker_left_is_judged_as_if_its_driver_had_lived(
    home: Path, url: str, left: Outcome, verdict: Verdict
) -> None:
    with open_it(url, home) as study:
        _, record = begin(study)
        left_behind(study).write(an_attempt(study, record), record.config, left)
    with open_it(url, home) as study:
        study.recover()
        assert [r.verdict for r in study.records()] == [verdict]


def test_what_a_worker_left_of_another_attempt_or_configuration_is_none(
    home: Path, url: str
) -> None:
    for changes in ({"attempt": OTHER}, {"config": TrialConfig(micro_batch_size=1)}):
        with open_it(url, home) as study:
            _, record = begin(study)
            values: dict[str, Any] = {"attempt": an_attempt(study, record), "config": record.config}
            left_behind(study).write(**(values | changes), outcome=fits())
        with open_it(url, home) as study:
            study.recover()
            assert study.records()[-1].verdict is Verdict.LOST


@pytest.mark.parametrize("what", ["failed from outside", "deleted"])
def test_what_a_worker_left_of_a_trial_that_is_no_longer_open_is_kept_before_another_runs(
    home: Path, url: str, what: str
) -> None:
    with open_it(url, home) as study:
        errand = Errand(purpose="confirm", series=1, confirms=0)
        first = run_one(study, batch=4)
        trial = study.ask_again()
        attempt = study.begin(trial, first.config, STARTED_AT, errand=errand)
        left_behind(study).write(attempt, first.config, fits(1234.0))
    closed = "UPDATE trials SET state = 'FAIL' WHERE state = 'RUNNING'"
    gone = "DELETE FROM trials WHERE state = 'RUNNING'"
    execute(url, closed if what == "failed from outside" else gone)
    for _ in range(2):
        said: list[str] = []
        with open_it(url, home, warn=said.append) as study:
            study.recover()
            (kept,) = [r for r in study._spool.read().records if r.attempt_id == attempt.id]
        assert "the result of trial 1 (fits) is kept in" in " ".join(said)
    assert kept.outcome == fits(1234.0)
    assert (kept.number, kept.started_at, kept.attempt) == (1, STARTED_AT, 1)
    assert (kept.purpose, kept.series, kept.confirms) == ("confirm", 1, 0)


def test_nothing_is_kept_of_what_was_told_or_is_another_studys(home: Path, url: str) -> None:
    with open_it(url, home) as study:
        _, record = begin(study, batch=4)
        mine = an_attempt(study, record)
        left_behind(study).write(mine, record.config, fits(5.0))
    with open_it(url, home) as study:
        study.recover()
        left_behind(study).write(OTHER, record.config, fits(6.0))
    with open_it(url, home) as study:
        study.recover()
        assert [r.outcome for r in study.records()] == [fits(5.0)]
        assert study._spool.read().records == ()


def test_a_spooled_result_goes_before_what_the_worker_left(home: Path, url: str) -> None:
    with open_it(url, home) as study:
        _, record = begin(study, fits(1000.0))
        study._spool.append(record)
        left_behind(study).write(an_attempt(study, record), record.config, fits(2.0))
    with open_it(url, home) as study:
        study.recover()
        assert study.records() == (record,)


# What may stand in a spool.


GARBAGE = {
    "binary": bytes(range(256)) * 50 + b"\n",
    "nested": b"[" * 100_000 + b"\n",
    "another type": b'{"study": 1, "record": 2}\n[]\nnull\n',
    "long": b"x" * (5 * 1024 * 1024) + b"\n",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_in_a_spool_stops_nothing_and_is_said(home: Path, url: str, garbage: bytes) -> None:
    said: list[str] = []
    with open_it(url, home) as study:
        _, record = begin(study)
        study._spool.append(record)
    spool = home / "study" / "spool.jsonl"
    spool.write_bytes(garbage + spool.read_bytes() + garbage)
    warnings = read_study("study", url=url, home=home).warnings
    assert any("cannot be read" in line and str(spool) in line for line in warnings)
    with open_it(url, home, warn=said.append) as study:
        study.recover()
        assert study.records() == (record,)
        run_one(study, batch=1)
    assert any("cannot be read" in line for line in said)
    assert spool.read_bytes().startswith(garbage)
