"""A study's files: results not yet told or no longer wanted, whose they are, and their removal."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import Trial

from qlora_sweep.reports.page import render, write_page
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.storage.directory import (
    OUTCOME_BYTES_MAX,
    STUDY,
    OutcomeFile,
    Spool,
    beside_log,
    read_identity,
)
from qlora_sweep.storage.reading import count_trials, list_studies, read_study
from qlora_sweep.storage.records import (
    Attempt,
    Crashed,
    Lost,
    Measured,
    Outcome,
    OutOfMemory,
    RunKind,
    TrialRecord,
    Verdict,
)
from qlora_sweep.storage.soundness import Soundness
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.storage.transfer import remove_study
from tests.storage.builders import (
    BUDGET,
    DISTRIBUTIONS,
    STARTED_AT,
    a_definition,
    a_record,
    agreeing,
    an_attempt,
    begun,
    fits,
    open_it,
    run_one,
)

CONFIG = TrialConfig(micro_batch_size=8)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def url(home: Path) -> str:
    return f"sqlite:///{home}/sweep.db"


@pytest.fixture
def spool(home: Path) -> Spool:
    return Spool(home / "study" / "spool.jsonl", "one")


@pytest.fixture
def left(home: Path) -> OutcomeFile:
    return OutcomeFile(home / "study" / "outcome.json")


def attempt(name: str) -> Attempt:
    return Attempt(id=name, study="study", number=0, started_at=STARTED_AT)


# The files themselves


@pytest.mark.parametrize("torn", [b"", b'{"study": "one", "rec', b"\0\0\0\0", b"\xff\xfe"])
def test_a_spool_gives_back_what_it_was_given_whatever_its_last_line_is(
    spool: Spool, torn: bytes
) -> None:
    assert spool.read().records == ()
    assert not spool.path.parent.exists()
    records = a_record(0, attempt_id="a"), a_record(1, Lost(), attempt_id="b")
    Spool(spool.path, "earlier").append(a_record(0, fits(9.0)))
    spool.append(records[0])
    # Torn, or a result that lacks its end alone.
    text = spool.path.read_bytes()
    spool.path.write_bytes(text + torn if torn else text.removesuffix(b"\n"))
    assert (spool.read().records, spool.read().problems) == (records[:1], ())
    spool.append(records[1])
    assert spool.read().records == records


def test_a_place_that_cannot_be_written_is_a_fault_that_names_the_file(
    home: Path, spool: Spool, left: OutcomeFile
) -> None:
    home.write_text("a file")
    with pytest.raises(EnvironmentFault, match=r"spool\.jsonl"):
        spool.append(a_record(0))
    with pytest.raises(EnvironmentFault, match=r"outcome\.json"):
        left.write(attempt("one"), CONFIG, fits())


def test_the_last_outcome_is_taken_by_its_attempt_and_configuration_alone(
    left: OutcomeFile,
) -> None:
    left.write(attempt("one"), CONFIG, fits())
    for outcome in (fits(), OutOfMemory(stage="backward", step=3), Crashed(phase="attach")):
        left.write(attempt("two"), CONFIG, outcome)
        assert left.take("two", CONFIG) == left.take("two", CONFIG) == outcome
    assert left.take("one", CONFIG) is None
    assert left.take("two", TrialConfig(micro_batch_size=4)) is None
    assert [path.name for path in left.path.parent.iterdir()] == ["outcome.json"]
    assert left.path.stat().st_mode & 0o777 == 0o600


def test_what_is_no_outcome_is_none_and_never_written_through(
    left: OutcomeFile, tmp_path: Path
) -> None:
    left.write(attempt("one"), CONFIG, fits())
    later = json.loads(left.path.read_text())
    later["outcome"]["verdict"] = "melted"
    for content in (
        *(b"", b"\xff\xfe", b"[" * 100_000, b'{"attempt": "one"}', json.dumps(later).encode()),
        b'{"attempt": "one", "config": {"wheels": 4}, "outcome": {}}',
        b'{"attempt": "one", "pad": "' + b"x" * OUTCOME_BYTES_MAX + b'"}',
    ):
        left.path.write_bytes(content)
        assert left.take("one", CONFIG) is None, content[:50]
    elsewhere = OutcomeFile(tmp_path / "planted.json")
    elsewhere.write(attempt("one"), CONFIG, fits())
    for plant in (os.mkdir, os.mkfifo, lambda path: path.symlink_to(elsewhere.path)):
        left.path.rmdir() if left.path.is_dir() else left.path.unlink()
        plant(left.path)
        assert left.take("one", CONFIG) is None
    left.write(attempt("two"), CONFIG, fits(2.0))
    assert left.take("two", CONFIG) == fits(2.0)
    assert elsewhere.take("one", CONFIG) == fits()


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_is_no_positive_number_is_a_failure_and_no_fit(speed: float) -> None:
    measured = fits().measurement.model_copy(update={"tokens_per_second": speed})
    told = Measured.model_construct(measurement=measured)
    assert isinstance(Soundness.of(a_definition()).counted(CONFIG, told), Crashed)


# Results whose trial in the database is no longer what they are results of


def begin(
    study: OpenStudy, outcome: Outcome | None = None, *, batch: int = 8
) -> tuple[Trial, TrialRecord]:
    trial = study.ask(DISTRIBUTIONS, params={"micro_batch_size": batch})
    return trial, begun(study, trial, a_record(trial.number, outcome, batch=batch))


def execute(url: str, *statements: str) -> None:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database, database:
        for statement in statements:
            database.execute(statement)


FAILED = ("UPDATE trials SET state = 'FAIL' WHERE number = 1",)
COMPLETED = (
    "UPDATE trials SET state = 'COMPLETE' WHERE number = 1",
    "INSERT INTO trial_values (trial_id, objective, value, value_type) "
    "SELECT trial_id, 0, 5.0, 'FINITE' FROM trials WHERE number = 1",
)
DELETED = (
    *(
        f"DELETE FROM trial_{table} WHERE trial_id IN (SELECT trial_id FROM trials WHERE number=1)"
        for table in ("user_attributes", "system_attributes", "params", "values")
    ),
    "DELETE FROM trials WHERE number = 1",
)


@pytest.mark.parametrize("meddling", [FAILED, COMPLETED, DELETED], ids=["fail", "end", "delete"])
def test_a_result_whose_trial_was_closed_from_outside_is_kept_and_said_and_the_loop_goes_on(
    home: Path, url: str, meddling: tuple[str, ...]
) -> None:
    said: list[str] = []
    with open_it(url, home, warn=said.append) as study:
        run_one(study, batch=1)
        trial, record = begin(study)
        execute(url, *meddling)
        stored = study.tell(trial, record)
        assert isinstance(stored.outcome, Lost)
        assert "ended as fits" in stored.outcome.detail
        assert study.spool.read().records[-1] == record
        command = f"sweep run SPACE --study study --from {home}/study/spool.jsonl"
        assert [command in line and "trial 1 (fits)" in line for line in said] == [True]
        assert (study.ledger.to_retry(), study.ledger.trials_spent()) == ((), 2)
        assert study.tell(*begin(study, batch=2)).verdict is Verdict.FITS
    snapshot = read_study("study", url=url, home=home)
    assert [w for w in snapshot.warnings if command in w]
    assert sorted(r.config.micro_batch_size for r in snapshot.records) == [1, 2]
    said.clear()
    with open_it(url, home, warn=said.append) as study:
        study.recover()
        assert any(command in line for line in said)
        # Once the configuration was measured again nothing is left to say.
        run_one(study, batch=8)
    assert read_study("study", url=url, home=home).warnings == ()


@pytest.mark.parametrize("is_in_place", [False, True], ids=["moved there", "written over it"])
def test_a_copy_put_back_in_the_middle_of_a_run_is_noticed_at_once_and_loses_nothing(
    home: Path, url: str, is_in_place: bool
) -> None:
    with open_it(url, home) as study:
        run_one(study, batch=1)
        shutil.copy(home / "sweep.db", home / "copy.db")
        newer = run_one(study, fits(7777.0), batch=2)
        trial, record = begin(study, fits(8888.0))
        if is_in_place:
            shutil.copy(home / "copy.db", home / "sweep.db")
        else:
            (home / "copy.db").replace(home / "sweep.db")
        for write in (lambda: study.note(ended=None), lambda: study.tell(trial, record)):
            with pytest.raises(EnvironmentFault, match=r"an older copy .* the same command"):
                write()
    snapshot = read_study("study", url=url, home=home)
    assert [r.config.micro_batch_size for r in snapshot.records] == [1]
    (warning,) = snapshot.warnings
    assert "trials 1 (fits), 2 (fits) are kept" in warning
    with open_it(url, home) as study:
        study.recover()
        kept = study.lacking(study.spool.read().records)
        assert [r.attempt_id for r in kept] == [newer.attempt_id, record.attempt_id]


def test_what_a_killed_driver_spent_is_counted_with_the_result_that_it_left(
    home: Path, url: str
) -> None:
    with open_it(url, home) as study:
        study.gpus = 2
        trial, record = begin(study, batch=1)
        study.tell(trial, record, spent_seconds=10.0)
        trial, record = begin(study, batch=2)
        record = record.model_copy(update={"wall_seconds": 7.0})
        study.spool.append(record)
    for _ in range(2):
        with open_it(url, home) as study:
            study.recover()
            assert (study.known.wall_seconds, study.known.gpu_seconds) == (17.0, 27.0)
    with open_it(url, home) as study:
        assert (study.known.wall_seconds, study.known.gpu_seconds) == (17.0, 27.0)


def test_a_disk_that_takes_no_spool_does_not_keep_a_result_from_a_healthy_database(
    tmp_path: Path,
) -> None:
    home, url, said = tmp_path / "runs", f"sqlite:///{tmp_path}/elsewhere.db", list[str]()
    home.write_text("a file")
    with open_it(url, home, warn=said.append) as study:
        assert "study.json" in said.pop()
        study.recover()
        record = run_one(study)
        assert study.records() == (record,)
        assert any(str(home) in line and "is in the database alone" in line for line in said)
        trial, other = begin(study)
        (tmp_path / "elsewhere.db").rename(tmp_path / "away.db")
        with pytest.raises(EnvironmentFault, match=rf"{url}.*nowhere.*{home}"):
            study.tell(trial, other)
    (tmp_path / "away.db").rename(tmp_path / "elsewhere.db")
    assert read_study("study", url=url, home=home).records == (record,)


@pytest.mark.parametrize(
    "garbage",
    [
        bytes(range(256)) * 50 + b"\n" + b"[" * 100_000 + b"\n",
        b'{"study": 1, "record": 2}\n[]\nnull\n' + b"x" * (5 * 1024 * 1024) + b"\n",
    ],
    ids=["binary and nested", "another type and long"],
)
def test_garbage_in_a_spool_stops_nothing_and_is_said(home: Path, url: str, garbage: bytes) -> None:
    said: list[str] = []
    with open_it(url, home) as study:
        _, record = begin(study)
        study.spool.append(record)
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


# What a worker left whose driver died

OTHER = Attempt(id="other", study="another", number=0, started_at=STARTED_AT)


def left_behind(study: OpenStudy) -> OutcomeFile:
    return OutcomeFile(study.spool.path.with_name("outcome.json"))


def test_what_several_workers_left_are_the_results_of_trials_whose_driver_died(
    home: Path, url: str
) -> None:
    with open_it(url, home) as study:
        directory = study.spool.path.parent
        for name, batch in (("worker.log", 4), ("worker-1.log", 8)):
            _, record = begin(study, batch=batch)
            mine = an_attempt(study, record)
            beside_log(directory / name).write(
                mine, record.config, agreeing(fits(1000.0 + batch), record.config)
            )
    with open_it(url, home) as study:
        assert study.recover() == ()
        speeds = [r.measurement and r.measurement.tokens_per_second for r in study.records()]
        assert speeds == [1004.0, 1008.0]
        told = study.records()[-1]
        assert (told.attempt_id, told.started_at) == (record.attempt_id, STARTED_AT)
        assert told.device_seconds == 4.0
        # Nothing is kept of what was told or is another study's.
        left_behind(study).write(OTHER, record.config, fits(6.0))
    with open_it(url, home) as study:
        study.recover()
        assert (len(study.records()), study.spool.read().records) == (2, ())
    removed = remove_study("study", url=url, home=home)
    assert {path.name for path in removed.files} >= {"outcome.json", "outcome-1.json"}
    assert removed.left == ()


@pytest.mark.parametrize(
    ("left", "changes", "verdict"),
    [
        (fits(peak=BUDGET + 1), {}, Verdict.OOM),
        (OutOfMemory(stage="forward"), {}, Verdict.OOM),
        # A neighbour's doing.
        (OutOfMemory(stage="forward", flags=("neighbour",)), {}, Verdict.LOST),
        (Crashed(phase="measure"), {}, Verdict.CRASHED),
        # Of another attempt or configuration.
        (fits(), {"attempt": OTHER}, Verdict.LOST),
        (fits(), {"config": TrialConfig(micro_batch_size=1)}, Verdict.LOST),
    ],
)
def test_what_a_worker_left_is_judged_as_if_its_driver_had_lived(
    home: Path, url: str, left: Outcome, changes: dict[str, Any], verdict: Verdict
) -> None:
    with open_it(url, home) as study:
        _, record = begin(study)
        values: dict[str, Any] = {"attempt": an_attempt(study, record), "config": record.config}
        left_behind(study).write(**(values | changes), outcome=left)
    with open_it(url, home) as study:
        study.recover()
        assert [r.verdict for r in study.records()] == [verdict]


@pytest.mark.parametrize("statement", ["UPDATE trials SET state = 'FAIL'", "DELETE FROM trials"])
def test_what_a_worker_left_of_a_trial_that_is_no_longer_open_is_kept_before_another_runs(
    home: Path, url: str, statement: str
) -> None:
    with open_it(url, home) as study:
        run_kind = RunKind(purpose="confirm", series=1, confirms=0)
        first = run_one(study, batch=4)
        mine = study.begin(study.ask_again(), first.config, STARTED_AT, run_kind=run_kind)
        left_behind(study).write(mine, first.config, agreeing(fits(1234.0), first.config))
    execute(url, f"{statement} WHERE state = 'RUNNING'")
    for _ in range(2):
        said: list[str] = []
        with open_it(url, home, warn=said.append) as study:
            study.recover()
            (kept,) = [r for r in study.spool.read().records if r.attempt_id == mine.id]
        assert "the result of trial 1 (fits) is kept in" in " ".join(said)
    assert kept.outcome == agreeing(fits(1234.0), kept.config)
    assert (kept.number, kept.started_at, kept.attempt) == (1, STARTED_AT, 1)
    assert (kept.purpose, kept.series, kept.confirms) == ("confirm", 1, 0)


def test_a_spooled_result_goes_before_what_the_worker_left(home: Path, url: str) -> None:
    with open_it(url, home) as study:
        _, record = begin(study, fits(1000.0))
        study.spool.append(record)
        left_behind(study).write(an_attempt(study, record), record.config, fits(2.0))
        assert read_study("study", url=url, home=home).warnings == ()
    (warning,) = read_study("study", url=url, home=home).warnings
    assert "the result of trial 0 (fits) is in" in warning
    with open_it(url, home) as study:
        study.recover()
        assert study.records() == (record,)


# Whose a directory is


def drive_once(url: str, home: Path) -> None:
    with open_it(url, home) as study:
        run_one(study)
    write_page(render(read_study("study", url=url, home=home)), home / "study" / "report.html")


def tree(directory: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(directory.rglob("*"))}


def delete(database: Path) -> None:
    database.unlink()


def empty(database: Path) -> None:
    database.write_bytes(b"")


def delete_the_study(database: Path) -> None:
    tables = ("study_user_attributes", "study_directions", "trials", "studies")
    execute(f"sqlite:///{database}", *(f"DELETE FROM {table}" for table in tables))


def put_another_in_its_place(database: Path) -> None:
    database.unlink()
    open_it(f"sqlite:///{database}", database.parent / "elsewhere").close()
    shutil.rmtree(database.parent / "elsewhere")


@pytest.mark.parametrize("lose", [delete, empty, delete_the_study, put_another_in_its_place])
def test_what_a_database_no_longer_knows_is_not_started_anew_beside_it(
    home: Path, url: str, lose: Callable[[Path], None]
) -> None:
    drive_once(url, home)
    lose(home / "sweep.db")
    before = tree(home)
    with pytest.raises(InputError, match=r"--storage.*--study.*move or remove") as caught:
        open_it(url, home)
    assert str(home / "study") in str(caught.value)
    if lose in (delete, delete_the_study):
        gone = rf"files in {home}/study are of a study that is not there.*driven in {url}"
        with pytest.raises(InputError, match=gone):
            read_study("study", url=url, home=home)
    assert tree(home) == before
    open_it(url, home, name="another").close()
    shutil.move(home / "study", home / "away")
    open_it(url, home).close()


def test_two_databases_do_not_share_a_directory(home: Path, url: str, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    drive_once(url, home)
    with pytest.raises(InputError, match=r"runs/sweep\.db"):
        open_it(other, home)
    assert not (tmp_path / "other.db").exists()
    open_it(other, tmp_path / "elsewhere").close()
    assert read_study("study", url=url, home=home).warnings == ()
    (warning,) = read_study("study", url=other, home=home).warnings
    assert "of another study" in warning
    # Removing a study leaves the files of another one.
    before = tree(home / "study")
    removed = remove_study("study", url=other, home=home)
    assert (removed.files, len(removed.left)) == ((), len(before))
    assert tree(home / "study") == before
    assert list_studies(other, home) == []


def test_a_directory_with_nothing_of_a_study_is_no_hindrance(home: Path, url: str) -> None:
    (home / "study").mkdir(parents=True)
    for name, text in (("notes.txt", "mine"), ("worker.log", "of whatever"), ("spool.jsonl", "")):
        (home / "study" / name).write_text(text)
    open_it(url, home).close()


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff"])
def test_an_identity_that_cannot_be_read_stops_its_own_study_least_of_all(
    home: Path, url: str, content: bytes
) -> None:
    drive_once(url, home)
    (home / "study" / STUDY).write_bytes(content)
    with open_it(url, home) as study:
        assert study.was_resumed
        file = read_identity(home / "study")
        assert file is not None
        assert file.identity == study.known.identity


# Removal


def test_a_study_goes_with_its_files_and_others_and_what_is_not_its_own_stay(
    home: Path, url: str
) -> None:
    for name in ("mine", "other"):
        with open_it(url, home, name=name) as study:
            run_one(study)
            with pytest.raises(EnvironmentFault, match="is driven by"):
                remove_study(name, url=url, home=home)
    directory = home / "mine"
    # Of the study, of a killed process of its own, and of a person.
    theirs = {"notes.txt", ".mine.tmp"}
    own = {"report.html", "slurm-17.log", ".0123456789abcdef.sweep.tmp"}
    for name in theirs | own:
        (directory / name).write_text("<!doctype html>")
    assert count_trials("mine", url=url) == 1
    removed = remove_study("mine", url=url, home=home)
    assert {path.name for path in removed.files} >= {"spool.jsonl", "study.json", "report.html"}
    assert {path.name for path in removed.left} == set(os.listdir(directory)) == theirs
    assert [s.name for s in list_studies(url, home)] == ["other"]
    with pytest.raises(InputError, match="no study 'mine'"):
        count_trials("mine", url=url)
    with open_it(url, home, name="mine") as study:
        assert study.records() == ()
