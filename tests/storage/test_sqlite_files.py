"""What only a file can suffer."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.storage import database
from qlora_sweep.storage.lease import FileLease, this_driver
from qlora_sweep.storage.reading import list_studies
from tests.storage.builders import DISTRIBUTIONS, a_record, begun, open_it, read_it, run_one

NOBODY = 65534


@pytest.mark.parametrize("content", [b"", b"not a database, but long enough to be one" * 30])
def test_reading_a_file_that_is_no_database_never_changes_it(
    home: Path, url: str, content: bytes
) -> None:
    home.mkdir()
    (home / "sweep.db").write_bytes(content)
    with pytest.raises((EnvironmentFault, InputError)):
        read_it(url, home)
    assert (home / "sweep.db").read_bytes() == content
    assert os.listdir(home) == ["sweep.db"]


@pytest.mark.timeout(20)
def test_a_path_that_can_be_no_database_is_refused_at_once_with_its_name(
    home: Path, url: str, tmp_path: Path
) -> None:
    with open_it(url, home) as study:
        run_one(study)
    path = home / "sweep.db"
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\x5a" * (len(content) - 4096))
    os.mkfifo(home / "pipe.db")
    (home / "loop.db").symlink_to("loop.db")
    for name, words in (
        ("sweep.db", r"sweep\.db: "),
        ("pipe.db", r"pipe\.db is no file"),
        ("loop.db", r"loop\.db"),
        ("\udcff.db", "name another file"),
    ):
        for action in (open_it, list_studies):
            with pytest.raises(EnvironmentFault, match=words):
                action(f"sqlite:///{home}/{name}", home)
    with pytest.raises(InputError, match="is a directory: name a file in it"):
        open_it(f"sqlite:///{tmp_path}", home)
    for place in (path, Path("/proc")):
        with pytest.raises(EnvironmentFault, match="cannot write the database"):
            open_it(f"sqlite:///{place}/runs/sweep.db", tmp_path)


def test_a_database_may_have_any_path(tmp_path: Path) -> None:
    home = tmp_path / "with space" / "per%20cent br{ace}s" / "hash# ünï"
    with open_it(f"sqlite:///{home}/sweep.db", home) as study:
        run_one(study)
    assert len(read_it(f"sqlite:///{home}/sweep.db", home).records) == 1
    assert (home / "sweep.db").exists()


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
        assert len(read_it(url, public).records) == 1
        with pytest.raises(EnvironmentFault, match=str(public)):
            open_it(url, public)
    # A lock that cannot be looked at is not taken for nobody's.
    (public / "sweep.db.study.lock").chmod(0o600)
    with unwritable(public):
        holder = read_it(url, public).holder
    if os.geteuid() == 0:
        assert "Permission denied" in str(holder)


@contextmanager
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield other
        if other.in_transaction:
            other.rollback()


def test_a_locked_database_is_waited_for_and_then_the_result_is_kept_in_the_spool(
    home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_it(url, home) as study:
        with locked(home / "sweep.db") as other:
            timer = threading.Timer(0.3, other.rollback)
            timer.start()
            told = run_one(study)
            timer.join()
        monkeypatch.setattr(database, "_RETRY_SECONDS", ())
        monkeypatch.setattr(database, "RESTART_SECONDS", ())
        monkeypatch.setattr(database, "_LOCK_SECONDS", 0.1)
        trial = study.ask(DISTRIBUTIONS)
        record = begun(study, trial, a_record(trial.number))
        safe = r"locked: .*; the result of trial 1 \(fits\) is safe in .*spool"
        with locked(home / "sweep.db"), pytest.raises(EnvironmentFault, match=safe):
            study.tell(trial, record)
    with open_it(url, home) as study:
        assert study.recover() == ()
        assert study.records() == (told, record)


@pytest.mark.parametrize(
    ("is_made_anew", "words"),
    [(False, r"safe in .*spool\.jsonl"), (True, "no longer driven from here")],
)
def test_a_database_that_is_deleted_or_replaced_while_driven_is_noticed(
    home: Path, url: str, is_made_anew: bool, words: str
) -> None:
    with open_it(url, home) as study:
        trial = study.ask(DISTRIBUTIONS)
        shutil.rmtree(home)
        if is_made_anew:
            open_it(url, home).close()
        with pytest.raises(EnvironmentFault, match=words):
            study.tell(trial, a_record(trial.number))


def test_a_reader_of_the_lock_keeps_no_driver_out(home: Path, url: str) -> None:
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


def test_a_file_system_without_locks_is_a_fault_and_no_lease(
    home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(EnvironmentFault, match="put the database on a local disk"):
        open_it(url, home)
