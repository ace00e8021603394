"""A program: a slow simulated study that says each beat and takes signals as `sweep run` does.

What is slow is the trial's beats, the choice of the second trial's configuration, or its check.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from search_spaces.config import TrialConfig
from sweep.predict.forecast import Forecaster
from sweep.running.replay import ReplayRunner
from sweep.sampling.samplers import make_sampler
from sweep.study.driver import Driver
from sweep.study.events import Event, Interruption, StopReason, TrialFinished, TrialProgress
from sweep.study.tuner import tune
from tests.sweep.simulated_device import BUDGET, MODEL, Knowing, a_space, a_study, train


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def listen(event: Event) -> None:
    if isinstance(event, TrialProgress):
        say(f"{event.number} {event.progress.phase}")
    if isinstance(event, TrialFinished):
        say(f"{event.record.number} told")


def slow_from_the_second(what: str) -> Callable[[TrialConfig], None]:
    """Return a check that takes the first trial at once and the second for ever."""
    seen: set[str] = set()

    def check(config: TrialConfig) -> None:
        seen.add(config.key())
        if len(seen) > 1:
            say(what)
            time.sleep(600)

    return check


def main(home: Path, beat_seconds: float, slow: str = "trial") -> int:
    runner = ReplayRunner(otherwise=train, pause=lambda: time.sleep(beat_seconds))
    interruption = Interruption(cancel=runner.cancel)
    check = slow_from_the_second("checking") if slow == "check" else lambda _: None
    forecaster = Forecaster(model=MODEL, budget_bytes=BUDGET, violation=check)
    choosing = slow_from_the_second("choosing")
    choosing(a_space().baseline_config())
    sampler = make_sampler(
        "random",
        a_space(),
        seed=0,
        forecaster=Knowing(refuses=lambda config: slow == "ask" and bool(choosing(config))),
    )
    reason = StopReason.INTERRUPTED
    try:
        with a_study(home, sampler=sampler) as study, interruption.handling_signals():
            reason = tune(
                Driver(
                    study,
                    runner=runner,
                    forecaster=forecaster,
                    on_event=listen,
                    interruption=interruption,
                )
            )
    except KeyboardInterrupt:
        if not interruption.is_requested():
            raise
    return 130 if reason is StopReason.INTERRUPTED else 0


if __name__ == "__main__":
    # A suite that was started with nohup has it ignored, and hands that on.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:]))
