"""Trials that run beside each other: one lane per GPU, and who hears when one of them ends.

A runner waits for its trial, so each lane of several has a thread of its own; all that the trials
say is heard in the thread that waits for them, which alone touches a study.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Self

from search_spaces.errors import CardLost, EnvironmentFault
from storage.records import INTERRUPTED, Crashed, Outcome, TimedOut
from sweep.running.runner import Observer, Runner, keep_going
from sweep.running.wire import TrialRequest

_END_SECONDS = 30.0
"""For which a trial that was cancelled is waited for before its runner is closed under it."""


class Lane:
    """One place where one trial runs at a time; satisfies `runner.Runner`.

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
        """See `runner.Runner.run`.

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


@dataclass(frozen=True)
class _Failed:
    """A trial that ended by a mistake of ours."""

    lane: Lane
    error: BaseException


class Lanes:
    """The lanes of one study. A single one runs its trials in the thread that waits for them.

    Args:
        lanes: at least one.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        assert lanes, "a study runs somewhere"
        self.all = tuple(lanes)
        self._jobs: dict[Lane, Job] = {}
        self._said: queue.SimpleQueue[Ended | _Failed | Callable[[], None]] = queue.SimpleQueue()

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

    @property
    def _is_single(self) -> bool:
        return len(self.all) == 1

    def launch(self, lane: Lane, job: Job) -> None:
        """Begin a trial on an idle lane; its end comes from `next_end`."""
        assert lane not in self._jobs, f"{lane.name} runs another trial"
        self._jobs[lane] = job
        if not self._is_single:
            run = partial(self._run_beside, lane, job)
            threading.Thread(target=run, name=f"sweep-{lane.name}", daemon=True).start()

    def _run_beside(self, lane: Lane, job: Job) -> None:
        try:
            self._said.put(Ended(lane, job()))
        except EnvironmentFault as fault:
            self._said.put(Ended(lane, fault))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._said.put(_Failed(lane, error))

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
        if self._is_single:
            ((lane, job),) = self._jobs.items()
            try:
                result: Outcome | EnvironmentFault = job()
            except EnvironmentFault as fault:
                result = fault
            return self._ended(Ended(lane, result))
        try:
            while True:
                match self._said.get():
                    case Ended(lane=lane) as ended if lane in self._jobs:
                        return self._ended(ended)
                    case Ended():
                        pass
                    case _Failed(lane=lane, error=error):
                        self._jobs.pop(lane, None)
                        raise error
                    case action:
                        action()
        except KeyboardInterrupt:
            return self._ended(Ended(next(iter(self._jobs)), INTERRUPTED))

    def _ended(self, ended: Ended) -> Ended:
        del self._jobs[ended.lane]
        if isinstance(ended.result, EnvironmentFault):
            ended.lane.lost = ended.result
        return ended

    def start(self) -> None:
        """See `runner.Runner.start`, of all of them."""
        for lane in self.working:
            lane.start()

    def cancel(self) -> None:
        """See `runner.Runner.cancel`, of all of them."""
        for lane in self.all:
            lane.cancel()

    def close(self) -> None:
        """Free all devices; what still runs is for nobody. Idempotent."""
        with ExitStack() as closing:
            # Whatever one of them raises, or somebody who does not want to wait: all are closed.
            for lane in self.all:
                closing.callback(lane.close)
            if self._jobs and not self._is_single:
                self._end_what_runs()

    def _end_what_runs(self) -> None:
        self.cancel()
        while self._jobs:
            try:
                said = self._said.get(timeout=_END_SECONDS)
            except queue.Empty:
                return
            if isinstance(said, Ended | _Failed):
                self._jobs.pop(said.lane, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
