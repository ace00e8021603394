"""A driver in a process of its own, that says what it did and can be made to die at one moment.

Run as ``python -m tests.storage.driver URL HOME STUDY MOMENT TRIALS``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from search_spaces.errors import EnvironmentFault
from storage.directory import OutcomeFile, Spool
from tests.storage.builders import DISTRIBUTIONS, a_record, an_attempt, begun, fits, open_it

MOMENTS = ("queued", "asked", "begun", "left", "spooled", "telling", "told")
ROOT = Path(__file__).parents[2]


def start(
    url: str, home: Path, *, study: str = "study", moment: str = "never", trials: int = 1
) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.storage.driver",
        url,
        str(home),
        study,
        moment,
        str(trials),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DiesWhileTelling(optuna.samplers.RandomSampler):
    """Optuna calls this after the attributes are stored and before the state is."""

    def after_trial(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        die()


def drive(url: str, home: Path, name: str, moment: str, trials: int) -> None:
    kind = DiesWhileTelling if moment == "telling" else optuna.samplers.RandomSampler
    changes: dict[str, Any] = {"sampler": kind(seed=0), "name": name}
    with open_it(url, home, **changes) as study:
        say("opened")
        study.recover()
        if moment == "queued":
            study.study.enqueue_trial({"micro_batch_size": 8})
            die()
        for _ in range(trials):
            trial = study.ask(DISTRIBUTIONS)
            if moment == "asked":
                die()
            batch, speed = trial.params["micro_batch_size"], 1000.0 + trial.number
            record = a_record(trial.number, fits(speed), batch=batch)
            record = begun(study, trial, record)
            say("begun", trial.number)
            if moment == "begun":
                die()
            if moment == "abandon":
                # Stopped by whoever reads, and continued.
                time.sleep(2.0)
                try:
                    study.abandon()
                except EnvironmentFault as fault:
                    say("refused", fault)
                return
            if moment == "left":
                left = OutcomeFile(home / name / "outcome.json")
                left.write(an_attempt(study, record), record.config, record.outcome)
                die()
            if moment == "spooled":
                Spool(home / name / "spool.jsonl", study.identity).append(record)
                die()
            study.tell(trial, record)
            say("told", trial.number, speed)
            if moment == "told":
                die()
        if moment == "wait":
            time.sleep(60)


if __name__ == "__main__":
    drive(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
