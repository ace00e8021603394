"""A program: a slow simulated study that says each beat and takes signals as `sweep run` does."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.study.events import (
    Event,
    Interruption,
    StopReason,
    TrialFinished,
    TrialProgress,
)
from tests.sweep.simulated_device import a_study, train
from tests.sweep.study.driven import drive


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def listen(event: Event) -> None:
    if isinstance(event, TrialProgress):
        say(f"{event.number} {event.progress.phase}")
    if isinstance(event, TrialFinished):
        say(f"{event.record.number} told")


def main(home: Path, beat_seconds: float) -> int:
    runner = ReplayRunner(otherwise=train, pause=lambda: time.sleep(beat_seconds))
    interruption, reason = Interruption(cancel=runner.cancel), StopReason.INTERRUPTED
    told = {"on_event": listen, "interruption": interruption, "clock": time.monotonic}
    try:
        with a_study(home) as study, interruption.handling_signals():
            reason = drive(study, runner, **told)
    except KeyboardInterrupt:
        if not interruption.is_requested():
            raise
    return 130 if reason is StopReason.INTERRUPTED else 0


if __name__ == "__main__":
    # A suite that was started with nohup has it ignored, and hands that on.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
