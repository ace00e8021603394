"""How long a worker may take: for a sign of life, for a step, for a trial as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

from search_spaces.space import MICRO_STEPS_TIMED, StepBudget
from storage.records import Phase
from sweep.running.wire import Progress

_PHASES: tuple[Phase, ...] = get_args(Phase)
"""In the order in which a trial goes through them."""
_COUNTED_SECONDS_MAX = 1.0
"""Most seconds between two looks that count: whoever looks far later was away, or stopped."""
_ABSENCE_SECONDS = 5.0
"""Between two looks, from which on the worker's silence is counted anew: it may have been stopped
as well, with a machine that was suspended."""


@dataclass(frozen=True)
class Deadlines:
    """Longest silence allowed in each phase, in seconds.

    A hang shows as silence alone: a kernel that never ends keeps the worker from answering, and
    only a kill frees the card.
    """

    start: float = 300.0
    build: float = 1800.0
    attach: float = 120.0
    warmup: float = 300.0
    """The first step compiles kernels, or whole layers."""
    measure: float = 120.0
    compare: float = 300.0
    """Eager passes in 16 bits, of which each recomputes every layer."""
    detach: float = 120.0
    quality: float = 300.0
    """The first step of this training compiles anew, as that of the warm-up does."""
    quality_seconds_per_token: float = 1.0
    """Of all that is trained on for its quality, beside what begins and ends that."""
    silences_per_step: float = 8.0
    """So many times a phase's longest silence, with signs of life and no step done, is no progress:
    two micro-steps that are being queued, two that are waited for, an evaluation and a checkpoint
    come to six. A pass over the micro-batches that stand for texts has more of them."""
    closed: float = 5.0
    """From when the worker closed a pipe until it is ended: it may be about to end by itself, and
    its own exit status says more."""
    end: float = 60.0
    """After SIGKILL, until the worker is given up: one with much memory takes a while to end."""

    def of(self, phase: Phase) -> float:
        """Return the longest silence allowed in a phase."""
        return float(getattr(self, phase))

    def of_progress(self, phase: Phase, *, micro_steps: int = MICRO_STEPS_TIMED) -> float:
        """Return how long a phase may go on without a step, which is timed over so many
        micro-steps."""
        return self.silences_per_step * micro_steps / MICRO_STEPS_TIMED * self.of(phase)

    def of_trial(self, steps: StepBudget, *, micro_steps: int = MICRO_STEPS_TIMED) -> float:
        """Return how long a trial may take as a whole, with every step as slow as is allowed.

        Seconds of the budget come on top of what begins the measured steps, so that a soak of hours
        has them.
        """
        step = micro_steps * self.measure
        # Its end is looked for after a step; a soak evaluates and saves once.
        measured = min(steps.seconds_max + step, steps.measured_max * step) + 2 * self.measure
        fewest = steps.measured_min * step
        warmup = self.warmup + steps.warmup_max * step
        return self.build + self.attach + warmup + max(measured, fewest) + self.detach

    def of_quality(self, tokens: int) -> float:
        """Return how long training for quality, and asking for it, may take on top."""
        return self.attach + 2 * self.quality + tokens * self.quality_seconds_per_token


@dataclass
class AttentiveClock:
    """Seconds that this process was there to look.

    A driver that was stopped, in a debugger or with the whole machine, does not lay the time to the
    worker; and the wall's clock, which may jump, is never asked.
    """

    clock: Callable[[], float] = time.monotonic
    now: float = 0.0
    returned_at: float = 0.0
    """When it last came back from an absence."""
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.clock()

    def look(self) -> float:
        """Return the seconds until now; to be called every so often, or time stands still."""
        last, self._last = self._last, self.clock()
        elapsed = self._last - last
        self.now += min(elapsed, _COUNTED_SECONDS_MAX)
        if elapsed >= _ABSENCE_SECONDS:
            self.returned_at = self.now
        return self.now


@dataclass
class Patience:
    """With one trial: which of its limits ends it, and when.

    Attributes:
        micro_steps: over which what counts as a step is timed.
        quality_tokens: that are trained on, or looked at, for its quality; 0 for none.
    """

    deadlines: Deadlines
    clock: AttentiveClock
    steps: StepBudget
    micro_steps: int = MICRO_STEPS_TIMED
    quality_tokens: int = 0
    phase: Phase = "attach"
    _begun_at: float = field(init=False)
    _heard_at: float = field(init=False)
    _progress_at: float = field(init=False)
    _furthest: tuple[int, int] = (-1, -1)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Count from now on: the trial has begun."""
        self._begun_at = self._heard_at = self._progress_at = self.clock.look()

    def hear(self, progress: Progress) -> None:
        """Take in a sign of life; progress is a later phase, or a further step of one."""
        self.phase = progress.phase
        self._heard_at = self.clock.look()
        reached = (_PHASES.index(progress.phase), progress.step)
        if reached > self._furthest:
            self._furthest, self._progress_at = reached, self._heard_at

    def until(self) -> float:
        """Return when time is up, by the clock, if nothing more is heard."""
        return min(at for at, _ in self._limits())

    def exceeded(self) -> str | None:
        """Return which limit was passed, in words; None where none was."""
        return next((words for at, words in self._limits() if self.clock.now >= at), None)

    def _limits(self) -> tuple[tuple[float, str], ...]:
        silence = self.deadlines.of(self.phase)
        progress = self.deadlines.of_progress(self.phase, micro_steps=self.micro_steps)
        whole = self.deadlines.of_trial(self.steps, micro_steps=self.micro_steps)
        if self.quality_tokens:
            whole += self.deadlines.of_quality(self.quality_tokens)
        back = self.clock.returned_at
        return (
            (max(self._heard_at, back) + silence, f"no sign of life for {silence:g} s"),
            (
                max(self._progress_at, back) + progress,
                f"signs of life, but no step further for {progress:g} s",
            ),
            (self._begun_at + whole, f"the trial as a whole took longer than {whole:g} s"),
        )
