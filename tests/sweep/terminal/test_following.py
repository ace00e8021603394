"""Following a study that another process drives, from storage alone."""

from __future__ import annotations

import gc
import io
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import chain, repeat
from pathlib import Path

import pytest
from optuna.storages import BaseStorage

from search_spaces.config import TrialConfig
from storage.definition import StudySnapshot
from storage.reading import read_study
from storage.records import Lost, TrialRecord
from sweep.predict.forecast import Forecaster
from sweep.running.replay import ReplayRunner
from sweep.study.driver import Driver
from sweep.study.tuner import tune
from sweep.terminal.live import follow
from tests.storage.builders import confirmed
from tests.sweep.simulated_device import BUDGET, MODEL, a_record, a_study, train
from tests.sweep.terminal.screen import Screen
from tests.sweep.terminal.test_summary import a_snapshot


class Looks:
    """Hands out one snapshot after the other, and the last one for ever."""

    def __init__(self, *snapshots: StudySnapshot) -> None:
        *first, last = snapshots
        self._snapshots = chain(first, repeat(last))
        self.seen = 0

    def __call__(self) -> StudySnapshot:
        self.seen += 1
        return next(self._snapshots)


def records(count: int) -> Iterator[TrialRecord]:
    for number in range(count):
        yield a_record(TrialConfig(micro_batch_size=number + 1), number=number)


def driven(*known: TrialRecord, running: int | None = None, purpose: str = "search") -> object:
    trials = ()
    if running is not None:
        confirms = None if purpose == "search" else 0
        changes = {"number": running, "purpose": purpose, "confirms": confirms}
        trials = (a_record(TrialConfig(), Lost(), **changes),)
    return replace(a_snapshot(*known), holder="host:12", running=trials)


def test_a_study_is_followed_until_nobody_drives_it(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = records(3)
    last = replace(a_snapshot(first, second, third), confirmations=confirmed(first))
    looks = Looks(
        driven(first, running=1),  # type: ignore[arg-type]
        driven(first, second, running=2),  # type: ignore[arg-type]
        driven(first, second, third, running=3, purpose="confirm"),  # type: ignore[arg-type]
        last,
    )
    waits: list[float] = []
    assert follow(looks, stream=io.StringIO(), sleep=waits.append) is last
    lines = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert [line.partition(":")[0] for line in lines] == [
        "trial 1",
        "trial 2",
        "the search has ended",
        "again trial 0",
        "again trial 0",
        "soak of trial 0",
    ]
    assert min(waits) >= 1.0
    assert looks.seen == 5


def test_a_trial_is_shown_as_old_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    started = (datetime.now(UTC) - timedelta(seconds=120)).isoformat()
    running = a_record(TrialConfig(), Lost(), number=1, started_at=started)
    driven_now = replace(a_snapshot(*records(1)), holder="host:12", running=(running,))
    screen = Screen(100)
    follow(
        Looks(driven_now, a_snapshot(*records(1))),
        stream=screen,
        sleep=lambda _: time.sleep(1.5),
    )
    assert any(re.search(r"trial 1, running, 12\d s", picture) for picture in screen.pictures)


@pytest.mark.parametrize("began", ["yesterday", "2026-11-22T10:00:00", ""])
def test_a_time_that_is_none_says_nothing(began: str) -> None:
    running = a_record(TrialConfig(), Lost(), number=1, started_at=began)
    driven_now = replace(a_snapshot(*records(1)), holder="host:12", running=(running,))
    last = follow(Looks(driven_now, a_snapshot(*records(1))), stream=io.StringIO(), sleep=print)
    assert last.holder is None


def test_what_ended_between_two_halves_of_a_look_is_not_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Trials are read first, and the driver may end the last one and itself before it is asked."""
    whole = a_snapshot(*records(3))
    torn = a_snapshot(*records(2))
    looks = Looks(driven(*records(2), running=2), torn, whole)  # type: ignore[arg-type]
    assert follow(looks, stream=io.StringIO(), sleep=lambda _: None) is whole
    assert "trial 2" in capsys.readouterr().err


def test_a_study_that_nobody_drives_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = a_snapshot(*records(2))
    assert follow(Looks(snapshot), stream=io.StringIO()) is snapshot
    assert capsys.readouterr() == ("", "")


def test_a_study_is_followed_while_another_thread_drives_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = a_study(tmp_path / "runs", trials=4)
    looked = threading.Event()
    url = f"sqlite:///{tmp_path}/runs/sweep.db"

    def drive() -> None:
        with study:
            looked.wait(20)
            forecaster = Forecaster(model=MODEL, budget_bytes=BUDGET, violation=lambda _: None)
            tune(Driver(study, runner=ReplayRunner(otherwise=train), forecaster=forecaster))

    def read() -> StudySnapshot:
        snapshot = read_study("study", url=url, home=tmp_path / "runs")
        looked.set()
        return snapshot

    driver = threading.Thread(target=drive)
    driver.start()
    last = follow(read, stream=sys.stderr, sleep=lambda _: looked.wait(0.05))
    driver.join()
    assert len(last.records) == 4
    assert last.holder is None
    assert "trial 3" in capsys.readouterr().err


def test_a_study_that_is_followed_for_hours_takes_no_more_memory_at_every_look(
    tmp_path: Path,
) -> None:
    study = a_study(tmp_path / "runs", trials=4)
    url = f"sqlite:///{tmp_path}/runs/sweep.db"
    alive: list[tuple[int, int]] = []

    def read() -> StudySnapshot:
        kinds = (TrialRecord, StudySnapshot, BaseStorage)
        gc.collect()
        alive.append(
            (sum(isinstance(one, kinds) for one in gc.get_objects()), gc.get_freeze_count())
        )
        found = read_study("study", url=url, home=tmp_path / "runs")
        return found if len(alive) < 12 else replace(found, holder=None)

    with study:
        forecaster = Forecaster(model=MODEL, budget_bytes=BUDGET, violation=lambda _: None)
        tune(Driver(study, runner=ReplayRunner(otherwise=train), forecaster=forecaster))
        follow(read, stream=io.StringIO(), sleep=lambda _: None)
    assert len(set(alive[3:])) == 1
