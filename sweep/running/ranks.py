"""The further ranks of a configuration that several GPUs train together: the same worker each,
started by the one that the supervisor knows, given the same commands, heard and replaced.

They are in the first worker's process group and bound to its life, so that whoever ends it ends
them. What befalls one of them is told from a thread: the first may by then wait for it within a
step, for good.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.storage.records import (
    Crashed,
    DominatedOutOfMemory,
    Measured,
    Outcome,
    PrunedSlow,
)
from qlora_sweep.sweep.processes import End
from qlora_sweep.sweep.running.starting import MODULE, spawn
from qlora_sweep.sweep.running.wire import (
    ChildSettings,
    Finished,
    Ready,
    RunCommand,
    UnreadableError,
    Unusable,
    read_line,
    to_line,
    worker_message_adapter,
)
from qlora_sweep.sweep.training import process_group

_BEAT_SECONDS = 1.0
"""Between two signs of life while the others are waited for."""
_START_SECONDS = 300.0
"""Until another rank has imported its libraries and taken its GPU."""
_END_SECONDS = 60.0
"""Until it has ended its trial, once the first has."""
_CAUSE_SECONDS = 10.0
"""That a rank which may have ended gets to be heard, where the first failed."""


class Ranks:
    """The other ranks, started as far as a trial needs them; they stay, with their bases.

    Args:
        settings: of all of them.
        beat: called while they are waited for.
        on_failure: told what befell one of them, from a thread.
    """

    def __init__(
        self,
        settings: ChildSettings,
        *,
        beat: Callable[[], None],
        on_failure: Callable[[Outcome], None],
    ) -> None:
        self._settings = settings
        self._beat = beat
        self._on_failure = on_failure
        self._all: dict[int, _Rank] = {}
        self._of_trial: list[_Rank] = []
        self._size = 1
        self._meetings: list[IO[bytes]] = []
        """Files by which the processes of a group find each other, the newest last."""

    def begin(self, command: RunCommand) -> RunCommand:
        """Have as many others as the configuration takes begin with a command; return it as they
        have it.

        Raises:
            OSError: one cannot be started.
        """
        size = command.request.config.data_parallel
        ended = [rank for rank, process in self._all.items() if process.has_ended()]
        for rank in ended:
            # It had nothing to do: that is no configuration's doing.
            del self._all[rank]
        is_new_group = bool(ended) or size != self._size
        if is_new_group:
            # What is started now would take itself for one of the old group.
            process_group.leave()
        for rank in range(1, size):
            if rank not in self._all:
                self._all[rank] = _Rank(rank, self._settings, self._on_failure)
        self._of_trial = [self._all[rank] for rank in range(1, size)]
        commanded = self._of_trial
        for process in commanded:
            process.await_ready(self._beat)
        if is_new_group:
            # Those that are left out leave the group too.
            self._size = size
            commanded = list(self._all.values())
            # In memory, so that nothing is left however they end; the last is still in use.
            self._meetings = self._meetings[-1:]
            self._meetings.append(os.fdopen(os.memfd_create("sweep-ranks"), "r+b"))
        if self._meetings:
            command = replaced(command, rendezvous=self._rendezvous())
        for process in commanded:
            process.tell(command)
        return command

    def start(self, size: int, module: str) -> str:
        """Start all others with one thing to do, their settings, in a group that stays; return the
        file by which they and this process find each other.

        Raises:
            OSError: one cannot be started.
        """
        self._meetings.append(os.fdopen(os.memfd_create("sweep-ranks"), "r+b"))
        settings = replaced(self._settings, rendezvous=self._rendezvous())
        for rank in range(1, size):
            process = _Rank(rank, settings, self._on_failure, module=module, run_id="")
            self._of_trial.append(process)
        return self._rendezvous()

    def await_ready(self) -> None:
        """Return once all that were started have their GPUs.

        Raises:
            RuntimeError: one never does.
        """
        for process in self._of_trial:
            process.await_ready(self._beat)

    def _rendezvous(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._meetings[-1].fileno()}"

    def end(self) -> str | None:
        """Wait until the others have ended the trial too; return why they cannot run another."""
        reasons = [process.end() for process in self._of_trial]
        return next((words for words in reasons if words is not None), None)

    def hear_out(self) -> None:
        """Let a rank that ended be heard first: without it the others fail for another reason."""
        until = time.monotonic() + _CAUSE_SECONDS
        for process in self._of_trial:
            process.hearing.join(max(0.0, until - time.monotonic()))


class _Rank:
    """One of the other ranks, and the thread that hears it."""

    def __init__(
        self,
        rank: int,
        settings: ChildSettings,
        on_failure: Callable[[Outcome], None],
        *,
        module: str = MODULE,
        run_id: str | None = None,
    ) -> None:
        self._rank = rank
        self._on_failure = on_failure
        self._ends: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._is_training = run_id is not None
        self._run_id = run_id
        """Of the command that it trains; None where it is told to leave the group."""
        self._child, messages = spawn(module, output=sys.stderr.fileno(), rank=rank)
        self._write(settings.model_dump_json().encode() + b"\n")
        self.hearing = threading.Thread(target=self._hear, args=(os.fdopen(messages, "rb"),))
        self.hearing.daemon = True
        self.hearing.start()

    def has_ended(self) -> bool:
        """Whether its process is gone."""
        # Not by `poll`, which says no while the thread waits for the process's end.
        return self._child.has_ended()

    def await_ready(self, beat: Callable[[], None]) -> None:
        """Return once it has its GPU.

        Raises:
            RuntimeError: it never does.
        """
        until = time.monotonic() + _START_SECONDS
        while not self._ready.wait(_BEAT_SECONDS):
            if time.monotonic() >= until:
                raise RuntimeError(f"the process of GPU {self._rank} did not start")
            beat()

    def tell(self, command: RunCommand) -> None:
        """Write a command; whether it comes to anything is heard."""
        self._is_training = self._rank < command.request.config.data_parallel
        self._run_id = command.run_id if self._is_training else None
        self._write(to_line(command))

    def end(self) -> str | None:
        """Wait for the end of its trial; return why it cannot run another."""
        try:
            retire = self._ends.get(timeout=_END_SECONDS).retire
        except queue.Empty:
            return f"GPU {self._rank} did not end its trial"
        if retire is None:
            return None
        return f"GPU {self._rank}: {retire}"

    def _write(self, line: bytes) -> None:
        stdin = self._child.process.stdin
        assert stdin is not None
        # That it is gone is heard, with what it said last.
        with contextlib.suppress(OSError):
            stdin.write(line)
            stdin.flush()

    def _hear(self, messages: IO[bytes]) -> None:
        for line in messages:
            try:
                self._take(read_line(line, worker_message_adapter))
            except UnreadableError as error:
                said = f"the process of GPU {self._rank} said {error}"
                self._on_failure(Crashed(phase="measure", cause="protocol", detail=said))
        end = End(self._child.process.wait())
        if self._is_training or not self._ready.is_set():
            ended = f"the process of GPU {self._rank} ended with {end}"
            self._on_failure(Crashed(phase="measure", cause="exit", detail=ended))

    def _named(self, outcome: Outcome) -> Outcome:
        """Return what became of this rank, with the rank in its words; a failure of the protocol
        where it cannot have become of one alone."""
        words = f"GPU {self._rank}: "
        if isinstance(outcome, Measured | PrunedSlow | DominatedOutOfMemory):
            said = f"{words}it said '{outcome.verdict}' of itself alone"
            return Crashed(phase="measure", cause="protocol", detail=said)
        return replaced(outcome, detail=f"{words}{outcome.detail}")

    def _take(self, message: object) -> None:
        match message:
            case Ready():
                self._ready.set()
            case Finished(run_id=run_id) if run_id != self._run_id:
                # It only left the group.
                pass
            case Finished(is_apart=False):
                self._is_training = False
                self._ends.put(message)
            case Finished(outcome=outcome):
                self._on_failure(self._named(outcome))
            case Unusable(reason=reason):
                detail = f"GPU {self._rank}: {reason}"
                self._on_failure(Crashed(phase="start", cause="exception", detail=detail))
