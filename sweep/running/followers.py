"""Owns the other processes of a team: started by the first one, told what to do, heard and ended.

The first process is the worker that the supervisor knows. The others are in its process group and
bound to its life, so that whoever ends it ends them. Each has a card of its own and keeps the base
on it between trials, as the first does. What befalls one of them is told from a thread: the first
may by then wait for it within a step, for good. Knows nothing of how a trial is run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TypeVar

from search_spaces.config import TrialConfig
from search_spaces.errors import words_of
from search_spaces.space import MICRO_STEPS_TIMED
from storage.records import Crashed, Outcome
from sweep.running.team_wire import (
    Begin,
    End,
    Ended,
    Evaluate,
    Failed,
    FollowerMessage,
    FollowerReady,
    Leave,
    Looked,
    LookUp,
    Order,
    Step,
    read_follower,
)
from sweep.running.wire import UnreadableError, WorkerSettings, to_line
from sweep.training.device import open_device
from sweep.training.team import Look, Place, join, leave

MODULE = "sweep.running.follower"
"""What the other processes run."""
_BEAT_SECONDS = 1.0
"""Between two signs of life while the others are waited for."""
_START_SECONDS = 300.0
"""Until another process has imported its libraries and taken its card."""
_ANSWER_SECONDS = 60.0
"""Until it answers, once it has nothing else to do."""
M = TypeVar("M", Looked, Ended)
_ABANDONED = "the others were left in the middle of a step"


class TeamError(Exception):
    """Another process did not answer, or answered what nobody asked."""


class Followers:
    """The other processes, started as far as a trial needs them; the `Team` of the first one.

    Args:
        settings: of the first process.
        beat: called while they are waited for.
        module: what they run; tests put another there.

    Attributes:
        on_failure: told what befell one of them, from a thread.
    """

    def __init__(
        self, settings: WorkerSettings, *, beat: Callable[[], None], module: str = MODULE
    ) -> None:
        self._settings = settings
        self._beat = beat
        self._module = module
        self._there: list[_Follower] = []
        self._asked: list[_Follower] = []
        """Those of the running trial."""
        self._place = Place()
        self._meeting: IO[bytes] | None = None
        """Of the process group that the first process is in, or is about to join."""
        self._is_joined = False
        self.reason_to_retire: str | None = None
        self.on_failure: Callable[[Outcome], None] = lambda _: None

    @property
    def place(self) -> Place:
        """See `Team.place`."""
        return self._place

    def gather(self, config: TrialConfig) -> None:
        """Have as many others as the configuration takes begin with it.

        They build their bases while the first builds its own; `join` is next.

        Raises:
            TeamError: one cannot be started.
        """
        size = config.data_parallel
        self._replace_ended()
        self._start(size - 1)
        if size != self._place.size:
            self.dismiss()
            self._place, self._meeting = Place(0, size), _new_meeting()
        self._asked = self._there[: size - 1]
        for rank, follower in enumerate(self._asked, start=1):
            follower.tell(
                Begin(
                    config=config,
                    rank=rank,
                    size=size,
                    meeting=str(self._meeting_path),
                    micro_steps=min(config.accumulation_steps, MICRO_STEPS_TIMED),
                )
            )

    def join(self) -> bool:
        """Be in one process group with those that were gathered; return whether it is a new one."""
        if self._is_joined:
            return False
        device = open_device(self._settings.device).torch_device
        join(self._place, meeting=self._meeting_path, device=device)
        self._is_joined = True
        return True

    def dismiss(self) -> None:
        """Be alone again; they stay where they are, with their bases."""
        if self._is_joined:
            # All at once: who leaves may wait for those that are still in the group.
            self._tell(Leave())
            leave()
        self._is_joined, self._place = False, Place()

    def step(self) -> None:
        """See `Team.step`."""
        self._tell(Step())

    def evaluate(self, *, batches: int) -> None:
        """See `Team.evaluate`."""
        self._tell(Evaluate(batches=batches))

    def look(self) -> Sequence[Look]:
        """See `Team.look`."""
        self._tell(LookUp())
        return [follower.answer(Looked).look for follower in self._asked]

    def end(self) -> None:
        """See `Team.end`."""
        self._tell(End())
        left = [follower.answer(Ended).leak for follower in self._asked]
        leak = next((words for words in left if words is not None), None)
        if leak is not None:
            self.reason_to_retire = f"another card: {leak}"

    def abandon(self) -> None:
        """See `Team.abandon`."""
        self.reason_to_retire = _ABANDONED

    def _tell(self, order: Order) -> None:
        for follower in self._asked:
            follower.tell(order)

    def _start(self, count: int) -> None:
        for rank in range(len(self._there) + 1, count + 1):
            self._there.append(
                _Follower(
                    rank,
                    self._settings,
                    module=self._module,
                    on_failure=lambda outcome: self.on_failure(outcome),
                )
            )
        for follower in self._there[:count]:
            follower.await_ready(self._beat)

    def _replace_ended(self) -> None:
        """Start anew what ended with nothing to do: that is no configuration's doing."""
        if any(follower.has_ended() for follower in self._there):
            # Their group has lost a member, and is none any more.
            self.dismiss()
            self._there = list(itertools.takewhile(_lives, self._there))

    @property
    def _meeting_path(self) -> Path:
        assert self._meeting is not None, "who meets has gathered"
        return Path(f"/proc/{os.getpid()}/fd/{self._meeting.fileno()}")


