"""Optimizer steps that are queued on the device, and taken in as it passes them: the next step is
queued before the seconds and the loss of the one before are read, so that the device never waits.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from qlora_sweep.storage.records import Diverged
from qlora_sweep.sweep.training.device import Device, Mark
from qlora_sweep.sweep.training.exceptions import TrialEnded
from qlora_sweep.sweep.training.meter import Meter, fastest_median
from qlora_sweep.sweep.training.process_group import TimeLimit, agreed
from qlora_sweep.sweep.training.step import TrainingLoop

QUIET_SECONDS = 10.0
"""Of queueing, after which a micro-step that is queued is a sign of life: where one takes so long,
the host is hardly ahead of the device. A beat costs the host what a short step cannot spare."""


@dataclass
class _Queued:
    """An optimizer step, or a round of them, that the device may still be busy with."""

    begun: Mark
    is_round: bool
    """Whether it is a pass over what stands for the texts' epoch."""
    ended: list[Mark] = field(default_factory=list)
    """The ends of its micro-steps."""
    gradients: list[Mark] = field(default_factory=list)
    """Where all gradients of a step were there; of a round alone."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Of each step, on their way to the host; there when it is done."""


class StepQueue:
    """The steps of one trial between being queued and being measured.

    Args:
        loop: makes the steps.
        device: that they are queued on.
        meter: takes in what each took.
        limit: until when a further one may begin.
        round_steps: optimizer steps of a pass over what stands for the texts' epoch, which are
            timed as one; 0 for random rows.
        tell: gives a sign of life, with speeds where they are measured; returns whether the trial
            is to stop.
        quiet_seconds: of queueing, after which each micro-step is a sign of life.

    Attributes:
        loss: of the newest step that is done.
        is_measuring: whether what is taken in from now on is measured, and no warm-up.
        is_slow: whether an observer wants the trial stopped.
        is_out_of_time: whether no further step is begun; the same on every rank.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        device: Device,
        meter: Meter,
        *,
        limit: TimeLimit,
        round_steps: int,
        tell: Callable[..., bool],
        quiet_seconds: float,
    ) -> None:
        self.loss = 0.0
        self.is_measuring = False
        self.is_slow = False
        self.is_out_of_time = False
        self._loop = loop
        self._device = device
        self._meter = meter
        self._limit = limit
        self._round_steps = round_steps
        self._tell = tell
        self._quiet_seconds = quiet_seconds
        self._queued: deque[_Queued] = deque()
        """The oldest first."""
        self._step_seconds = 0.0
        """That the newest step took, or the newest round of them."""

    def is_over(self, is_enough: bool) -> bool:
        """Return whether measuring ends: rank 0 has enough, or an observer or the time ends it."""
        return self.is_out_of_time or agreed(self.is_slow or is_enough)

    def advance(self) -> None:
        """Queue a step and take in those before it, so that the device is never without work."""
        done = len(self._meter.measured) + len(self._queued)
        ahead_seconds = (len(self._queued) + 1) * self._step_seconds
        self.is_out_of_time = self._limit.is_over(ahead_seconds=ahead_seconds)
        if self.is_out_of_time or agreed(done >= self._meter.steps.measured_max):
            self.settle()
            return
        self.queue(steps=self._round_steps or 1)
        self.settle(ahead=1)

    def settle(self, *, ahead: int = 0) -> None:
        """Take in all steps but the newest, and whatever else the device is done with."""
        queued = self._queued
        while len(queued) > ahead or (queued and queued[0].ended[-1].is_passed()):
            self.take_in()

    def queue(self, *, steps: int = 1) -> None:
        """Queue optimizer steps, with a mark where they begin and where each micro-step ends; where
        that takes long, each micro-step is a sign of life."""
        started = time.perf_counter()
        queued = _Queued(self._device.mark(), is_round=self._loop.is_on_round)

        def note_end() -> None:
            queued.ended.append(self._device.mark())
            if time.perf_counter() - started >= self._quiet_seconds:
                self._tell()

        def note_gradients() -> None:
            if queued.is_round:
                queued.gradients.append(self._device.mark())

        for _ in range(steps):
            loss = self._loop.step(on_micro_step=note_end, on_gradients=note_gradients)
            queued.losses.append(loss)
            # The loss is on its way to the host behind the last micro-step.
            queued.ended[-1] = self._device.mark()
        self._queued.append(queued)

    def take_in(self) -> None:
        """Wait for the oldest step that is queued, and take in its seconds and its loss.

        Raises:
            TrialEnded: the loss is no number.
        """
        meter = self._meter
        queued = self._queued.popleft()
        for mark in queued.ended:
            mark.wait()
            self._tell()
        self.loss = sum(map(float, queued.losses)) / len(queued.losses)
        if not math.isfinite(self.loss):
            step = len(meter.warmup) + len(meter.measured)
            raise TrialEnded(Diverged(step=step, detail=f"loss {self.loss}"))
        seconds = [mark.seconds_since(queued.begun) for mark in queued.ended]
        if queued.is_round or not self._round_steps:
            self._step_seconds = seconds[-1]
            gradients = [mark.seconds_since(queued.begun) for mark in queued.gradients]
            meter.add(seconds, gradients, is_warmup=not self.is_measuring)
        else:
            # They took their time alone: the measured ones do not train on these.
            meter.warmup_spent += seconds[-1]
        if self.is_measuring and self._tell_speeds():
            self.is_slow = True

    def _tell_speeds(self) -> bool:
        """Tell how fast the steps are so far; return whether the trial is to stop."""
        meter = self._meter
        fastest = fastest_median(meter.measured)
        return self._tell(
            tokens_per_second=meter.tokens_per_step / meter.median_seconds,
            tokens_per_second_high=meter.tokens_per_step / fastest if fastest else None,
        )
