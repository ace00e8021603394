from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from search_spaces.errors import EnvironmentFault, InputError
from storage.fetched import refuse_local, take_in
from storage.reading import list_studies, read_study
from storage.removal import remove_study
from tests.storage.builders import open_it, run_one

HOST = "me@box"


class Place:
    """A machine with studies of its own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.home = directory / "runs"
        self.database = directory / "sweep.db"
        self.url = f"sqlite:///{self.database}"

    def run(self, count: int = 1) -> None:
        with open_it(self.url, self.home) as study:
            for _ in range(count):
                run_one(study)

    def files(self) -> Mapping[str, bytes]:
        return {file.name: file.read_bytes() for file in (self.home / "study").iterdir()}

    def take_in(self, other: Place, *, host: str = HOST) -> None:
        take_in(
            "study",
            host=host,
            database=other.database,
            files=other.files(),
            url=self.url,
            home=self.home,
        )


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return Place(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> Place:
    there = Place(tmp_path / "there")
    there.run(2)
    return there


def test_a_fetched_study_reads_as_it_does_where_it_ran(here: Place, there: Place) -> None:
    (there.home / "study" / "report.html").write_text("<!doctype html>")
    here.take_in(there)
    theirs = read_study("study", url=there.url, home=there.home)
    ours = read_study("study", url=here.url, home=here.home)
    assert ours.records == theirs.records
    assert (ours.definition, ours.identity) == (theirs.definition, theirs.identity)
    assert ours.warnings == ()
    assert there.files().items() <= here.files().items()


def test_what_was_added_since_is_there_after_the_next_fetch_and_once(
    here: Place, there: Place
) -> None:
    here.take_in(there)
    there.run(3)
    here.take_in(there)
    assert len(read_study("study", url=here.url, home=here.home).records) == 5
    assert [study.name for study in list_studies(here.url, here.home)] == ["study"]


def test_a_fetched_study_can_be_gone_on_with_here_and_is_then_not_replaced(
    here: Place, there: Place
) -> None:
    here.take_in(there)
    here.run(1)
    with pytest.raises(InputError, match=r"has results here \(1\) that are not"):
        here.take_in(there)
    assert len(read_study("study", url=here.url, home=here.home).records) == 3


def test_a_study_of_this_machine_or_of_a_third_is_refused(here: Place, there: Place) -> None:
    refuse_local("study", host=HOST, url=here.url, home=here.home)
    here.take_in(there)
    refuse_local("study", host=HOST, url=here.url, home=here.home)
    with pytest.raises(InputError, match="here already, of me@box"):
        refuse_local("study", host="you@other", url=here.url, home=here.home)
    remove_study("study", url=here.url, home=here.home)
    refuse_local("study", host="you@other", url=here.url, home=here.home)
    here.run()
    with pytest.raises(InputError, match="here already, of this machine"):
        refuse_local("study", host=HOST, url=here.url, home=here.home)
    with pytest.raises(InputError, match="is another than the one that was fetched"):
        here.take_in(there)


def test_a_study_that_somebody_drives_here_is_left_alone(here: Place, there: Place) -> None:
    here.take_in(there)
    with open_it(here.url, here.home), pytest.raises(EnvironmentFault):
        here.take_in(there)
    assert len(read_study("study", url=here.url, home=here.home).records) == 2
