"""The worker's pipes: commands in on stdin, messages out, and each outcome on disk before it is
told."""

from __future__ import annotations

import errno
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

from search_spaces.errors import MORE_DESCRIPTORS, EnvironmentFault, words_of
from storage.outcome_file import OutcomeFile
from storage.records import CrashCause, Crashed, Outcome, Phase
from sweep.running.resident import DETAIL_LENGTH
from sweep.running.wire import (
    Finished,
    Progress,
    Ready,
    RunCommand,
    StopCommand,
    Unusable,
    WorkerMessage,
    WorkerSettings,
    command_adapter,
    to_line,
)
from sweep.running.worker import Worker, finished
from sweep.training.compiling import start_compiler_processes
from sweep.training.exceptions import is_card_out_of_memory, is_host_out_of_memory


def _crashed(phase: Phase, error: Exception | SystemExit) -> Crashed:
    """Return the outcome of a training that raised what is no verdict of its own."""
    if isinstance(error, SystemExit):
        return Crashed(phase=phase, cause="exit", detail=f"a library called exit({error.code})")
    cause: CrashCause = "exception"
    detail = words_of(error)[:DETAIL_LENGTH]
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        cause, detail = "too_few_descriptors", f"{detail}; {MORE_DESCRIPTORS}"
    elif is_host_out_of_memory(error) and not is_card_out_of_memory(error):
        cause = "host_out_of_memory"
    return Crashed(phase=phase, cause=cause, detail=detail)


def _leave() -> None:
    # Shutdown with a CUDA context and daemon threads can hang or abort; nothing is left to save.
    os._exit(0)


def _read_commands(
    lines: IO[bytes],
    *,
    runs: queue.SimpleQueue[RunCommand],
    stop: Callable[[], None],
    leave: Callable[[], None],
) -> None:
    """Sort commands until the pipe closes; the pipe closes when the tuner is gone."""
    try:
        for line in lines:
            match command_adapter.validate_json(line):
                case RunCommand() as command:
                    runs.put(command)
                case StopCommand():
                    stop()
    finally:
        # Whatever is still trained is for nobody, and somebody else wants the device.
        leave()


def _serve(
    worker: Worker,
    commands: IO[bytes],
    send: Callable[[WorkerMessage], None],
    outcomes: OutcomeFile | None,
    *,
    leave: Callable[[], None] = _leave,
) -> None:
    runs: queue.SimpleQueue[RunCommand] = queue.SimpleQueue()
    # A thread, since a stop must get through while this one trains.
    reader = threading.Thread(
        target=_read_commands,
        args=(commands,),
        kwargs={"runs": runs, "stop": worker.stop_trial, "leave": leave},
    )
    reader.daemon = True
    reader.start()
    answers = _Answers(send, outcomes, leave)
    worker.tell_failures(answers.fail)
    done = None
    while done is None or done.retire is None:
        command = answers.begin(runs.get())
        try:
            done = worker.run(command)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is this trial's verdict
            traceback.print_exc()
            crashed = _crashed(worker.phase, error)
            # After an unknown failure the device's state is unknown too.
            done = finished(command, crashed, retire=crashed.detail, is_apart=True)
        answers.give(done)


class _Answers:
    """One answer to each command, whoever knows it first: the thread that trains, or one that hears
    of another rank for which that one would wait in vain."""

    def __init__(
        self,
        send: Callable[[WorkerMessage], None],
        outcomes: OutcomeFile | None,
        leave: Callable[[], None],
    ) -> None:
        self._send, self._outcomes, self._leave = send, outcomes, leave
        self._lock = threading.Lock()
        self._open: RunCommand | None = None

    def begin(self, command: RunCommand) -> RunCommand:
        """Note that a command is to be answered."""
        with self._lock:
            self._open = command
        return command

    def give(self, done: Finished) -> None:
        """Keep the outcome of the open command and tell it, unless somebody did."""
        with self._lock:
            if self._open is not None:
                _keep(self._open, done.outcome, self._outcomes)
                self._send(done)
            self._open = None

    def fail(self, outcome: Outcome) -> None:
        """Answer the open command with what befell another rank, and be gone: the thread that
        trains may be waiting for that rank, where nothing wakes it. With no command open that is
        nobody's verdict, and the next is for a fresh worker."""
        with self._lock:
            if self._open is not None:
                _keep(self._open, outcome, self._outcomes)
                failed = finished(self._open, outcome, retire="another rank failed")
                self._send(failed)
            self._open = None
        sys.stderr.flush()
        self._leave()


def _keep(command: RunCommand, outcome: Outcome, outcomes: OutcomeFile | None) -> None:
    """Leave an outcome on disk, where it outlives this process and the tuner's."""
    if command.request.attempt is None or outcomes is None:
        return
    try:
        outcomes.write(command.request.attempt, command.request.config, outcome)
    except EnvironmentFault as fault:
        # It is about to be told, which is what counts.
        print(fault, file=sys.stderr)  # noqa: T201 - into the worker's log


def main() -> None:
    """Read the settings, prepare the device, serve trials until told to stop or retired."""
    pipe = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
    rank = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    lock = threading.Lock()

    def send(message: WorkerMessage) -> None:
        if rank > 0 and isinstance(message, Progress):
            # The first rank's is that of all.
            return
        line = to_line(message)
        # Beats come from the training's thread, and nothing may cut a line in two.
        with lock:
            while line:
                line = line[pipe.write(line) :]

    settings = WorkerSettings.model_validate_json(sys.stdin.buffer.readline())
    try:
        if settings.device == "cuda" and not torch.cuda.is_available():
            send(Unusable(reason="torch finds no CUDA device; `sweep doctor` says more"))
            return
        if settings.device == "cuda":
            # They need longer than what is prepared here.
            start_compiler_processes()
            torch.cuda.set_device(rank)
        worker = Worker(settings, send=send, rank=rank)
        worker.prepare()
        name = torch.cuda.get_device_name() if settings.device == "cuda" else "CPU"
    except Exception as error:  # noqa: BLE001 - the tuner raises it
        traceback.print_exc()
        send(Unusable(reason=words_of(error)[:DETAIL_LENGTH]))
        return
    send(Ready(device_name=name))
    path = settings.outcome_path if rank == 0 else None
    _serve(worker, sys.stdin.buffer, send, None if path is None else OutcomeFile(Path(path)))
    sys.stderr.flush()
    _leave()
