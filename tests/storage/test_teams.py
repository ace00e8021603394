"""A team at one server: each study has one driver, everybody sees who, and nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import sqlalchemy

from storage.definition import StudySnapshot
from storage.lease import this_driver
from storage.reading import list_studies, read_study
from sweep.terminal.summary import studies_text
from tests.storage import driver, postgres, team
from tests.storage.builders import DISTRIBUTIONS, a_record, begun, open_it


@pytest.fixture
def url(cluster: postgres.Cluster) -> str:
    return cluster.new_database()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def wait_for(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not is_so():
        assert process.poll() is None, "the team ended before"
        time.sleep(0.02)


def test_drivers_that_begin_at_once_on_an_empty_database_lose_and_double_nothing(
    url: str, home: Path
) -> None:
    process = team.start(url, home, drivers=6, trials=5)
    assert process.wait() == 0
    assert team.broken(url, home, drivers=6, trials=5) == []


def test_of_many_that_want_one_study_one_drives_and_the_next_takes_over_from_a_killed_one(
    url: str, home: Path
) -> None:
    first = team.start(url, home, drivers=4, trials=1000, seconds=0.05, study="one")

    def ends() -> list[str]:
        return [team.said(home, number).get("end", "") for number in range(4)]

    wait_for(lambda: "" not in ends(), first)
    (drives,) = [number for number, end in enumerate(ends()) if end == "drives"]
    killed = team.said(home, drives)["pid"]
    refused = [end for end in ends() if end != "drives"]
    assert all(f"is driven by {os.uname().nodename}:{killed} since " in end for end in refused)
    wait_for(lambda: team.said(home, drives)["ran"] >= 3, first)
    os.kill(killed, signal.SIGKILL)
    first.wait()
    ran = team.said(home, drives)["ran"]
    with open_it(url, home, name="one", definition=team.a_definition(trials=1000)) as study:
        study.recover()
        kept = [team.run_of(record) for record in study.records()]
    # The last of those that ran may have been told or not; it is lost as such where it was not.
    done = [of for of in kept if of is not None]
    assert done == [(drives, run) for run in range(1, len(done) + 1)]
    assert len(done) in (ran - 1, ran)
    assert [record.number for record in study.records()] == list(range(len(kept)))


def test_a_driver_holds_one_connection(cluster: postgres.Cluster, url: str, home: Path) -> None:
    name = url.rpartition("/")[2]
    count = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}'"

    def held() -> int:
        with postgres.connected(cluster.url("postgres")) as connection:
            return int(connection.exec_driver_sql(count).scalar_one())

    with open_it(url, home) as study:
        study.recover()
        trial = study.ask(DISTRIBUTIONS)
        asked = held()
        record = begun(study, trial, a_record(trial.number))
        running = held()
        study.tell(trial, record)
        assert (asked, running, held()) == (1, 1, 1)
    assert held() == 0


def test_the_list_says_who_drives_what_and_asks_once_for_all(url: str, home: Path) -> None:
    with ExitStack() as stack:
        for number in range(3):
            study = stack.enter_context(open_it(url, home, name=f"driven-{number}"))
        open_it(url, home, name="left").close()
        trial = study.ask(DISTRIBUTIONS)
        begun(study, trial, a_record(trial.number))
        # As from another host, which has none of the files.
        listed = list_studies(url, home / "nowhere")
        text = studies_text(listed)
    lines = [line for line in listed if isinstance(line, StudySnapshot)]
    told = {s.name: (s.holder, tuple(t.number for t in s.running)) for s in lines}
    assert told == {
        "driven-0": (this_driver(), ()),
        "driven-1": (this_driver(), ()),
        "driven-2": (this_driver(), (0,)),
        "left": (None, ()),
    }
    assert f"{this_driver()} since {lines[2].driven_since}, trial 0" in text
    counted = [sessions(url, home, count) for count in (4, 12)]
    assert counted[0] == counted[1]


def sessions(url: str, home: Path, count: int) -> int:
    """Return how many connections a list of so many studies takes."""
    for number in range(count):
        open_it(url, home, name=f"of-{number}").close()
    opened = 0

    def note(*_: object) -> None:
        nonlocal opened
        opened += 1

    sqlalchemy.event.listen(sqlalchemy.pool.Pool, "connect", note)
    try:
        list_studies(url, home)
    finally:
        sqlalchemy.event.remove(sqlalchemy.pool.Pool, "connect", note)
    return opened


def test_the_list_does_not_take_other_locks_for_a_studys(url: str, home: Path) -> None:
    open_it(url, home).close()
    with postgres.connected(url) as connection:
        connection.exec_driver_sql("SELECT pg_advisory_lock(1), pg_advisory_lock(-7)")
        (line,) = list_studies(url, home)
    assert line.holder is None


def test_a_driver_of_another_process_is_named_to_who_lists(url: str, home: Path) -> None:
    process = driver.start(url, home, moment="wait", trials=1)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("told"):
                break
        snapshot = read_study("study", url=url, home=home)
        assert snapshot.holder == f"{os.uname().nodename}:{process.pid}"
        assert snapshot.driven_since is not None
    finally:
        process.kill()
        process.communicate()
