"""A driver in a process of its own, that says what it did and can be made to die at one moment.

Its process is a fork of one that has everything imported.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import alembic.script.base
import alembic.util
import optuna

from qlora_sweep.storage.directory import OutcomeFile, Spool
from tests.storage.builders import DISTRIBUTIONS, a_record, an_attempt, begun, fits, open_it

MOMENTS = ("queued", "asked", "begun", "left", "spooled", "telling", "told")
ROOT = Path(__file__).parents[2]
# What is imported on first use is there before a process forks.
for _module in ("optuna.storages._rdb.models", "psycopg"):
    import_module(_module)
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload([__name__])
# Optuna reads its schema's history anew at each opening.
alembic.script.base.util.load_python_file = cache(alembic.util.load_python_file)


class Started:
    """A driver that was started, and what it says line by line."""

    def __init__(self, *options: Any) -> None:
        self._said, mine = _FORKING.Pipe(duplex=False)
        self._process = _FORKING.Process(target=drive, args=(mine, *options), daemon=True)
        self._process.start()
        # Its own end alone is open: when it is gone, what it says has an end.
        mine.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.is_alive()

    def lines(self) -> Iterator[str]:
        """Yield what it says until it ends."""
        with suppress(EOFError):
            while True:
                yield self._said.recv()

    def wait_for(self, words: str) -> None:
        """Wait until it says a line that begins so."""
        assert any(line.startswith(words) for line in self.lines()), f"it ended without: {words}"

    def end(self) -> tuple[list[str], int | None]:
        """Wait for its end; return what it said since, and its exit code."""
        said = list(self.lines())
        self._process.join()
        return said, self._process.exitcode

    def kill(self) -> list[str]:
        """Kill it, and return what it said since."""
        os.kill(self.pid, signal.SIGKILL)
        return self.end()[0]


def start(
    url: str, home: Path, *, study: str = "study", moment: str = "never", trials: int = 1
) -> Started:
    """Start a driver, which dies at a moment unless it is to "wait"."""
    return Started(url, home, study, moment, trials)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DiesWhileTelling(optuna.samplers.RandomSampler):
    """Optuna calls this after the attributes are stored and before the state is."""

    def after_trial(self, *_: Any) -> None:
        die()


def drive(to: Connection, url: str, home: Path, name: str, moment: str, trials: int) -> None:
    kind = DiesWhileTelling if moment == "telling" else optuna.samplers.RandomSampler
    changes: dict[str, Any] = {"sampler": kind(seed=0), "name": name}
    with open_it(url, home, **changes) as study:
        to.send("opened")
        study.recover()
        if moment == "queued":
            study.study.enqueue_trial({"micro_batch_size": 8})
            die()
        for _ in range(trials):
            trial = study.ask(DISTRIBUTIONS)
            if moment == "asked":
                die()
            batch, speed = trial.params["micro_batch_size"], 1000.0 + trial.number
            record = begun(study, trial, a_record(trial.number, fits(speed), batch=batch))
            to.send(f"begun {trial.number}")
            if moment == "begun":
                die()
            if moment == "left":
                left = OutcomeFile(home / name / "outcome.json")
                left.write(an_attempt(study, record), record.config, record.outcome)
                die()
            if moment == "spooled":
                Spool(home / name / "spool.jsonl", study.known.identity).append(record)
                die()
            study.tell(trial, record)
            to.send(f"told {trial.number} {speed}")
            if moment == "told":
                die()
        if moment == "wait":
            time.sleep(60)
