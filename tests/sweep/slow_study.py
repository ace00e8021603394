"""A program: a slow simulated study that says each beat and takes signals as `sweep run` does."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from sweep.events import Event, StopReason, TrialProgress
from sweep.interruption import Interruption
from sweep.preflight import Preflight
from sweep.replay import ReplayRunner
from sweep.tuner import tune
from tests.sweep.simulated_device import BUDGET, MODEL, a_study, train


def say(event: Event) -> None:
    if isinstance(event, TrialProgress):
        sys.stdout.write(f"{event.number} {event.progress.phase}\n")
        sys.stdout.flush()


def main(home: Path, beat_seconds: float) -> int:
    runner = ReplayRunner(otherwise=train, pause=lambda: time.sleep(beat_seconds))
    interruption = Interruption(cancel=runner.cancel)
    preflight = Preflight(model=MODEL, budget_bytes=BUDGET, violation=lambda _: None)
    with a_study(home) as study, interruption.handling_signals():
        reason = tune(
            study,
            runner=runner,
            preflight=preflight,
            on_event=say,
            should_stop=interruption.is_requested,
        )
    return 130 if reason is StopReason.INTERRUPTED else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
