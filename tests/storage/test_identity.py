"""A study's directory knows whose it is, and no other study is started in it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from reports.page import write_report
from search_spaces.errors import InputError
from storage.directory import STUDY, read_identity
from storage.reading import list_studies, read_study
from storage.transfer import remove_study
from tests.storage.builders import open_it, run_one


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def url(home: Path) -> str:
    return f"sqlite:///{home}/sweep.db"


def drive_once(url: str, home: Path) -> None:
    with open_it(url, home) as study:
        run_one(study)
    write_report(read_study("study", url=url, home=home), home / "study" / "report.html")


def tree(directory: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(directory.rglob("*"))}


def delete(database: Path) -> None:
    database.unlink()


def empty(database: Path) -> None:
    database.write_bytes(b"")


def delete_the_study(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        for table in ("study_user_attributes", "study_directions", "trials", "studies"):
            connection.execute(f"DELETE FROM {table}")


def put_another_in_its_place(database: Path) -> None:
    database.unlink()
    open_it(f"sqlite:///{database}", database.parent / "elsewhere").close()
    shutil.rmtree(database.parent / "elsewhere")


LOSSES = (delete, empty, delete_the_study, put_another_in_its_place)


@pytest.mark.parametrize("lose", LOSSES)
def test_what_a_database_no_longer_knows_is_not_started_anew_beside_it(
    home: Path, url: str, lose: Callable[[Path], None]
) -> None:
    drive_once(url, home)
    lose(home / "sweep.db")
    before = tree(home)
    with pytest.raises(InputError, match=r"--storage.*--study.*move or remove") as caught:
        open_it(url, home)
    assert str(home / "study") in str(caught.value)
    assert tree(home) == before
    open_it(url, home, name="another").close()
    shutil.move(home / "study", home / "away")
    open_it(url, home).close()


def test_whoever_reads_is_told_whose_the_directory_is(home: Path, url: str, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    open_it(other, tmp_path / "elsewhere").close()
    drive_once(url, home)
    assert read_study("study", url=url, home=home).warnings == ()
    (warning,) = read_study("study", url=other, home=home).warnings
    assert "of another study" in warning


def test_two_databases_do_not_share_a_directory(home: Path, url: str, tmp_path: Path) -> None:
    drive_once(url, home)
    other = f"sqlite:///{tmp_path}/other.db"
    with pytest.raises(InputError, match=r"runs/sweep\.db"):
        open_it(other, home)
    assert not (tmp_path / "other.db").exists()
    with open_it(url, home) as study:
        assert study.was_resumed


@pytest.mark.parametrize("lose", [delete, delete_the_study])
def test_whoever_asks_for_a_study_that_is_gone_is_told_of_its_files(
    home: Path, url: str, lose: Callable[[Path], None]
) -> None:
    drive_once(url, home)
    lose(home / "sweep.db")
    with pytest.raises(
        InputError,
        match=rf"files in {home}/study are of a study that is not there.*driven in {url}",
    ):
        read_study("study", url=url, home=home)


def test_a_directory_with_nothing_of_a_study_is_no_hindrance(home: Path, url: str) -> None:
    (home / "study").mkdir(parents=True)
    (home / "study" / "notes.txt").write_text("mine")
    (home / "study" / "worker.log").write_text("of whatever")
    (home / "study" / "spool.jsonl").write_text("")
    open_it(url, home).close()


@pytest.mark.parametrize(
    "content", [b"", b"[" * 100_000, b"\xff"], ids=["empty", "nested", "binary"]
)
def test_an_identity_that_cannot_be_read_stops_its_own_study_least_of_all(
    home: Path, url: str, content: bytes
) -> None:
    drive_once(url, home)
    (home / "study" / STUDY).write_bytes(content)
    with open_it(url, home) as study:
        assert study.was_resumed
        file = read_identity(home / "study")
        assert file is not None
        assert file.identity == study.identity


def test_removing_a_study_leaves_the_files_of_another_one(
    home: Path, url: str, tmp_path: Path
) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    open_it(other, tmp_path / "elsewhere").close()
    drive_once(url, home)
    before = tree(home / "study")
    removed = remove_study("study", url=other, home=home)
    assert removed.files == ()
    assert len(removed.left) == len(before)
    assert tree(home / "study") == before
    assert list_studies(other, home) == []
