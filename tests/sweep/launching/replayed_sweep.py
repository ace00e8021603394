"""A program: the command `sweep` with a simulated device; all else that it does is real."""

from __future__ import annotations

import sys
import time
from functools import partial

from search_spaces.config import TrialConfig
from storage.records import Measured, Outcome
from sweep import cli
from sweep.running.replay import ReplayRunner
from sweep.study.session import drive
from sweep.terminal import driving
from tests.sweep.simulated_device import a_measurement


def measured(config: TrialConfig) -> Outcome:
    time.sleep(0.3)
    return Measured(measurement=a_measurement(config, peak_allocated_bytes=1000))


if __name__ == "__main__":
    new_runner = partial(ReplayRunner, otherwise=measured)
    driving.drive = partial(drive, new_runner=lambda _: new_runner())  # type: ignore[assignment]
    sys.exit(cli.main())
