"""A study's files: results not yet told or no longer wanted, whose they are, and their removal."""

from __future__ import annotations

import os
import shutil
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
from qlora_sweep.storage.reading import count_trials, list_studies
from qlora_sweep.storage.records import (
    Attempt,
    Crashed,
    Lost,
    Outcome,
    OutOfMemory,
    TrialRecord,
    Verdict,
)
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.storage.transfer import remove_study
from tests.storage.builders import (
    BUDGET,
    DISTRIBUTIONS,
    STARTED_AT,
    a_record,
    agreeing,
    an_attempt,
    begun,
    changed,
    fits,
    open_it,
    read_it,
    run_one,
)

CONFIG = TrialConfig(micro_batch_size=8)


# The files themselves


@pytest.mark.parametrize("torn", [b"", b'{"study": "one", "rec', b"\0\0\0\0", b"\xff\xfe"])
def test_a_spool_with_a_torn_last_line_gives_back_every_whole_result(
    home: Path, torn: bytes
) -> None:
    spool = Spool(home / "study" / "spool.jsonl", "one")
    assert spool.read().records == ()
    first = a_record(0, attempt_id="a")
    second = a_record(1, Lost(), attempt_id="b")
    Spool(spool.path, "of an earlier study").append(a_record(0, fits(9.0)))
    spool.append(first)
    text = spool.path.read_bytes()
    if not torn:
        # The result lacks its end alone.
        text = text.removesuffix(b"\n")
    spool.path.write_bytes(text + torn)
    assert spool.read().records == (first,)
    assert spool.read().problems == ()
    spool.append(second)
    assert spool.read().records == (first, second)


def test_a_damaged_outcome_is_none_and_is_replaced(home: Path) -> None:
    left = OutcomeFile(home / "study" / "outcome.json")
    left.write(OTHER, CONFIG, fits())
    unknown = left.path.read_bytes().replace(b'"fits"', b'"melted"')
    padding = b'{"attempt": "one", "pad": "' + b"x" * OUTCOME_BYTES_MAX + b'"}'
    for content in (b"", b"\xff\xfe", b"[" * 100_000, b'{"attempt": "one"}', unknown, padding):
        left.path.write_bytes(content)
        assert left.take(OTHER.id, CONFIG) is None, content[:50]
    left.write(OTHER, CONFIG, fits(2.0))
    assert left.take(OTHER.id, CONFIG) == fits(2.0)


# Results whose trial in the database is no longer what they are results of


def begin(
    study: OpenStudy, outcome: Outcome | None = None, *, batch: int = 8
) -> tuple[Trial, TrialRecord]:
    trial = study.ask(DISTRIBUTIONS, params={"micro_batch_size": batch})
    return trial, begun(study, trial, a_record(trial.number, outcome, batch=batch))


