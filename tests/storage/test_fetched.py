from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.storage.reading import list_studies
from qlora_sweep.storage.transfer import refuse_local, remove_study, take_in
from tests.storage.builders import DISTRIBUTIONS, a_record, begun, open_it, read_it, run_one

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

    def files(self) -> dict[str, Path]:
        return {file.name: file for file in (self.home / "study").iterdir()}

    def take_in(self, other: Place) -> None:
        take_in(
            "study",
            host=HOST,
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


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_fetched_study_reads_as_it_does_where_it_ran_and_can_be_fetched_again(
    kind: str, here: Place, there: Place, request: pytest.FixtureRequest
) -> None:
    if kind == "postgresql":
        here.url = request.getfixturevalue("cluster").new_database()
    (there.home / "study" / "report.html").write_text("<!doctype html>")
    for _ in range(2):
        here.take_in(there)
        theirs = read_it(there.url, there.home)
        ours = read_it(here.url, here.home)
        assert ours.records == theirs.records
        assert (ours.definition, ours.identity) == (theirs.definition, theirs.identity)
        assert ours.warnings == ()
        ours_by_name = here.files()
        for name, file in there.files().items():
            assert ours_by_name[name].read_bytes() == file.read_bytes()
        there.run(3)
    assert [study.name for study in list_studies(here.url, here.home)] == ["study"]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_fetched_study_that_was_continued_here_is_not_replaced(
    here: Place, there: Place, is_told: bool
) -> None:
    here.take_in(there)
    with open_it(here.url, here.home) as study:
        trial = study.ask(DISTRIBUTIONS)
        record = begun(study, trial, a_record(trial.number))
        if is_told:
            study.tell(trial, record)
        else:
            study.spool.append(record)
    with pytest.raises(InputError, match=r"results here \(1\)"):
        here.take_in(there)
    assert len(read_it(here.url, here.home).records) == 2 + is_told


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


def test_a_study_that_is_driven_here_is_not_replaced(here: Place, there: Place) -> None:
    here.take_in(there)
    with open_it(here.url, here.home) as study:
        # Results here would be refused too, if they were looked at first.
        run_one(study)
        with pytest.raises(EnvironmentFault, match="is driven by"):
            here.take_in(there)


def test_a_fetch_that_is_cut_short_leaves_what_was_there(here: Place, there: Place) -> None:
    here.take_in(there)
    there.run(2)
    with closing(sqlite3.connect(here.database)) as database:
        database.execute(
            "CREATE TRIGGER full BEFORE UPDATE ON trials WHEN NEW.number = 3 "
            "BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
        )
    with pytest.raises(EnvironmentFault, match="the disk is full"):
        here.take_in(there)
    assert len(read_it(here.url, here.home).records) == 2
    with closing(sqlite3.connect(here.database)) as database:
        database.execute("DROP TRIGGER full")
    here.take_in(there)
    assert len(read_it(here.url, here.home).records) == 4
    assert len(list_studies(here.url, here.home)) == 1
