"""The steps of a training: losses, tokens and seconds, read once the device has passed them, and
kept from one run to the next. Nothing here waits for work that the device still has in front of it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from qlora_sweep.sweep.training.adapters import Compilation
from qlora_sweep.sweep.training.device import Device, Mark, Memory

_AHEAD_STEPS = 2
"""That may be queued: enough for the device never to wait, so few that a loss is not late."""
WARMUP_STEPS = 5
"""Of each run, that are no measure of its speed: kernels are chosen, the allocator grows."""
_STRETCHES = 24
"""Into so many the steps on texts are put together, each of many sizes, to be alike."""
_LAST_SHARE = 0.1


@dataclass
class Steps:
    """What is known of all steps so far, a list for each thing; plain values, to be stored."""

    losses: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    """That each step was taken with."""
    tokens: list[int] = field(default_factory=list)
    """Supervised ones."""
    computed: list[int] = field(default_factory=list)
    """Tokens that went through the model, padding included."""
    seconds: list[float] = field(default_factory=list)
    """From the end of the step before, or of what interrupted it."""
    is_warm: list[bool] = field(default_factory=list)
    """Whether a step is a measure of speed: not one of a run's first, and nothing was compiled."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """Step and loss of each evaluation on the way."""
    checkpoints: int = 0
    interrupted_seconds: float = 0.0
    """That checkpoints and evaluations took."""
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0

    @property
    def done(self) -> int:
        """Steps."""
        return len(self.losses)

    def median_rate(self) -> float | None:
        """Return supervised tokens per second, as a trial measures them: at the median step where
        steps are alike; where texts make them of many sizes, of the median stretch of consecutive
        steps. Without a warm step it is that of those after the first.
        """
        steady = self._steady()
        if not steady:
            return None
        length = max(1, len(steady) // _STRETCHES)
        if len({tokens for tokens, _ in steady}) == 1:
            length = 1
        rates = []
        for end in range(length, len(steady) + 1, length):
            tokens, seconds = zip(*steady[end - length : end], strict=True)
            rates.append(sum(tokens) / sum(seconds))
        return statistics.median(rates)

    def note_peak(self, memory: Memory) -> None:
        """Take in the most that was allocated so far."""
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, memory.peak_allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, memory.peak_reserved_bytes or 0)

    def figures(self) -> dict[str, Any]:
        """Return what the steps come to, by the names of `protocol.TrainingResult`."""
        seconds = sum(self.seconds) + self.interrupted_seconds
        tokens = sum(self.tokens)
        steady_seconds = [seconds for _, seconds in self._steady()]
        last = max(1, round(_LAST_SHARE * self.done))
        return {
            "tokens": tokens,
            "tokens_computed": sum(self.computed),
            "tokens_per_second": self.median_rate(),
            "run_tokens_per_second": tokens / seconds,
            "step_seconds": statistics.median(steady_seconds),
            "steps_measured": sum(self.is_warm),
            "seconds": seconds,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes or None,
            "train_loss": statistics.fmean(self.losses),
            "final_train_loss": statistics.fmean(self.losses[-last:]),
            "checkpoints": self.checkpoints,
            "checkpoint_seconds": self.interrupted_seconds,
        }

    def _steady(self) -> list[tuple[int, float]]:
        every = list(zip(self.tokens, self.seconds, strict=True))
        warm = [step for step, is_warm in zip(every, self.is_warm, strict=True) if is_warm]
        # The first step is the slowest by far; alone, it is all there is.
        return warm or every[1:] or every


class RunTracker:
    """Follows the steps of one run.

    Args:
        device: that trains.
        steps: of earlier runs, which this one adds to.
        compilation: what the compiler does meanwhile, which each new width of texts calls for.
    """

    def __init__(
        self, device: Device, steps: Steps, *, compilation: Compilation | None = None
    ) -> None:
        self.steps = steps
        self.fault_step: int | None = None
        """The first whose loss is not finite."""
        self._device = device
        self._compilation = compilation
        self._compiling_seconds = 0.0
        self._queued: deque[tuple[Mark, torch.Tensor, bool]] = deque()
        """Steps that the device may still be busy with: where each ends, its loss, and whether it
        has compiled."""
        self._of_run = 0
        self._last = device.mark()

    def begin_stretch(self) -> None:
        """Count seconds from now on: something else was done."""
        self._last = self._device.mark()

    def end_step(
        self, loss: torch.Tensor, *, tokens: int, computed: int, learning_rate: float
    ) -> None:
        """Queue what the step that ends comes to, and read what the device has passed."""
        self.steps.tokens.append(tokens)
        self.steps.computed.append(computed)
        self.steps.learning_rates.append(learning_rate)
        loss = loss.to("cpu", non_blocking=True)
        has_compiled = False
        if self._compilation is not None:
            has_compiled = self._compilation.seconds > self._compiling_seconds
            self._compiling_seconds = self._compilation.seconds
        # The mark is behind the copy: that is there when it is passed.
        self._queued.append((self._device.mark(), loss, has_compiled))
        while self._queued and (
            len(self._queued) >= _AHEAD_STEPS or self._queued[0][0].is_passed()
        ):
            self._take_in()

    def settle(self) -> None:
        """Read all that is queued: nothing is in flight afterwards."""
        while self._queued:
            self._take_in()

    def _take_in(self) -> None:
        steps = self.steps
        ended, loss, has_compiled = self._queued.popleft()
        ended.wait()
        steps.seconds.append(ended.seconds_since(self._last))
        self._last = ended
        self._of_run += 1
        steps.losses.append(float(loss))
        steps.is_warm.append(self._of_run > WARMUP_STEPS and not has_compiled)
        if self.fault_step is None and not math.isfinite(steps.losses[-1]):
            self.fault_step = steps.done
