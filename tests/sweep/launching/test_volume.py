"""A study on a rented machine is kept on the volume, whatever becomes of the machine."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sweep.launching.there import SWEEP
from sweep.launching.volume import STOP_SECONDS, Copies, Ledger

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
        (runs / "mine" / "report.html").write_text(f"{done + 1} trials")
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
from sweep.launching.volume import Copies, Ledger, keep

volume, home, limit, *command = sys.argv[1:]
ledger = Ledger(Path(volume) / "paid.json", float(limit), since=time.time(), quiet_seconds=1.0)
copies = Copies(Path(volume), Path(home))
sys.exit(keep([sys.executable, *command], copies=copies, ledger=ledger, save_seconds=0.1))
"""


class Rented:
    """Machines with disks of their own, and one volume."""

    def __init__(self, path: Path) -> None:
        self.volume, self._path, self._count = path / "volume", path, 0
        self._running: list[subprocess.Popen[str]] = []
        (path / "writer.py").write_text(WRITER, encoding="utf-8")

    def start(
        self,
        *,
        trials: int = 10_000,
        code: int = 0,
        limit: float = 3600,
        command: tuple[str, ...] = (),
    ) -> subprocess.Popen[str]:
        self._count += 1
        home = self._path / f"machine-{self._count}"
        words = command or (str(self._path / "writer.py"), str(trials), str(code))
        process = subprocess.Popen(
            [sys.executable, "-c", MACHINE, str(self.volume), str(home), str(limit), *words],
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        return process

    @property
    def trials(self) -> list[int]:
        """Trials of the database on the volume, which is whole whenever it is looked at."""
        path = self.volume / "runs" / "sweep.db"
        if not path.exists():
            return []
        with closing(sqlite3.connect(path)) as base:
            assert base.execute("pragma integrity_check").fetchone() == ("ok",)
            return [number for (number,) in base.execute("select number from trials")]

    def wait_for(self, trials: int) -> None:
        until = time.monotonic() + 30
        while len(self.trials) < trials and time.monotonic() < until:
            time.sleep(0.02)
        assert len(self.trials) >= trials

    def close(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.read()


@pytest.fixture
def rented(tmp_path: Path) -> Iterator[Rented]:
    machines = Rented(tmp_path)
    yield machines
    machines.close()


def test_a_study_that_ends_is_on_the_volume(rented: Rented) -> None:
    assert rented.start(trials=4).wait(30) == 0
    assert rented.trials == [0, 1, 2, 3]
    assert (rented.volume / "runs" / "mine" / "report.html").read_text() == "4 trials"


def test_a_preempted_study_stops_cleanly_and_another_machine_resumes_it(rented: Rented) -> None:
    first = rented.start()
    rented.wait_for(3)
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 130
    before = rented.trials
    assert (rented.volume / "runs" / "mine" / "report.html").read_text() == "interrupted"
    assert rented.start(trials=len(before) + 3).wait(30) == 0
    assert rented.trials == list(range(len(before) + 3))


def test_a_machine_that_is_gone_at_once_leaves_a_study_that_resumes(rented: Rented) -> None:
    first = rented.start(trials=200)
    rented.wait_for(3)
    first.kill()
    first.wait()
    kept = rented.trials
    assert rented.start(trials=len(kept) + 2).wait(30) == 0
    assert rented.trials == list(range(len(kept) + 2))


@pytest.mark.parametrize(("ended", "told"), [(0, 0), (1, 0), (2, 2), (3, 3)])
def test_the_provider_is_told_of_no_failure_where_another_attempt_would_do_no_more(
    ended: int, told: int, rented: Rented
) -> None:
    assert rented.start(trials=1, code=ended).wait(30) == told


def test_a_study_is_stopped_before_its_limit_and_that_is_no_failure(rented: Rented) -> None:
    process = rented.start(limit=STOP_SECONDS + 1.5)
    assert process.wait(30) == 0
    assert "spent" in said(process)
    assert rented.trials


def test_what_earlier_machines_cost_counts(rented: Rented) -> None:
    rented.volume.mkdir()
    (rented.volume / "paid.json").write_text(json.dumps({"seconds": {"1000": 3600.0}}))
    process = rented.start(trials=3, limit=3600)
    assert process.wait(30) == 0
    assert "start it again with a higher --max-dollars" in said(process)
    assert rented.trials == []


def test_an_installation_that_cannot_be_imported_fails_and_says_why(rented: Rented) -> None:
    hidden = f"import sys; sys.modules['sweep.cli'] = None; exec({SWEEP!r})"
    process = rented.start(command=("-c", hidden, "presets"))
    assert process.wait(30) == 3
    assert "cannot be imported: ModuleNotFoundError: import of sweep.cli" in said(process)


def test_a_second_machine_on_a_study_that_runs_is_refused_and_the_first_goes_on(
    rented: Rented,
) -> None:
    first = rented.start()
    rented.wait_for(2)
    second = rented.start()
    assert second.wait(30) == 3
    assert "another machine runs this study" in said(second)
    assert first.poll() is None
    rented.wait_for(len(rented.trials) + 2)


def test_a_machine_that_was_taken_over_from_stops_and_writes_nothing_more(rented: Rented) -> None:
    first = rented.start()
    rented.wait_for(2)
    other = {"seconds": {"other": 1.0}, "owner": "other", "written": time.time()}
    (rented.volume / "paid.part").write_text(json.dumps(other))
    (rented.volume / "paid.part").replace(rented.volume / "paid.json")
    assert first.wait(30) == 3
    assert "another machine goes on" in said(first)


def test_what_a_study_s_machine_left_unsaid_tells_whether_another_may_have_it(
    tmp_path: Path,
) -> None:
    now = 1000.0
    waited: list[float] = []

    def machine(owner: str) -> Ledger:
        return Ledger(tmp_path / "paid.json", 9e9, since=0, clock=lambda: now, owner=owner)

    def silence(seconds: float) -> bool:
        nonlocal now
        waited.append(seconds)
        now += seconds
        return True

    def alive(seconds: float) -> bool:
        silence(seconds)
        first.write()
        return True

    first = machine("first")
    assert first.claim(wait=silence)
    assert not waited
    assert not machine("second").claim(wait=alive)
    assert first.is_ours
    waited.clear()
    third = machine("third")
    assert third.claim(wait=silence)
    assert sum(waited) == pytest.approx(90, abs=2)
    assert not first.is_ours
    third.write(force=True, is_last=True)
    waited.clear()
    assert machine("fourth").claim(wait=silence)
    assert not waited
    now += 500
    assert machine("fifth").claim(wait=silence)
    assert not waited


def at_once(_seconds: float) -> bool:
    return True


def test_a_ledger_adds_machines_and_what_each_costs_unseen(tmp_path: Path) -> None:
    def is_spent(machine: str, since: float, limit: float) -> bool:
        ledger = Ledger(
            tmp_path / "paid.json",
            limit + STOP_SECONDS,
            since,
            overhead_seconds=10,
            machine=machine,
            clock=lambda: 2000.0,
        )
        assert ledger.claim(wait=at_once)
        ledger.write(is_last=True)
        return ledger.is_spent

    assert is_spent("a", 1900, limit=110)
    assert not is_spent("a", 1900, limit=111)
    assert is_spent("b", 1990, limit=130)
    # Started again on the same machine.
    assert is_spent("a", 1900, limit=130)
    assert not is_spent("a", 1900, limit=131)


def test_a_read_that_fails_once_neither_takes_a_running_study_nor_forgets_what_was_paid(
    tmp_path: Path,
) -> None:
    now, path, hidden = [1000.0], tmp_path / "paid.json", tmp_path / "hidden"

    def machine(owner: str) -> Ledger:
        return Ledger(path, 500.0, since=now[0], clock=lambda: now[0], owner=owner)

    first = machine("first")
    assert first.claim(wait=at_once)
    now[0] += 100

    def once_unreadable(seconds: float) -> bool:
        """What is in the ledger's place cannot be read, the first time."""
        now[0] += seconds
        if hidden.exists():
            path.rmdir()
            hidden.rename(path)
        if not has_ended:
            first.write(force=True)
        return True

    for has_ended in (False, True):
        first.write(is_last=has_ended, force=True)
        path.rename(hidden)
        path.mkdir()
        second = machine("second")
        assert second.claim(wait=once_unreadable) is has_ended
        assert first.is_ours is not has_ended
    assert json.loads(path.read_text())["seconds"]["first"] > 100


@pytest.mark.parametrize("text", ["", "[]", "{", '{"seconds": 3}', '{"seconds": {"a": "b"}}'])
def test_a_ledger_that_holds_something_else_is_not_begun_anew(text: str, tmp_path: Path) -> None:
    (tmp_path / "paid.json").write_text(text)
    now = iter(range(1000))
    ledger = Ledger(tmp_path / "paid.json", 9e9, since=0, clock=lambda: next(now))
    with pytest.raises(ValueError, match="holds no ledger"):
        ledger.claim(wait=at_once)
    assert (tmp_path / "paid.json").read_text() == text


def made(home: Path, name: str, text: str) -> Path:
    path = home / "runs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_only_what_changed_is_copied_and_what_is_gone_goes(tmp_path: Path) -> None:
    copies = Copies(tmp_path / "volume", tmp_path / "home")
    spool = made(tmp_path / "home", "mine/spool.jsonl", "a trial")
    made(tmp_path / "home", "sweep.db.mine.lock", "a driver")
    assert copies.save()
    assert not copies.save()
    assert [path.name for path in (tmp_path / "volume" / "runs").rglob("*.*")] == ["spool.jsonl"]
    spool.unlink()
    assert copies.save()
    assert not list((tmp_path / "volume" / "runs").rglob("*.jsonl"))


def test_half_a_copy_is_never_restored(tmp_path: Path) -> None:
    made(tmp_path / "volume", "sweep.db.part", "half")
    made(tmp_path / "volume", "mine/report.html", "whole")
    assert Copies(tmp_path / "volume", tmp_path / "home").restore() == 1


def test_a_volume_that_cannot_be_written_fails_the_job_and_not_the_study(rented: Rented) -> None:
    rented.volume.mkdir()
    (rented.volume / "runs").write_text("a file where the directory should be")
    process = rented.start(trials=3)
    assert process.wait(30) == 3
    assert "the volume could not be read or written" in said(process)


def test_the_module_runs_sweep_and_a_second_start_on_one_machine_is_paid_for_once(
    tmp_path: Path,
) -> None:
    (tmp_path / "since").write_text(f"{int(time.time()) - 100}\n")
    for _ in range(2):
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-m", "sweep.launching.volume"),
                *(str(tmp_path / "volume"), "600", "0", str(tmp_path / "since"), "presets"),
            ],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "cpu-demo" in done.stdout
    (paid,) = json.loads((tmp_path / "volume" / "paid.json").read_text())["seconds"].values()
    assert 100 <= paid < 200
