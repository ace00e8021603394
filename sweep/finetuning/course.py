"""The course of a training, step by step: losses, tokens and seconds, read when the device has
passed them, kept from one run to the next, and what they come to.

Nothing here waits for work that the device still has in front of it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from sweep.training.adapters import Compilation
from sweep.training.device import Device, Mark

_AHEAD_STEPS = 2
"""That may be queued: enough for the device never to wait, so few that a loss is not late."""
WARMUP_STEPS = 5
"""Of each run, that are no measure of its speed: kernels are chosen, the allocator grows."""
_STRETCHES = 24
"""Into so many the steps of texts are put together, each of many sizes, to be alike."""
_LAST_SHARE = 0.1


@dataclass
class Steps:
    """What is known of all steps so far, a list for each thing; plain values, to be stored."""

    losses: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """That carry loss."""
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
    data_wait_seconds: float = 0.0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Steps:
        """Read what `to_json` wrote."""
        points = [(int(step), float(loss)) for step, loss in values["evaluations"]]
        return cls(**{**values, "evaluations": points})

    @property
    def done(self) -> int:
        """Steps."""
        return len(self.losses)

    @property
    def total_seconds(self) -> float:
        """Of all steps and of what interrupted them."""
        return sum(self.seconds) + self.interrupted_seconds

    def median_rate(self) -> float | None:
        """Return tokens that carry loss per second, as a trial measures them.

        Where none of the steps is a measure of it, over those after the first.

        A trial's steps are alike, and the median step is its measure. Where texts make steps of
        many sizes, stretches of consecutive steps are what is alike.
        """
        steady = self._steady()
        if not steady:
            return None
        alike = len({tokens for tokens, _ in steady}) == 1
        length = 1 if alike else max(1, len(steady) // _STRETCHES)
        stretches = [steady[at : at + length] for at in range(0, len(steady), length)]
        whole = [s for s in stretches if len(s) == length]
        return statistics.median(sum(t for t, _ in s) / sum(x for _, x in s) for s in whole)

    def median_seconds(self) -> float | None:
        """Return the seconds of the median step after the warm-up."""
        steady = self._steady()
        return statistics.median(seconds for _, seconds in steady) if steady else None

    def recent_rate(self, count: int = 20) -> float | None:
        """Return tokens that carry loss per second, over the newest steps."""
        seconds = sum(self.seconds[-count:])
        return sum(self.tokens[-count:]) / seconds if seconds else None

    def final_loss(self) -> float:
        """Return the mean over the last tenth of the steps."""
        return statistics.fmean(self.losses[-max(1, round(_LAST_SHARE * self.done)) :])

    @property
    def measured(self) -> int:
        """Steps that are a measure of speed; 0 where there is none behind the warm-up."""
        return sum(self.is_warm)

    def _steady(self) -> list[tuple[int, float]]:
        told = zip(self.tokens, self.seconds, self.is_warm, strict=True)
        warm = [(tokens, seconds) for tokens, seconds, is_warm in told if is_warm]
        if warm:
            return warm
        # The first step is the slowest by far; alone, it is all there is.
        every = list(zip(self.tokens, self.seconds, strict=True))
        return every[1:] or every


@dataclass(frozen=True)
class _Queued:
    """A step that the device may still be busy with."""

    ended: Mark
    loss: torch.Tensor
    """Sum over its micro-batches of their shares; on its way to the host, as the next two are."""
    tokens: torch.Tensor
    gradient_norm: torch.Tensor | None
    computed: int
    learning_rate: float
    has_compiled: bool


class Course:
    """Follows the steps of one run.

    Args:
        device: that trains.
        steps: of earlier runs, which this one adds to.
        checks_gradients: whether a gradient that is not finite ends it; a loss scale, which fp16
            has, makes some so and leaves their steps out.
        compilation: what the compiler does meanwhile, which each new width of texts calls for.
    """

    def __init__(
        self,
        device: Device,
        steps: Steps,
        *,
        checks_gradients: bool,
        compilation: Compilation | None = None,
    ) -> None:
        self.steps = steps
        self.fault: str | None = None
        """What is not finite, ``loss nan``; None while all is."""
        self.fault_step = 0
        self._device = device
        self._checks_gradients = checks_gradients
        self._compilation = compilation
        self._compiling_seconds = 0.0
        self._queued: deque[_Queued] = deque()
        self._of_run = 0
        self._last: Mark | None = None
        self._loss: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        self._tokens = torch.zeros((), dtype=torch.int64)
        self._computed = 0

    def begin_stretch(self) -> None:
        """Count seconds from now on: something else was done."""
        self._last = self._device.mark()

    def add_batches(self, tokens: torch.Tensor, *, computed: int) -> None:
        """Take in the batches of the step that begins."""
        self._tokens, self._computed, self._loss = tokens, computed, None

    def add_loss(self, loss: torch.Tensor) -> None:
        """Take in a micro-batch's share of the step's loss."""
        self._loss = loss if self._loss is None else self._loss + loss

    def add_gradient_norm(self, norm: torch.Tensor) -> None:
        """Take in the norm of the step's gradients, before they were clipped."""
        self._norm = norm

    def end_step(self, *, learning_rate: float) -> None:
        """Queue what the step that ends comes to, and read what the device has passed."""
        assert self._loss is not None
        norm = self._norm if self._checks_gradients else None
        sent = [
            None if tensor is None else tensor.detach().to("cpu", non_blocking=True)
            for tensor in (self._loss, self._tokens, norm)
        ]
        loss, tokens, norm = sent
        assert loss is not None
        assert tokens is not None
        # Behind the copies: they are there when it is passed.
        mark = self._device.mark()
        has_compiled = self._has_compiled()
        self._queued.append(
            _Queued(mark, loss, tokens, norm, self._computed, learning_rate, has_compiled)
        )
        self._loss = self._norm = None
        while len(self._queued) >= _AHEAD_STEPS or (
            self._queued and self._queued[0].ended.is_passed()
        ):
            self._take_in()

    def settle(self) -> None:
        """Read all that is queued: nothing is in flight afterwards."""
        while self._queued:
            self._take_in()

    def _has_compiled(self) -> bool:
        """Return whether something was compiled since this was asked."""
        if self._compilation is None:
            return False
        before, self._compiling_seconds = self._compiling_seconds, self._compilation.seconds
        return self._compiling_seconds > before

    def _take_in(self) -> None:
        step = self._queued.popleft()
        step.ended.wait()
        assert self._last is not None
        steps = self.steps
        steps.seconds.append(step.ended.seconds_since(self._last))
        self._last = step.ended
        self._of_run += 1
        steps.losses.append(float(step.loss))
        steps.tokens.append(int(step.tokens))
        steps.computed.append(step.computed)
        steps.learning_rates.append(step.learning_rate)
        steps.is_warm.append(self._of_run > WARMUP_STEPS and not step.has_compiled)
        self._judge(step)

    def _judge(self, step: _Queued) -> None:
        """Note the first thing that is not finite."""
        norm = None if step.gradient_norm is None else float(step.gradient_norm)
        for name, value in (("loss", self.steps.losses[-1]), ("gradient norm", norm)):
            if self.fault is None and value is not None and not math.isfinite(value):
                self.fault, self.fault_step = f"{name} {value}", self.steps.done
