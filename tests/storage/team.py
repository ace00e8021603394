"""Many drivers at once, each a process that tunes a study of its own with a runner that replays.

Run as ``python -m tests.storage.team URL HOME DRIVERS TRIALS SECONDS [STUDY]``: they begin at once,
as their processes are copies of one that has everything imported. With STUDY all want that one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault
from search_spaces.models import load_model_spec
from search_spaces.space import SearchSpace
from storage.definition import StudyDefinition
from storage.directory import Spool
from storage.reading import read_study
from storage.records import Outcome, TrialRecord
from storage.study import open_study
from sweep.predict.forecast import Forecaster
from sweep.running.replay import ReplayRunner
from sweep.sampling.samplers import make_sampler, quiet_optuna
from sweep.study.driver import Driver
from sweep.study.tuner import tune
from tests.storage import long_studies
from tests.storage.builders import BUDGET, ENVIRONMENT, fits

ROOT = Path(__file__).parents[2]


def start(
    url: str, home: Path, *, drivers: int, trials: int, seconds: float = 0.0, study: str = ""
) -> subprocess.Popen[bytes]:
    """Start a team.

    Args:
        url: of the database.
        home: of the studies' files, and of what each driver says of itself (`said`).
        drivers: how many.
        trials: of each study.
        seconds: that each trial takes.
        study: what all of them want; "" for one each, called as `name`.
    """
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.storage.team", url, str(home), str(drivers)]
    return subprocess.Popen([*command, str(trials), str(seconds), study], cwd=ROOT)


def name(driver: int) -> str:
    return f"study-{driver}"


def speed(driver: int, run: int) -> float:
    """Return what a driver measures in its n-th run: no two runs of a team are as fast."""
    return 1e6 + 1e4 * driver + run


def said(home: Path, driver: int) -> dict[str, Any]:
    """Return what came of a driver: ``{"pid", "ran": runs, "end": how}``."""
    path = home / f"driver-{driver}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def run_of(record: TrialRecord) -> tuple[int, int] | None:
    """Return whose run a record is of, and which of that driver's; None where nothing was
    measured."""
    if record.measurement is None:
        return None
    driver, run = divmod(round(record.measurement.tokens_per_second - 1e6), 10_000)
    return driver, run


def broken(
    url: str, home: Path, *, drivers: int, trials: int, was_cut_off: bool = False
) -> list[str]:
    """Return what does not hold of a team that is done: each study whole, each result there once,
    on disk what is in the database.

    Where drivers were cut off from the server, a number may be nobody's: its trial was made, and
    who asked for it never heard of it.
    """
    wrong = []
    for driver in range(drivers):
        end = said(home, driver).get("end")
        if end != "done":
            wrong.append(f"driver {driver}: {end}")
            continue
        study = read_study(name(driver), url=url, home=home)
        numbers = [record.number for record in study.records]
        if numbers != (sorted({*numbers}) if was_cut_off else list(range(trials))):
            wrong.append(f"driver {driver}: numbers {numbers}")
        if [run_of(r) for r in study.records] != [(driver, run + 1) for run in range(trials)]:
            wrong.append(f"driver {driver}: runs {[run_of(r) for r in study.records]}")
        if (
            Spool(home / name(driver) / "spool.jsonl", study.identity).read().records
            != study.records
        ):
            wrong.append(f"driver {driver}: its spool differs from the database")
        if study.running or study.warnings or study.holder:
            wrong.append(f"driver {driver}: {study.running} {study.warnings} {study.holder}")
    return wrong


class _Counting(ReplayRunner):
    """Measures a speed that names driver and run, and says so before anybody is told."""

    def __init__(self, home: Path, driver: int, seconds: float) -> None:
        super().__init__(otherwise=self._answer)
        self._home, self._driver, self._seconds = home, driver, seconds
        self._say("drives")

    def _answer(self, _: TrialConfig) -> Outcome:
        time.sleep(self._seconds)
        outcome = fits(speed(self._driver, len(self.ran)))
        self._say("drives")
        return outcome

    def _say(self, end: str) -> None:
        _write(self._home, self._driver, ran=len(self.ran), end=end)


def _write(home: Path, driver: int, **values: Any) -> None:
    path = home / f"driver-{driver}.json"
    path.with_suffix(".new").write_text(json.dumps({"pid": os.getpid(), **values}))
    path.with_suffix(".new").replace(path)


def a_space(trials: int) -> SearchSpace:
    return long_studies.a_space("random", trials=trials)


def a_definition(*, trials: int) -> StudyDefinition:
    return long_studies.a_definition(a_space(trials))


def drive(url: str, home: Path, driver: int, *, study: str, trials: int, seconds: float) -> None:
    space = a_space(trials)
    model = load_model_spec(space.model)
    forecaster = Forecaster(model=model, budget_bytes=BUDGET, violation=lambda _: None)
    with open_study(
        study,
        url=url,
        definition=a_definition(trials=trials),
        sampler=make_sampler("random", space, seed=driver),
        environment=ENVIRONMENT,
        home=home,
    ) as opened:
        runner = _Counting(home, driver, seconds)
        tune(Driver(opened, runner=runner, forecaster=forecaster))
    _write(home, driver, ran=len(runner.ran), end="done")


def _child(url: str, home: Path, driver: int, gate: int, **of: Any) -> int:
    os.read(gate, 1)
    try:
        drive(url, home, driver, **of)
    except EnvironmentFault as fault:
        _write(home, driver, ran=0, end=str(fault))
        return 3
    except BaseException:  # noqa: BLE001 - said to who started the team
        _write(home, driver, ran=0, end=traceback.format_exc())
        return 1
    return 0


def _fork(work: Any) -> int:
    child = os.fork()
    if child == 0:
        os._exit(work())
    return child


def main(url: str, home: Path, drivers: int, trials: int, seconds: float, study: str) -> None:
    quiet_optuna()
    _warm()
    gate, opener = os.pipe()
    of = {"trials": trials, "seconds": seconds}

    def child(driver: int) -> int:
        os.close(opener)
        return _child(url, home, driver, gate, study=study or name(driver), **of)

    children = [_fork(partial(child, driver)) for driver in range(drivers)]
    # Nobody has it open any more: all of them read its end at once.
    os.close(opener)
    for process in children:
        os.waitpid(process, 0)


def _warm() -> None:
    """Import what is imported on first use, once for all."""
    import optuna.storages

    assert optuna.storages.RDBStorage


if __name__ == "__main__":
    _url, _home, _drivers, _trials, _seconds, _study = sys.argv[1:]
    main(_url, Path(_home), int(_drivers), int(_trials), float(_seconds), _study)
