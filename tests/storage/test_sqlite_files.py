"""What only a file can suffer."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy.engine.default import DefaultDialect

from search_spaces.errors import EnvironmentFault, InputError
from storage import database
from storage.directory import Spool
from storage.lease import FileLease, this_driver
from storage.reading import list_studies, read_study
from tests.storage.builders import DISTRIBUTIONS, a_record, begun, open_it, run_one
from tests.storage.driver import ROOT

NOBODY = 65534


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def url(home: Path) -> str:
    return f"sqlite:///{home}/sweep.db"


@pytest.mark.parametrize("content", [b"", b"not a database, but long enough to be one" * 30])
def test_reading_a_file_that_is_no_database_never_changes_it(
    home: Path, url: str, content: bytes
) -> None:
    home.mkdir()
    (home / "sweep.db").write_bytes(content)
    kind, message = (
        (EnvironmentFault, r"sweep\.db: file is not a database") if content else (InputError, "run")
    )
    with pytest.raises(kind, match=message):
        read_study("study", url=url, home=home)
    assert (home / "sweep.db").read_bytes() == content
    assert os.listdir(home) == ["sweep.db"]


def test_a_corrupted_database_is_a_fault_that_names_it(home: Path, url: str) -> None:
    with open_it(url, home) as study:
        for _ in range(3):
            run_one(study)
    path = home / "sweep.db"
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\x5a" * (len(content) - 4096))
    for action in (lambda: open_it(url, home), lambda: list_studies(url, home)):
        with pytest.raises(EnvironmentFault, match=r"sweep\.db: "):
            action()


@pytest.mark.timeout(10)
def test_a_pipe_in_place_of_the_file_is_a_fault_at_once(home: Path) -> None:
    home.mkdir()
    os.mkfifo(home / "sweep.db")
    for action in (open_it, list_studies):
        with pytest.raises(EnvironmentFault, match=r"sweep\.db is no file"):
            action(f"sqlite:///{home}/sweep.db", home)


def test_a_directory_that_cannot_be_made_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", Path("/proc")):
        with pytest.raises(EnvironmentFault, match="cannot create database"):
            open_it(f"sqlite:///{place}/runs/sweep.db", tmp_path)


@pytest.mark.parametrize("name", ["with space", "per%20cent", "br{ace}s", "hash#", "ünï"])
def test_any_path_is_a_good_path(tmp_path: Path, name: str) -> None:
    url = f"sqlite:///{tmp_path}/{name}/sweep.db"
    with open_it(url, tmp_path) as study:
        run_one(study)
    assert len(read_study("study", url=url, home=tmp_path).records) == 1
    assert (tmp_path / name / "sweep.db").exists()


@contextmanager
def unwritable(directory: Path) -> Iterator[None]:
    """Be somebody who may only read the directory; root may always write, so it becomes nobody."""
    directory.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        directory.chmod(0o755)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can reach, unlike those of `tmp_path`."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def test_a_study_in_a_read_only_directory_can_be_read_and_not_driven(public: Path) -> None:
    url = f"sqlite:///{public}/sweep.db"
    with open_it(url, public) as study:
        run_one(study)
    for path in public.rglob("*"):
        # Its owner lets others read what was made for the owner alone.
        path.chmod(0o755 if path.is_dir() else 0o644)
    with unwritable(public):
        assert len(read_study("study", url=url, home=public).records) == 1
        with pytest.raises(EnvironmentFault, match=str(public)):
            open_it(url, public)


@contextmanager
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield other
        if other.in_transaction:
            other.rollback()


def test_a_database_that_is_locked_for_a_while_is_waited_for(home: Path, url: str) -> None:
    with open_it(url, home) as study, locked(home / "sweep.db") as other:
        timer = threading.Timer(0.3, other.rollback)
        timer.start()
        run_one(study)
        timer.join()
        assert len(study.records()) == 1


def test_a_database_that_stays_locked_leaves_the_result_in_the_spool(
    home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_it(url, home) as study:
        monkeypatch.setattr(database, "_RETRY_SECONDS", ())
        monkeypatch.setattr(database, "RESTART_SECONDS", ())
        monkeypatch.setattr(database, "_LOCK_SECONDS", 0.1)
        trial = study.ask(DISTRIBUTIONS)
        record = begun(study, trial, a_record(trial.number))
        with (
            locked(home / "sweep.db"),
            pytest.raises(
                EnvironmentFault, match=r"locked; the result of trial 0 \(fits\) is safe in .*spool"
            ),
        ):
            study.tell(trial, record)
    with open_it(url, home) as study:
        assert study.recover() == ()
        assert study.records() == (record,)


@pytest.mark.parametrize("victim", ["sweep.db", "."])
def test_a_database_that_is_deleted_while_driven_is_noticed(
    home: Path, url: str, victim: str
) -> None:
    with open_it(url, home) as study:
        trial = study.ask(DISTRIBUTIONS)
        path = home / victim
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        with pytest.raises(EnvironmentFault, match=r"safe in .*spool\.jsonl"):
            study.tell(trial, a_record(trial.number))


def test_a_database_that_is_replaced_while_driven_is_noticed(home: Path, url: str) -> None:
    with open_it(url, home) as study:
        trial = study.ask(DISTRIBUTIONS)
        shutil.rmtree(home)
        open_it(url, home).close()
        with pytest.raises(EnvironmentFault, match="no longer driven from here"):
            study.tell(trial, a_record(trial.number))


def test_somebody_who_looks_at_the_lock_keeps_no_driver_out(home: Path, url: str) -> None:
    open_it(url, home).close()
    lease = FileLease(home / "sweep.db", "study")
    looking = lease.path.open(encoding="utf-8")
    fcntl.flock(looking, fcntl.LOCK_SH)
    done = threading.Timer(0.2, looking.close)
    done.start()
    lease.acquire()
    done.join()
    assert str(lease.holder()).startswith(this_driver())
    lease.release()
    assert lease.holder() is None


def test_a_lock_that_cannot_be_looked_at_is_not_taken_for_nobodys(public: Path) -> None:
    url = f"sqlite:///{public}/sweep.db"
    with open_it(url, public):
        pass
    for path in public.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (public / "sweep.db.study.lock").chmod(0o600)
    with unwritable(public):
        holder = read_study("study", url=url, home=public).holder
    if os.geteuid() == 0:
        assert holder is not None
        assert "Permission denied" in holder


def test_a_file_system_without_locks_is_a_fault_and_no_lease(
    home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(EnvironmentFault, match="put the database on a local disk"):
        open_it(url, home)


def test_results_that_wait_in_the_spool_are_mentioned_when_nobody_drives(
    home: Path, url: str
) -> None:
    with open_it(url, home) as study:
        trial = study.ask(DISTRIBUTIONS)
        record = begun(study, trial, a_record(trial.number))
        Spool(home / "study" / "spool.jsonl", study.identity).append(record)
        assert read_study("study", url=url, home=home).warnings == ()
    (warning,) = read_study("study", url=url, home=home).warnings
    assert "the result of trial 0 (fits) is in" in warning


def test_nothing_of_storage_imports_torch() -> None:
    modules = sorted(f"storage.{path.stem}" for path in (ROOT / "storage").glob("*.py"))
    heavy = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
    script = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "from storage.environment import fingerprint\n"
        "fingerprint(device='cuda')\n"
        f"print(json.dumps([name for name in {heavy!r} if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert json.loads(done.stdout) == []
    assert len(modules) > 5


@pytest.mark.parametrize("batch", [None, 2])
def test_a_trial_whose_creation_was_not_answered_is_there_once(
    home: Path, url: str, monkeypatch: pytest.MonkeyPatch, batch: int | None
) -> None:
    commit, prepare = DefaultDialect.do_commit, RDBStorage._get_prepared_new_trial

    def lose_the_answer(dialect: DefaultDialect, connection: Any) -> None:
        commit(dialect, connection)
        monkeypatch.setattr(DefaultDialect, "do_commit", commit)
        raise sqlite3.OperationalError("database is locked")

    def create(*args: Any) -> Any:
        monkeypatch.setattr(RDBStorage, "_get_prepared_new_trial", prepare)
        monkeypatch.setattr(DefaultDialect, "do_commit", lose_the_answer)
        return prepare(*args)

    with open_it(url, home) as study:
        monkeypatch.setattr(RDBStorage, "_get_prepared_new_trial", create)
        told = [run_one(study, batch=batch).number, run_one(study).number]
        trials = study.study.get_trials(deepcopy=False)
        states = {trial.number: trial.state for trial in trials}
    assert [states.pop(number) for number in told] == [TrialState.COMPLETE] * 2
    assert list(states.values()) == [TrialState.FAIL]