def _new_meeting() -> IO[bytes]:
    """Return a file by which processes find each other: in memory, so that nothing of it is left
    however they end."""
    return os.fdopen(os.memfd_create("sweep-team"), "r+b")


def _lives(follower: _Follower) -> bool:
    return not follower.has_ended()


class _Follower:
    """One of the other processes, and the thread that hears it."""

    def __init__(
        self,
        rank: int,
        settings: WorkerSettings,
        *,
        module: str,
        on_failure: Callable[[Outcome], None],
    ) -> None:
        self._rank = rank
        self._on_failure = on_failure
        self._answers: queue.SimpleQueue[FollowerMessage] = queue.SimpleQueue()
        self._is_ready = False
        self._is_training = False
        read_end, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                # -P: a module of the user's directory must not shadow ours.
                [sys.executable, "-P", "-m", module, str(write_end), str(os.getpid()), str(rank)],
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno(),
                pass_fds=[write_end],
            )
        except OSError as error:
            os.close(read_end)
            raise TeamError(f"no process for card {rank}: {words_of(error)}") from error
        finally:
            os.close(write_end)
        self._write(settings.model_dump_json().encode() + b"\n")
        hearing = threading.Thread(target=self._hear, args=(os.fdopen(read_end, "rb"),))
        hearing.daemon = True
        hearing.start()

    def has_ended(self) -> bool:
        """Whether its process is gone."""
        # Asked of the system: whoever reaps it meanwhile holds a lock that `poll` gives way to.
        try:
            looking = os.WEXITED | os.WNOWAIT | os.WNOHANG
            return os.waitid(os.P_PID, self._process.pid, looking) is not None
        except ChildProcessError:
            return True

    def tell(self, order: Order) -> None:
        """Write an order; whether it comes to anything is heard."""
        self._is_training = self._is_training or isinstance(order, Begin)
        self._write(to_line(order))

    def await_ready(self, beat: Callable[[], None]) -> None:
        """Return once it has its card.

        Raises:
            TeamError: it never does.
        """
        until = time.monotonic() + _START_SECONDS
        while not self._is_ready:
            with contextlib.suppress(queue.Empty):
                message = self._answers.get(timeout=_BEAT_SECONDS)
                if not isinstance(message, FollowerReady):
                    raise TeamError(f"card {self._rank} said '{message.kind}' before it was ready")
                self._is_ready = True
                return
            if time.monotonic() >= until:
                raise TeamError(f"the process of card {self._rank} did not start")
            beat()

    def answer(self, kind: type[M]) -> M:
        """Return its answer.

        Raises:
            TeamError: it gives none, or another.
        """
        try:
            message = self._answers.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            raise TeamError(f"card {self._rank} did not answer") from None
        if not isinstance(message, kind):
            raise TeamError(f"card {self._rank} answered '{message.kind}'")
        return message

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        # That it is gone is heard, with what it said last.
        with contextlib.suppress(OSError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _hear(self, messages: IO[bytes]) -> None:
        for line in messages:
            try:
                message = read_follower(line)
            except UnreadableError as error:
                said = f"the process of card {self._rank} said {error}"
                self._on_failure(Crashed(phase="measure", cause="protocol", detail=said))
                continue
            if isinstance(message, Failed):
                self._on_failure(message.outcome)
                continue
            if isinstance(message, Ended):
                self._is_training = False
            self._answers.put(message)
        status = self._process.wait()
        if self._is_training or not self._is_ready:
            ended = f"the process of card {self._rank} ended with status {status}"
            self._on_failure(Crashed(phase="measure", cause="exit", detail=ended))
