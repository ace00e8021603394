"""A study on a rented machine is kept on the volume, whatever becomes of the machine."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from qlora_sweep.sweep.launching.volume import STOP_SECONDS, Copies, PaidSeconds

WRITER = """
import os, signal, sqlite3, sys, time
from pathlib import Path
runs = Path(os.environ["SWEEP_HOME"]) / "runs"
(runs / "mine").mkdir(parents=True, exist_ok=True)
base = sqlite3.connect(runs / "sweep.db")
base.execute("create table if not exists trials (number integer)")
signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
try:
    while (done := base.execute("select count(*) from trials").fetchone()[0]) < int(sys.argv[1]):
        base.execute("insert into trials values (?)", (done,))
        base.commit()
        time.sleep(0.05)
except KeyboardInterrupt:
    (runs / "mine" / "report.html").write_text("interrupted")
    sys.exit(130)
sys.exit(int(sys.argv[2]))
"""
"""Stands in for `sweep run`: a trial each moment, resumed where the database says."""
MACHINE = """
import sys, time
from pathlib import Path
from qlora_sweep.sweep.launching.volume import Copies, PaidSeconds, keep
volume, home, limit, *command = sys.argv[1:]
ledger = PaidSeconds(Path(volume) / "paid.json", float(limit), since=time.time(), quiet_seconds=1.0)
copies = Copies(Path(volume), Path(home))
sys.exit(keep([sys.executable, *command], copies=copies, ledger=ledger, save_seconds=0.1))
"""


class Machine(subprocess.Popen[str]):
    """One with a disk of its own."""

    def ends(self, code: int, said: str = "") -> bool:
        """Whether it ends so, saying that."""
        assert self.stderr is not None
        words = self.stderr.read()
        return self.wait(30) == code and said in words


class Rented:
    """Machines and one volume."""

    def __init__(self, path: Path) -> None:
        self.volume, self._path = path / "volume", path
        self.running: list[Machine] = []

    def start(
        self, trials: int = 10_000, code: int = 0, limit: float = 3600, program: str = WRITER
    ) -> Machine:
        home = self._path / f"machine-{len(self.running)}"
        words = [self.volume, home, limit, "-c", program, trials, code]
        command = [sys.executable, "-c", MACHINE, *map(str, words)]
        self.running.append(Machine(command, stderr=subprocess.PIPE, text=True))
        return self.running[-1]

    def trials(self, *, at_least: int = 0) -> list[int]:
        """Trials of the database on the volume, which is whole whenever it is looked at."""
        path, found, until = self.volume / "runs" / "sweep.db", list[int](), time.monotonic() + 30
        while not found or len(found) < at_least:
            assert time.monotonic() < until
            time.sleep(0.02)
            if path.exists():
                with closing(sqlite3.connect(path)) as base:
                    assert base.execute("pragma integrity_check").fetchone() == ("ok",)
                    found = [number for (number,) in base.execute("select number from trials")]
        return found


@pytest.fixture
def rented(tmp_path: Path) -> Iterator[Rented]:
    rented = Rented(tmp_path)
    yield rented
    for machine in rented.running:
        machine.kill()
        machine.wait()
        assert machine.stderr is not None
        machine.stderr.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_another_machine_resumes_what_was_preempted_or_is_gone(
    rented: Rented, number: int, code: int
) -> None:
    first = rented.start()
    rented.trials(at_least=3)
    first.send_signal(number)
    assert first.wait(30) == code
    if code > 0:
        report = rented.volume / "runs" / "mine" / "report.html"
        assert report.read_text() == "interrupted"
    kept = len(rented.trials())
    assert rented.start(trials=kept + 3).ends(0)
    assert rented.trials() == list(range(kept + 3))


@pytest.mark.parametrize(("ended", "told"), [(1, 0), (3, 3)])
def test_the_provider_is_told_of_no_failure_where_another_attempt_would_do_no_more(
    ended: int, told: int, rented: Rented
) -> None:
    assert rented.start(trials=1, code=ended).ends(told)
    assert rented.trials() == [0]


def test_a_study_is_stopped_before_its_limit_and_what_earlier_machines_cost_counts(
    rented: Rented,
) -> None:
    assert rented.start(limit=STOP_SECONDS + 1.5).ends(0, "spent: stopping it")
    before = rented.trials()
    assert rented.start(limit=STOP_SECONDS + 1).ends(0, "start it again with a higher")
    assert rented.trials() == before


def test_a_second_machine_on_a_study_that_runs_is_refused_and_the_first_goes_on(
    rented: Rented,
) -> None:
    first = rented.start()
    rented.trials(at_least=2)
    assert rented.start().ends(3, "another machine runs this study")
    assert first.poll() is None
    rented.trials(at_least=len(rented.trials()) + 2)
    # What was taken over from stops, and writes nothing more.
    other = {"seconds": {"other": 1.0}, "owner": "other", "written": time.time()}
    (rented.volume / "half").write_text(json.dumps(other))
    (rented.volume / "half").replace(rented.volume / "paid.json")
    assert first.ends(3, "another machine goes on")
    assert json.loads((rented.volume / "paid.json").read_text()) == other


def test_a_volume_that_cannot_be_written_fails_the_job(rented: Rented) -> None:
    rented.volume.mkdir()
    (rented.volume / "runs").write_text("a file where the directory should be")
    assert rented.start().ends(3, "could not be read or written, so nothing was started")


class Clock:
    """Ledgers of one volume, at a time that passes while somebody waits."""

    def __init__(self, path: Path) -> None:
        self.now, self.waited, self.path = 1000.0, 0.0, path

    def machine(self, owner: str) -> PaidSeconds:
        return PaidSeconds(self.path, 9e9, since=self.now, clock=lambda: self.now, owner=owner)

    def silence(self, seconds: float) -> bool:
        self.now, self.waited = self.now + seconds, self.waited + seconds
        return True


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "paid.json")


def test_what_a_study_s_machine_left_unsaid_tells_whether_another_may_have_it(
    clock: Clock,
) -> None:
    def alive(seconds: float) -> bool:
        first.write()
        return clock.silence(seconds)

    first = clock.machine("first")
    assert first.claim(wait=clock.silence)
    assert not clock.machine("second").claim(wait=alive)
    assert first.is_ours
    clock.waited = 0
    third = clock.machine("third")
    assert third.claim(wait=clock.silence)
    assert clock.waited == pytest.approx(90, abs=2)
    assert not first.is_ours
    # Who said goodbye, or said nothing for long, is not waited for.
    clock.waited = 0
    third.write(is_last=True)
    assert clock.machine("fourth").claim(wait=clock.silence)
    clock.now += 500
    assert clock.machine("fifth").claim(wait=clock.silence)
    assert clock.waited == 0


def test_a_read_that_fails_once_neither_takes_a_running_study_nor_forgets_what_was_paid(
    clock: Clock,
) -> None:
    path, hidden, first = clock.path, clock.path.with_name("hidden"), clock.machine("first")

    def once_unreadable(seconds: float) -> bool:
        """What is in the ledger's place cannot be read, the first time."""
        if hidden.exists():
            path.rmdir()
            hidden.rename(path)
        if not has_ended:
            first.write(force=True)
        return clock.silence(seconds)

    assert first.claim(wait=clock.silence)
    clock.now += 100
    for has_ended in (False, True):
        first.write(is_last=has_ended, force=True)
        path.rename(hidden)
        path.mkdir()
        assert clock.machine("second").claim(wait=once_unreadable) is has_ended
        assert first.is_ours is not has_ended
    assert json.loads(path.read_text())["seconds"]["first"] > 100


