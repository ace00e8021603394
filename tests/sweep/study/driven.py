"""Studies of the simulated GPU that a test drives in its own process."""

from __future__ import annotations

import threading
from pathlib import Path
from types import FunctionType
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import Outcome
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.sweep.predict.forecast import Forecaster
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.sampling.samplers import make_sampler
from qlora_sweep.sweep.study.driver import Driver
from qlora_sweep.sweep.study.events import StopReason
from qlora_sweep.sweep.study.tuner import tune
from tests.sweep.simulated_device import BUDGET, MODEL, a_study, train

WAIT_SECONDS = 20.0
"""No test waits so long unless it fails."""


class Clock:
    """Gains a second each time it is read."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


class StandingClock:
    """Stands still until a trial of hours is begun."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class WaitsForItsEnd(ReplayRunner):
    """Answers so many trials at once; the next takes all the time there is, until it is cancelled.

    Args:
        answered: at once.
        clock: of the study.
        soaking: answers for soaks.
    """

    def __init__(self, answered: int, clock: StandingClock, **soaking: Any) -> None:
        super().__init__(otherwise=self._answer, **soaking)
        self._left = answered
        self._clock = clock
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        super().cancel()
        self._cancelled.set()

    def _answer(self, config: TrialConfig) -> Outcome:
        self._left -= 1
        if self._left < 0:
            self._clock.seconds += 3600.0
            assert self._cancelled.wait(WAIT_SECONDS), "nobody ended it"
        return train(config)


def a_forecaster(**changes: Any) -> Forecaster:
    values = {"model": MODEL, "budget_bytes": BUDGET, "violation": lambda _: None}
    return Forecaster(**(values | changes))


def a_grid(home: Path, **space: Any) -> OpenStudy:
    """Open a study under a sampler that asks for each configuration once."""
    study = a_study(home, **space)
    study.study.sampler = make_sampler("grid", study.definition.space, seed=0)
    return study


def drive(
    study: OpenStudy, runner: Any = train, *, is_anew: bool = False, **changes: Any
) -> StopReason:
    """Drive a study to its end, by a runner or by what answers for a GPU."""
    runner = ReplayRunner(otherwise=runner) if isinstance(runner, FunctionType) else runner
    values = {"forecaster": a_forecaster(), "clock": Clock()} | changes
    return tune(Driver(study, runner=runner, **values), is_anew=is_anew)
