"""The seam between the tuner and whatever runs a configuration, and trials that run beside each
other: one lane per GPU.

Real: `supervisor.SupervisedRunner`, a child process that owns the device. Test:
`replay.ReplayRunner`. A runner waits for its trial, so each lane of several has a thread of its
own; all that the trials say is heard in the thread that waits for them, which alone touches a
study.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.storage.records import INTERRUPTED, Outcome
from qlora_sweep.sweep.running.wire import Progress, TrialRequest

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
        `storage.directory`), so that a death on the way to the caller loses nothing.

        A soak trains on however steady its steps are, until the steps or the seconds are spent,
        and on the way evaluates and saves a checkpoint as a training does; its measurement says
        what that took.

        Once the request's ``seconds_left`` have passed, no further step is begun. What has as many
        measured steps as its budget asks for at least is `Measured` by them, also a soak that
        evaluated and saved; anything else is `OUT_OF_TIME`, and no verdict about the configuration.

        Where a runner has texts, the request's ``quality`` lets a configuration that was measured
        to its end train on from fresh adapters; its measurement then says what it learned. A loss
        that is not finite there is `Diverged`, and memory that runs out there `OutOfMemory`.
        """
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


@dataclass(eq=False)
class Lane:
    """One place where one trial runs at a time."""

    runner: Runner
    name: str = ""
    """For a person; empty where there is no other lane."""
    lost: EnvironmentFault | None = None
    """Why nothing can run here any more; None as long as it can. Not each run that raised is an
    end: of several runs of a trial the last may fail where an earlier one counts."""


@dataclass(frozen=True)
class Ended:
    """A trial that ended, or whose lane was lost under it."""

    lane: Lane
    trial: Any
    result: Outcome | EnvironmentFault


class Lanes:
    """The lanes of one study, with the trials that run on them.

    A single one runs its trials in the thread that waits for them; of several each has a thread.

    Args:
        lanes: at least one.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.all = tuple(lanes)
        self.running: dict[Lane, Any] = {}
        """What was launched and whose end was not heard."""
        self._pools: dict[Lane, ThreadPoolExecutor] = {}
        self._futures: dict[Lane, Future[Outcome]] = {}
        self._said: queue.SimpleQueue[Callable[[], Ended | None]] = queue.SimpleQueue()
        """What the trials have to say, and how they ended."""

    @classmethod
    def of(cls, runner: Runner | Lanes) -> Lanes:
        """Return lanes as they are, and the lane of a single runner."""
        return runner if isinstance(runner, Lanes) else cls([Lane(runner)])

    @property
    def working(self) -> tuple[Lane, ...]:
        """Those that were not lost."""
        return tuple(lane for lane in self.all if lane.lost is None)

    @property
    def idle(self) -> tuple[Lane, ...]:
        """Those that a trial can be launched on."""
        return tuple(lane for lane in self.working if lane not in self.running)

    def launch(self, lane: Lane, trial: Any, job: Callable[[], Outcome]) -> None:
        """Begin a trial on an idle lane; its end comes from `next_end`."""
        if len(self.all) == 1:
            self._said.put(partial(self._ended, lane, job))
        else:
            # One thread for all its trials: a worker ends with the thread that started it.
            pool = self._pools.setdefault(lane, ThreadPoolExecutor(max_workers=1))
            self._futures[lane] = pool.submit(job)
            self._futures[lane].add_done_callback(
                lambda future: self._said.put(partial(self._ended, lane, future.result))
            )
        # Last: a trial that an interrupt kept from being launched is not waited for.
        self.running[lane] = trial

    def _ended(self, lane: Lane, result: Callable[[], Outcome]) -> Ended | None:
        """Take in how a trial ended; None for one that is not waited for any more."""
        if lane not in self.running:
            return None
        ended: Outcome | EnvironmentFault
        try:
            ended = result()
        except EnvironmentFault as fault:
            ended = lane.lost = fault
        return Ended(lane, self.running.pop(lane), ended)

    def say(self, action: Callable[[], None]) -> None:
        """Do what a running trial has to say, in the thread that waits for its end."""
        if len(self.all) == 1:
            action()
        else:
            self._said.put(action)

    def next_end(self) -> Ended:
        """Wait until one of the running trials ends, and say meanwhile what they have to say.

        At further requests to stop it does not wait: they end interrupted, one after the other.
        """
        try:
            while (ended := self._said.get()()) is None:
                pass
        except KeyboardInterrupt:
            if not self.running:
                raise
            return Ended(*self.running.popitem(), INTERRUPTED)
        return ended

    def cancel(self) -> None:
        """See `Runner.cancel`, of all of them."""
        for lane in self.all:
            lane.runner.cancel()

    def close(self) -> None:
        """Free all devices and cancel what still runs. Idempotent."""
        with ExitStack() as closing:
            # All are closed, whatever one of them raises, and at an interrupt too.
            for lane in self.all:
                closing.callback(lane.runner.close)
            running = [self._futures[lane] for lane in self.running if lane in self._futures]
            if running:
                self.cancel()
            for pool in self._pools.values():
                pool.shutdown(wait=False)
            wait(running, timeout=_END_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
