"""Commands that drive a study whose device is simulated; all else that they do is real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import Measured, Outcome
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.study.events import StopReason
from qlora_sweep.sweep.study.prepared import Prepared
from qlora_sweep.sweep.study.session import drive
from tests.sweep.simulated_device import a_measurement


def driving_on(train: Callable[[TrialConfig], Outcome]) -> Callable[..., StopReason]:
    """Return what a command drives a study with, so that each trial is what ``train`` says."""

    def simulated(prepared: Prepared, **options: Any) -> StopReason:
        # Behind what the command says, which has workers of its own in mind.
        return drive(prepared, **{**options, "new_runner": lambda _: ReplayRunner(otherwise=train)})

    return simulated


def fits(config: TrialConfig) -> Outcome:
    """Answer that any configuration fits."""
    return Measured(measurement=a_measurement(config, peak_allocated_bytes=1000))


def simulate(patch: pytest.MonkeyPatch, train: Callable[[TrialConfig], Outcome] = fits) -> None:
    """Have the trials of commands be what a function says; all else that they do is real."""
    patch.setattr("qlora_sweep.sweep.terminal.driving.drive", driving_on(train))
