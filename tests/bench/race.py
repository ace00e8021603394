"""Race ways of searching on one GPU: seconds from the command to within 2 % of the best found.

Each way is a study of its own in a process of its own, with nothing kept from the others, not even
traced memory. `fresh` is the guided sampler with a new worker for each trial, as tools work that
start a process per trial.

    python -m tests.bench.race SPACE OUT.json [--ways guided,tpe,fresh] [--seconds 150]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.records import Outcome
from storage.study import OpenStudy
from sweep.running.device_info import read_card
from sweep.running.runner import Runner
from sweep.study.events import Event, Interruption, Listener, TrialFinished
from sweep.study.session import Prepared, drive, prepare, supervised_runner
from tests.bench.stamp import stamp

NEAR = 0.02
WAYS: dict[str, dict[str, Any]] = {
    "guided": {},
    "tpe": {"sampler": "tpe"},
    "fresh": {},
}


class FreshEachTime:
    """A runner that begins every trial in a new process."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, *arguments: Any, **options: Any) -> Outcome:
        """Run in a process that has run nothing."""
        self._runner.renew()
        return self._runner.run(*arguments, **options)

    def __enter__(self) -> FreshEachTime:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def go(way: str, space: str, seconds: float, *, began: float) -> None:
    """Search one way; print a JSON line for each trial as it ends, and one at the end."""
    overrides: dict[str, Any] = {**WAYS[way], "confirm": False, "time_budget_seconds": seconds}
    prepared = prepare(space, overrides=overrides, held=None, study=way, card=read_card)

    def say(**values: Any) -> None:
        print(json.dumps({"way": way, "at": time.time() - began, **values}), flush=True)

    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished):
            measured = event.record.measurement
            say(
                number=event.record.number,
                verdict=event.record.verdict,
                tokens_per_second=None if measured is None else measured.tokens_per_second,
                config=event.record.config.model_dump(mode="json", exclude_defaults=True),
            )

    @contextmanager
    def watch(_: OpenStudy, __: Interruption) -> Iterator[Listener]:
        yield listen

    def runner(prepared: Prepared) -> Any:
        own = supervised_runner(prepared)
        return FreshEachTime(own.all[0]) if way == "fresh" else own

    storage = f"sqlite:///{os.environ['SWEEP_HOME']}/race.db"
    reason = drive(
        prepared,
        storage=storage,
        watch=watch,
        warn=lambda text: print(text, file=sys.stderr),
        new_runner=runner,
    )
    say(stopped=str(reason))


def raced(way: str, space: str, seconds: float) -> list[dict[str, Any]]:
    """Return the lines of one way."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "SWEEP_HOME": home, "XDG_CACHE_HOME": home}
        command = [sys.executable, "-m", "tests.bench.race", space, "-", "--go", way]
        command += ["--seconds", str(seconds), "--began", str(time.time())]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Race the ways one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("space")
    parser.add_argument("out", type=Path)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--go", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.go:
        go(arguments.go, arguments.space, arguments.seconds, began=arguments.began)
        return
    ways = arguments.ways.split(",")
    lines = [line for way in ways for line in raced(way, arguments.space, arguments.seconds)]
    trials = [line for line in lines if line.get("verdict") == "fits"]
    best = max(line["tokens_per_second"] for line in trials)
    summary = {}
    for way in ways:
        own = [line for line in lines if line["way"] == way]
        near = [line for line in own if (line.get("tokens_per_second") or 0) >= (1 - NEAR) * best]
        first = near[0] if near else None
        summary[way] = {
            "seconds_to_near": None if first is None else round(first["at"], 1),
            "trials_to_near": None if first is None else first["number"] + 1,
            "trials": sum("verdict" in line for line in own),
            "seconds": round(own[-1]["at"], 1),
        }
        print(way, summary[way])
    document = {**stamp(), "best_tokens_per_second": best, "summary": summary, "trials": lines}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
