"""A program: the command `sweep` with a simulated device; all else that it does is real."""

from __future__ import annotations

import os
import sys
import time

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import Measured, Outcome
from qlora_sweep.sweep import cli
from qlora_sweep.sweep.terminal import driving
from tests.sweep.simulated_device import a_measurement
from tests.sweep.simulated_drive import driving_on


def measured(config: TrialConfig) -> Outcome:
    time.sleep(float(os.environ.get("TRIAL_SECONDS", "0.3")))
    return Measured(measurement=a_measurement(config, peak_allocated_bytes=1000))


if __name__ == "__main__":
    driving.drive = driving_on(measured)
    sys.exit(cli.main())
