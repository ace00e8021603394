"""Commands that drive a study whose device is simulated; all else that they do is real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import Outcome
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.study.events import StopReason
from qlora_sweep.sweep.study.prepared import Prepared
from qlora_sweep.sweep.study.session import drive


def driving_on(train: Callable[[TrialConfig], Outcome]) -> Callable[..., StopReason]:
    """Return what a command drives a study with, so that each trial is what ``train`` says."""

    def simulated(prepared: Prepared, **options: Any) -> StopReason:
        # Behind what the command says, which has workers of its own in mind.
        return drive(prepared, **{**options, "new_runner": lambda _: ReplayRunner(otherwise=train)})

    return simulated