@pytest.mark.parametrize("text", ["", "[]", '{"seconds": {"a": "b"}}'])
def test_a_ledger_that_holds_something_else_is_not_begun_anew(text: str, clock: Clock) -> None:
    clock.path.write_text(text)
    with pytest.raises(ValueError, match="holds no ledger"):
        clock.machine("any").claim(wait=clock.silence)
    assert clock.path.read_text() == text


def test_machines_are_added_each_with_what_is_not_seen_and_counted_once(tmp_path: Path) -> None:
    def is_spent(machine: str, since: float, limit: float) -> bool:
        path, limit = tmp_path / "paid.json", limit + STOP_SECONDS
        ledger = PaidSeconds(path, limit, since, 10, clock=lambda: 2000.0, machine=machine)
        assert ledger.claim(wait=lambda _: True)
        ledger.write(is_last=True)
        return ledger.is_spent

    bounds = [("a", 1900, 110), ("b", 1990, 130), ("a", 1900, 130)]
    assert [is_spent(*one) for one in bounds] == [True] * 3
    assert not is_spent("a", 1900, 131)


def test_only_what_changed_is_copied_what_is_gone_goes_and_no_half_is_restored(
    tmp_path: Path,
) -> None:
    def made(place: str, name: str) -> Path:
        path = tmp_path / place / "runs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("any")
        return path

    copies = Copies(tmp_path / "volume", tmp_path / "home")
    spool = made("home", "mine/spool.jsonl")
    made("home", "sweep.db.mine.lock")
    assert copies.save()
    assert not copies.save()
    assert [path.name for path in (tmp_path / "volume" / "runs").rglob("*.*")] == ["spool.jsonl"]
    spool.unlink()
    assert copies.save()
    assert not list((tmp_path / "volume" / "runs").rglob("*.*"))
    made("volume", "sweep.db.part")
    made("volume", "mine/report.html")
    assert Copies(tmp_path / "volume", tmp_path / "new").restore() == 1
