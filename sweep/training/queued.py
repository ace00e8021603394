"""Owns the steps that are queued on a device and not yet taken in: their marks and losses.

Nothing here waits for the device. Knows nothing of phases, meters or outcomes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sweep.training.device import Device
from sweep.training.marks import Mark
from sweep.training.step import TrainingLoop

SILENCE_SECONDS = 10.0
"""Of queueing, after which a micro-step that is queued is a sign of life: where one takes so long,
the host is hardly ahead of the device. A beat costs the host what a short step cannot spare."""


@dataclass(frozen=True)
class QueuedStep:
    """An optimizer step, or a round of them, that the device may still be busy with."""

    begun: Mark
    ended: list[Mark]
    """The ends of its micro-steps."""
    gradients: list[Mark]
    """Where all gradients of a step were there; of a round alone."""
    losses: list[torch.Tensor]
    """Of each step, on their way to the host; there when it is done."""
    is_round: bool = False
    """Whether it is a pass over what stands for the texts' epoch."""

    @property
    def is_done(self) -> bool:
        """Whether the device has passed all of it."""
        return self.ended[-1].is_passed()

    @property
    def loss(self) -> float:
        """The mean over its steps, once it is done."""
        return sum(map(float, self.losses)) / len(self.losses)

    def seconds_until(self, marks: Sequence[Mark]) -> list[float]:
        """Return the seconds from its beginning to each of its marks."""
        return [mark.seconds_since(self.begun) for mark in marks]


class StepQueue:
    """The steps that are queued, the oldest first.

    Args:
        device: that does them.
        silence_seconds: of queueing, after which a micro-step that is queued is a sign of life.
    """

    def __init__(self, device: Device, *, silence_seconds: float) -> None:
        self._device = device
        self._silence_seconds = silence_seconds
        self._steps: deque[QueuedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_first_done(self) -> bool:
        """Whether there is a step that can be taken in without waiting."""
        return bool(self._steps) and self._steps[0].is_done

    def take(self) -> QueuedStep:
        """Return the oldest step, which is queued no more."""
        return self._steps.popleft()

    def clear(self) -> None:
        """Forget all of them."""
        self._steps.clear()

    def add(self, loop: TrainingLoop, *, steps: int, beat: Callable[[], None]) -> None:
        """Queue optimizer steps, with a mark where they begin and where each micro-step ends.

        Args:
            loop: whose steps they are.
            steps: that are taken in together.
            beat: called for a sign of life.
        """
        ended: list[Mark] = []
        gradients: list[Mark] = []
        losses: list[torch.Tensor] = []
        started = time.perf_counter()

        def note() -> None:
            ended.append(self._device.mark())
            if time.perf_counter() - started >= self._silence_seconds:
                beat()

        is_round = loop.is_on_round
        note_gradients = (lambda: gradients.append(self._device.mark())) if is_round else _nothing
        begun = self._device.mark()
        for _ in range(steps):
            losses.append(loop.step(on_micro_step=note, on_gradients=note_gradients))
            # The loss is on its way to the host behind the last micro-step.
            ended[-1] = self._device.mark()
        self._steps.append(QueuedStep(begun, ended, gradients, losses, is_round))


def _nothing() -> None:
    """Note nothing."""
