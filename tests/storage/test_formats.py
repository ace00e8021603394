"""Two versions of sweep at one database: the older one refuses what the newer one wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

from search_spaces.errors import InputError
from storage.codec import FORMAT_WRITTEN
from storage.database import close, open_for_writing
from storage.definition import UnreadableStudy
from storage.reading import list_studies, read_study
from storage.urls import parse_url
from tests.storage.builders import open_it, run_one


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/runs/sweep.db"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def stored(url: str) -> optuna.Study:
    return optuna.load_study(study_name="study", storage=open_for_writing(parse_url(url)))


def write(url: str, format: Any) -> None:
    """Write as another version does."""
    study = stored(url)
    study.set_user_attr("format", format)
    close(study._storage._backend)  # type: ignore[attr-defined]


def test_a_study_says_in_which_format_it_is(url: str, home: Path) -> None:
    open_it(url, home).close()
    assert stored(url).user_attrs["format"] == FORMAT_WRITTEN


def test_a_study_of_a_newer_sweep_is_refused_and_left_as_it_is(url: str, home: Path) -> None:
    with open_it(url, home) as study:
        run_one(study)
    write(url, FORMAT_WRITTEN + 1)
    before = dict(stored(url).user_attrs)
    newer = r"cannot be read: a newer sweep wrote it \(format 2.*pip install -U"
    for action in (lambda: open_it(url, home), lambda: read_study("study", url=url, home=home)):
        with pytest.raises(InputError, match=newer):
            action()
    assert stored(url).user_attrs == before
    (line,) = list_studies(url, home)
    assert isinstance(line, UnreadableStudy)
    assert (line.name, line.trials) == ("study", 1)


@pytest.mark.parametrize("format", ["two", -1, 1.5, None, [1]])
def test_a_format_that_is_none_is_damage(url: str, home: Path, format: Any) -> None:
    open_it(url, home).close()
    write(url, format)
    for action in (lambda: open_it(url, home), lambda: read_study("study", url=url, home=home)):
        with pytest.raises(InputError, match=r"cannot be read.*format"):
            action()
