from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from search_spaces.errors import EnvironmentFault, InputError
from storage.database import faults
from storage.urls import PostgresUrl, SqliteUrl, parse_url


def test_a_relative_path_is_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_url("sqlite:///runs/sweep.db") == SqliteUrl(tmp_path / "runs" / "sweep.db")


def test_two_names_of_one_file_are_one_database(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert parse_url(f"sqlite:///{tmp_path}/link/x.db") == parse_url(
        f"sqlite:///{tmp_path}/real/x.db"
    )


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_every_spelling_of_postgresql_means_psycopg_3(scheme: str) -> None:
    url = parse_url(f"{scheme}://sweep:pw@db.example:5432/studies")
    assert isinstance(url, PostgresUrl)
    assert url.text == "postgresql+psycopg://sweep:pw@db.example:5432/studies"
    assert str(url) == "postgresql://sweep:***@db.example:5432/studies"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("runs/sweep.db", "did you mean 'sqlite:///runs/sweep.db'"),
        ("sqlit:///x.db", "unknown database 'sqlit'; known are sqlite"),
        ("mysql://u:secret@h/d", "known are sqlite and postgresql"),
        ("sqlite://x.db", "three slashes"),
        ("sqlite://", "three slashes"),
        ("sqlite:///", "three slashes and the path"),
        ("sqlite:///:memory:", "path of a file"),
        ("sqlite:///x.db?mode=ro", "without options"),
        ("postgresql://u:secret@h", "names no database"),
        (
            "postgresql://u:secret@h:port/d",
            "malformed; it reads like postgresql://user@host:port/database",
        ),
        ("postgresql://u:sec@ret:x@h:port/d", "malformed"),
        ("postgresql://u:sec@ret@h/d", "an '@' in a password is written %40"),
        ("", "is no database URL; did you mean 'sqlite:///runs/sweep.db'"),
        ("u:secret@h/d", "storage 'u:\\*\\*\\*@h/d' is no database URL; did you mean 'postgresql:"),
        ("postgresql:u:secret@h/d", "did you mean 'postgresql://user"),
        ("postgresql:/u:secret@h/d", "did you mean 'postgresql://user"),
        ("sqlite://u:secret@h/d", "three slashes"),
        ("sqlite:///u:secret@h/d?z=1", "without options"),
    ],
)
def test_a_url_that_is_not_right_is_refused_without_its_password(url: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_url(url)
    assert "sec" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("quoted", ["p@ss/1", "p%40ss%2F1"])
def test_a_password_that_a_driver_quotes_is_in_no_message_and_no_traceback(quoted: str) -> None:
    raised = OperationalError("SELECT", {}, Exception(f"no {quoted} here\nDETAIL: {quoted}"))
    with (
        pytest.raises(EnvironmentFault, match=r"u:\*\*\*@h/d: no \*\*\* here$") as caught,
        faults(parse_url("postgresql://u:p%40ss%2F1@h/d")),
    ):
        raise raised
    assert quoted not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__suppress_context__


def test_the_password_is_in_no_representation_of_a_url() -> None:
    url = parse_url("postgresql://u:secret@h/d")
    assert "secret" not in f"{url} {url!r}"
