"""The seam between the tuner and whatever runs a configuration, and trials that run beside each
other: one lane per GPU.

Real: `supervisor.SupervisedRunner`, a child process that owns the device. Test:
`replay.ReplayRunner`. A runner waits for its trial, so each lane of several has a thread of its
own; all that the trials say is heard in the thread that waits for them, which alone touches a
study.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from search_spaces.errors import CardLost, EnvironmentFault
from storage.records import INTERRUPTED, Crashed, Outcome, TimedOut
from sweep.running.wire import Progress, TrialRequest

_END_SECONDS = 30.0
"""For which trials that were cancelled are waited for before their runners are closed under them.
"""

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


class Lane:
    """One place where one trial runs at a time; satisfies `Runner`.

    Args:
        runner: of the place.
        name: for a person; empty where there is no other lane.
        fault: says what is wrong with the card after a trial that failed; None for nothing.
    """

    def __init__(
        self, runner: Runner, *, name: str = "", fault: Callable[[], str | None] = lambda: None
    ) -> None:
        self._runner = runner
        self.name = name
        self._fault = fault
        self.lost: EnvironmentFault | None = None
        """Why nothing can run here any more; None as long as it can. Not each run that raised is an
        end: of several runs of a trial the last may fail where an earlier one counts."""
        self.renew, self.start = runner.renew, runner.start
        self.cancel, self.close = runner.cancel, runner.close

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        """See `Runner.run`.

        Raises:
            CardLost: the trial failed, and the card has a fault of its own.
            EnvironmentFault: as the lane's runner has it.
        """
        outcome = self._runner.run(request, observe=observe)
        if isinstance(outcome, Crashed | TimedOut) and (fault := self._fault()) is not None:
            raise CardLost(f"{self.name or 'the card'}: {fault}")
        return outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Job = Callable[[], Outcome]
"""Runs one trial on the lane that it is launched on."""


@dataclass(frozen=True)
class Ended:
    """A trial that ended, or the lane that was lost under it."""

    lane: Lane
    result: Outcome | EnvironmentFault


class Lanes:
    """The lanes of one study. A single one runs its trials in the thread that waits for them.

    Args:
        lanes: at least one.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        assert lanes, "a study runs somewhere"
        self.all = tuple(lanes)
        self._is_single = len(self.all) == 1
        self._jobs: dict[Lane, Job] = {}
        self._told: dict[Lane, queue.SimpleQueue[Job | None]] = {}
        self._threads: dict[Lane, threading.Thread] = {}
        self._said: queue.SimpleQueue[Callable[[], Ended | None]] = queue.SimpleQueue()
        """What the trials have to say, and how they ended."""

    @classmethod
    def of(cls, runner: Runner | Lanes) -> Lanes:
        """Return lanes as they are, and the lane of a single runner."""
        if isinstance(runner, Lanes):
            return runner
        return cls([runner if isinstance(runner, Lane) else Lane(runner)])

    @property
    def working(self) -> tuple[Lane, ...]:
        """Those that were not lost."""
        return tuple(lane for lane in self.all if lane.lost is None)

    @property
    def idle(self) -> tuple[Lane, ...]:
        """Those that a trial can be launched on."""
        return tuple(lane for lane in self.working if lane not in self._jobs)

    def is_busy(self, lane: Lane) -> bool:
        """Whether a trial was launched on a lane whose end was not heard."""
        return lane in self._jobs

    def launch(self, lane: Lane, job: Job) -> None:
        """Begin a trial on an idle lane; its end comes from `next_end`."""
        assert lane not in self._jobs, f"{lane.name} runs another trial"
        self._jobs[lane] = job
        if self._is_single:
            return
        if lane not in self._threads:
            # One for all its trials: a worker ends with the thread that started it.
            self._told[lane] = queue.SimpleQueue()
            thread = threading.Thread(target=self._work, args=(lane,), daemon=True)
            self._threads[lane] = thread
            thread.start()
        self._told[lane].put(job)

    def _work(self, lane: Lane) -> None:
        for job in iter(self._told[lane].get, None):
            result: Outcome | BaseException
            try:
                result = job()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                result = error
            self._said.put(partial(self._ended, lane, result))

    def say(self, action: Callable[[], None]) -> None:
        """Do what a running trial has to say, in the thread that waits for its end."""
        if self._is_single:
            action()
        else:
            self._said.put(action)

    def next_end(self) -> Ended:
        """Wait until one of the running trials ends, and say meanwhile what they have to say.

        Whoever asks so often to stop that nothing is waited for any more has them end interrupted,
        one after the other.
        """
        ended: Ended | None = None
        if self._is_single:
            ((lane, job),) = self._jobs.items()
            try:
                ended = self._ended(lane, job())
            except EnvironmentFault as fault:
                ended = self._ended(lane, fault)
        try:
            while ended is None:
                ended = self._said.get()()
        except KeyboardInterrupt:
            if not self._jobs:
                raise
            lane, _ = self._jobs.popitem()
            ended = Ended(lane, INTERRUPTED)
        return ended

    def _ended(self, lane: Lane, result: Outcome | BaseException) -> Ended | None:
        """Take in how a trial ended; None for one that was not waited for any more."""
        if self._jobs.pop(lane, None) is None:
            return None
        if isinstance(result, EnvironmentFault):
            lane.lost = result
        elif isinstance(result, BaseException):
            raise result
        return Ended(lane, result)

    def start(self) -> None:
        """See `Runner.start`, of all of them."""
        for lane in self.working:
            lane.start()

    def cancel(self) -> None:
        """See `Runner.cancel`, of all of them."""
        for lane in self.all:
            lane.cancel()

    def close(self) -> None:
        """Free all devices; what still runs is for nobody. Idempotent."""
        with ExitStack() as closing:
            # Whatever one of them raises, or somebody who does not want to wait: all are closed.
            for lane in self.all:
                closing.callback(lane.close)
            running = [self._threads[lane] for lane in self._jobs if lane in self._threads]
            if running:
                self.cancel()
            for told in self._told.values():
                told.put(None)
            until = time.monotonic() + _END_SECONDS
            for thread in running:
                thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