@pytest.mark.parametrize("is_in_place", [False, True], ids=["moved there", "written over it"])
def test_a_copy_that_replaces_the_database_of_a_run_is_noticed_and_loses_nothing(
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
            with pytest.raises(EnvironmentFault, match="an older copy"):
                write()
    snapshot = read_it(url, home)
    assert [r.config.micro_batch_size for r in snapshot.records] == [1]
    assert "trials 1 (fits), 2 (fits)" in snapshot.warnings[0]
    with open_it(url, home) as study:
        study.recover()
        kept = study.lacking(study.spool.read().records)
        assert [r.attempt_id for r in kept] == [newer.attempt_id, record.attempt_id]


def test_a_result_that_a_killed_driver_left_counts_with_its_seconds(home: Path, url: str) -> None:
    with open_it(url, home) as study:
        study.gpus = 2
        study.tell(*begin(study, batch=1), spent_seconds=10.0)
        _, record = begin(study, batch=2)
        study.spool.append(changed(record, wall_seconds=7.0))
    for _ in range(2):
        with open_it(url, home) as study:
            study.recover()
            assert (study.known.wall_seconds, study.known.gpu_seconds) == (17.0, 27.0)


def test_a_full_disk_keeps_no_result_from_a_healthy_database(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    home.write_text("a file")
    url = f"sqlite:///{tmp_path}/elsewhere.db"
    said: list[str] = []
    with open_it(url, home, warn=said.append) as study:
        study.recover()
        record = run_one(study)
        assert study.records() == (record,)
        assert any(str(home) in line for line in said)
        trial, other = begin(study)
        (tmp_path / "elsewhere.db").rename(tmp_path / "away.db")
        with pytest.raises(EnvironmentFault, match=rf"{url}.*nowhere.*{home}"):
            study.tell(trial, other)


@pytest.mark.parametrize(
    "garbage",
    [
        bytes(range(256)) * 50 + b"\n" + b"[" * 100_000 + b"\n",
        b'{"study": 1, "record": 2}\n[]\nnull\n' + b"x" * (5 * 1024 * 1024) + b"\n",
    ],
    ids=["binary and nested", "another type and long"],
)
def test_garbage_in_a_spool_is_named_and_its_results_are_told(
    home: Path, url: str, garbage: bytes
) -> None:
    said: list[str] = []
    with open_it(url, home) as study:
        _, record = begin(study)
        study.spool.append(record)
    spool = home / "study" / "spool.jsonl"
    spool.write_bytes(garbage + spool.read_bytes() + garbage)
    warnings = read_it(url, home).warnings
    assert any(str(spool) in line for line in warnings)
    with open_it(url, home, warn=said.append) as study:
        study.recover()
        assert study.records() == (record,)
    assert any("cannot be read" in line for line in said)
    assert spool.read_bytes().startswith(garbage)


# What a worker left whose driver died

OTHER = Attempt(id="other", study="another", number=0, started_at=STARTED_AT)


def left_behind(study: OpenStudy) -> OutcomeFile:
    return OutcomeFile(study.spool.path.with_name("outcome.json"))


def test_what_several_workers_left_is_told_for_their_killed_driver(home: Path, url: str) -> None:
    with open_it(url, home) as study:
        directory = study.spool.path.parent
        for name, batch in (("worker.log", 4), ("worker-1.log", 8)):
            _, record = begin(study, batch=batch)
            outcome = agreeing(fits(1000.0 + batch), record.config)
            beside_log(directory / name).write(an_attempt(study, record), record.config, outcome)
    with open_it(url, home) as study:
        assert study.recover() == ()
        speeds = [r.measurement and r.measurement.tokens_per_second for r in study.records()]
        assert speeds == [1004.0, 1008.0]
        told = study.records()[-1]
        assert (told.attempt_id, told.started_at) == (record.attempt_id, STARTED_AT)
        assert told.device_seconds == 4.0
        # The result of another study is not kept.
        left_behind(study).write(OTHER, record.config, fits(6.0))
    with open_it(url, home) as study:
        study.recover()
        assert len(study.records()) == 2
        assert study.spool.read().records == ()


@pytest.mark.parametrize(
    ("left", "changes", "verdict"),
    [
        (fits(peak=BUDGET + 1), {}, Verdict.OOM),
        # Another process took the memory.
        (OutOfMemory(stage="forward", flags=("neighbour",)), {}, Verdict.LOST),
        (Crashed(phase="measure"), {}, Verdict.CRASHED),
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


def test_a_spooled_result_goes_before_what_the_worker_left(home: Path, url: str) -> None:
    with open_it(url, home) as study:
        _, record = begin(study, fits(1000.0))
        study.spool.append(record)
        left_behind(study).write(an_attempt(study, record), record.config, fits(2.0))
        assert read_it(url, home).warnings == ()
    assert "trial 0 (fits)" in read_it(url, home).warnings[0]
    with open_it(url, home) as study:
        study.recover()
        assert study.records() == (record,)


# Whose a directory is


def drive_once(url: str, home: Path) -> None:
    with open_it(url, home) as study:
        run_one(study)
    write_page(render(read_it(url, home)), home / "study" / "report.html")


def tree(directory: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(directory.rglob("*"))}


def test_a_study_is_not_started_anew_beside_the_files_of_a_lost_one(home: Path, url: str) -> None:
    drive_once(url, home)
    open_it(f"sqlite:///{home}/other.db", home / "elsewhere").close()
    (home / "sweep.db").unlink()
    gone = rf"files in {home}/study are of a study that is not there.*driven in {url}"
    with pytest.raises(InputError, match=gone):
        read_it(url, home)
    for put in (lambda: None, lambda: (home / "other.db").rename(home / "sweep.db")):
        put()
        before = tree(home)
        with pytest.raises(InputError, match=rf"{home}/study.*--storage.*--study"):
            open_it(url, home)
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
    assert read_it(url, home).warnings == ()
    assert "of another study" in read_it(other, home).warnings[0]
    # Removing a study leaves the files of another one.
    before = tree(home / "study")
    removed = remove_study("study", url=other, home=home)
    assert removed.files == ()
    assert len(removed.left) == len(before)
    assert tree(home / "study") == before


def test_a_directory_with_nothing_of_a_study_is_no_hindrance(home: Path, url: str) -> None:
    (home / "study").mkdir(parents=True)
    for name, text in (("notes.txt", "mine"), ("worker.log", "of whatever"), ("spool.jsonl", "")):
        (home / "study" / name).write_text(text)
    open_it(url, home).close()


def test_a_damaged_identity_is_written_anew(home: Path, url: str) -> None:
    drive_once(url, home)
    (home / "study" / STUDY).write_bytes(b"[" * 100_000)
    with open_it(url, home) as study:
        assert study.was_resumed
        assert read_identity(home / "study").identity == study.known.identity


# Removal


def test_a_study_is_removed_with_its_own_files_alone(home: Path, url: str) -> None:
    for name in ("mine", "other"):
        with open_it(url, home, name=name) as study:
            run_one(study)
            with pytest.raises(EnvironmentFault, match="is driven by"):
                remove_study(name, url=url, home=home)
    directory = home / "mine"
    # Of the study, of a killed process of its own, and of a person.
    own = ("report.html", "slurm-17.log", ".0123456789abcdef.sweep.tmp")
    theirs = {"notes.txt", ".mine.tmp"}
    for name in (*own, *theirs):
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
