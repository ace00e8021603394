"""The seam between the tuner and whatever runs a configuration.

Real: `supervisor.SupervisedRunner`, a child process that owns the device. Test:
`replay.ReplayRunner`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

from storage.records import Outcome
from sweep.running.wire import Progress, TrialRequest

Observer = Callable[[Progress], bool]
"""Called for each sign of life; returns True to stop the trial early as slow."""


def keep_going(_: Progress) -> bool:
    """Observe nothing and stop nothing."""
    return False


class Runner(Protocol):
    """Runs configurations one after another on one device, under one memory budget.

    A runner never raises for what a configuration does: out of memory, a crash, a hang and a loss
    that is not finite are outcomes. It raises `EnvironmentFault` where the device itself is not to
    be had. The budget is the runner's to keep, to the byte: a peak above it is `OutOfMemory` (by
    `storage.records.over_budget`), however well the trial ran. The loop of a study holds what it is
    told to the same budget, so that no runner can make a study say that such a trial fits.
    """

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        """Train a configuration for a few steps and say how that ended.

        Whoever measures may leave the outcome on disk as that of the request's attempt (see
        `storage.outcome_file`), so that a death on the way to the caller loses nothing.

        A soak trains on however steady its steps are, until the steps or the seconds are spent,
        and on the way evaluates and saves a checkpoint as a training does; its measurement says
        what that took.

        Where a runner has texts, the request's ``quality`` lets a configuration that was measured
        to its end train on from fresh adapters; its measurement then says what it learned. A loss
        that is not finite there is `Diverged`, and memory that runs out there `OutOfMemory`.
        """
        ...

    def renew(self) -> None:
        """Let the next `run` begin in a fresh process, as nothing of this one's is left."""
        ...

    def start(self) -> None:
        """Begin with what takes time before the first trial, and return at once.

        The first `run` waits for it, and raises what is at fault. Idempotent; without it, `run`
        begins.
        """
        ...

    def cancel(self) -> None:
        """End the running trial at once, from a signal handler or another thread, and all others.

        A latch: every present and later `run` returns `Lost` that is marked as interrupted, at
        once and without launching anything, whatever else is called in between. A request that
        comes between two trials, or while one is being started, is not forgotten. A trial that
        was measured to its end by then has about two seconds to tell its outcome, which is kept.
        """
        ...

    def close(self) -> None:
        """Free the device. Idempotent."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
