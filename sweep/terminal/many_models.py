"""One command for several models: a study for each, as many of them at a time as there are GPUs.

Each study is driven by a `sweep run` of its own on one GPU, so that it is what it would be alone:
its lease, its log, its resume.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.storage.reading import list_studies
from qlora_sweep.sweep.paths import runs_directory, storage_url
from qlora_sweep.sweep.request import REQUEST, RunRequest
from qlora_sweep.sweep.scratch import scratch
from qlora_sweep.sweep.stop_signals import INTERRUPTED
from qlora_sweep.sweep.study.events import Interruption
from qlora_sweep.sweep.terminal.console import note, say, say_json, width_of
from qlora_sweep.sweep.terminal.edge import WORST_FIRST
from qlora_sweep.sweep.terminal.summary import studies_text

PROGRAM = (sys.executable, "-P", "-m", "qlora_sweep")
_BOUND = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(130); os.execv(sys.argv[2], sys.argv[2:])"
)
"""Has the kernel ask a driver to stop when this process is gone, however that ended."""
_TURN_SECONDS = 0.2
_END_SECONDS = 30.0
"""That drivers get to stop in which nobody waits for any more."""
_FAULT = EnvironmentFault.exit_code


@dataclass(frozen=True)
class Ended:
    """A study's driver that ended."""

    code: int
    document: Mapping[str, Any] | None
    """What `sweep best --json` says of its study; None where it said nothing."""

    @property
    def is_fault(self) -> bool:
        """Whether the machine may be the cause."""
        return self.code == _FAULT and self.document is None


def run(
    studies: Sequence[RunRequest],
    *,
    devices: Sequence[str | None],
    as_json: bool,
    program: Sequence[str] = PROGRAM,
    end_seconds: float | None = None,
) -> int:
    """Drive every study, and print what came of them; return the worst of their exit codes.

    Args:
        studies: a request for each, with its name, in the order in which they begin.
        devices: what `--devices` says of the GPU of each study that runs at a time; None for the
            one that is there.
        as_json: whether a document a line is printed as each study ends.
        program: what drives one study.
        end_seconds: when the last of them is to have ended, by the monotonic clock; None for
            whenever it does. Each begins with an equal part of the time that is left by then.
    """
    drivers = _Drivers([*program, "run"], devices, len(studies), end_seconds=end_seconds)
    interruption = Interruption()
    ended: list[Ended] = []
    with interruption.handling_signals(), ThreadPoolExecutor(len(devices)) as pool:
        waiting: set[Future[Ended | None]] = {pool.submit(drivers.drive, each) for each in studies}
        try:
            while waiting:
                if interruption.is_requested():
                    drivers.stop()
                done, waiting = wait(waiting, _TURN_SECONDS, FIRST_COMPLETED)
                for end in filter(None, (each.result() for each in done)):
                    ended.append(end)
                    if as_json and end.document is not None:
                        say_json(end.document)
        finally:
            # Nobody follows what still runs; its study resumes.
            drivers.stop()
            if wait(waiting, _END_SECONDS).not_done:
                drivers.kill()
    if not as_json:
        url, names = storage_url(studies[0].storage), {each.study for each in studies}
        # There may be no database yet where none of them could begin.
        with suppress(InputError):
            found = [each for each in list_studies(url, runs_directory()) if each.name in names]
            say(studies_text(found, width=width_of(sys.stdout)))
    if interruption.is_requested():
        note("Interrupted; the same command resumes the study.")
        return INTERRUPTED
    codes = {end.code for end in ended}
    return next((code for code in WORST_FIRST if code in codes), 0)


class _Drivers:
    """The drivers that run, one on each place at a time."""

    def __init__(
        self,
        command: Sequence[str],
        devices: Sequence[str | None],
        waiting: int,
        *,
        end_seconds: float | None,
    ) -> None:
        self._command = command
        self._places, self._waiting, self._end_seconds = len(devices), waiting, end_seconds
        self._free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for each in devices:
            self._free.put(each)
        self._lock, self._is_stopping, self._spare = threading.Lock(), False, len(devices) - 1
        self._running: list[subprocess.Popen[bytes]] = []

    def drive(self, study: RunRequest) -> Ended | None:
        """Drive a study to its end, and pass on what its driver says; None once all are to stop."""
        place = self._free.get()
        end = self._drive(study, place)
        with self._lock:
            # Of two places one is always left, so that nobody waits for ever.
            is_tried_again = end is not None and end.is_fault and self._spare > 0
            self._spare -= is_tried_again
        if is_tried_again:
            note(f"{study.study}: tried again on another GPU")
            again = self._free.get()
            end = self._drive(study, again)
            self._free.put(again)
            if end is not None and not end.is_fault:
                name = (place or "").rstrip(",")
                note(f"GPU {name} is left out: what failed on it did not on another")
                return end
            self._spare += 1
        self._free.put(place)
        return end

    def _drive(self, study: RunRequest, place: str | None) -> Ended | None:
        request = study.model_copy(
            update={"devices": place, "overrides": {**study.overrides, **self._time_budget()}}
        )
        # Not a pipe, which a long document would fill while the other is read.
        with scratch("request") as directory, tempfile.TemporaryFile() as answer:
            # Read by nobody else: it may hold a password.
            own = directory / REQUEST
            own.write_text(request.model_dump_json(), encoding="utf-8")
            bound = [sys.executable, "-P", "-c", _BOUND, str(os.getpid())]
            with self._lock:
                if self._is_stopping:
                    return None
                process = subprocess.Popen(
                    [*bound, *self._command, str(own)],
                    stdin=subprocess.DEVNULL,
                    stdout=answer,
                    stderr=subprocess.PIPE,
                    # Ctrl-C in the terminal reaches this process alone, which passes it on.
                    start_new_session=True,
                )
                self._running.append(process)
            assert process.stderr is not None
            with process.stderr as said:
                for line in said:
                    note(f"{study.study}: {line.decode(errors='replace').rstrip()}")
            code = process.wait()
            with self._lock:
                self._running.remove(process)
            answer.seek(0)
            document = None
            with suppress(ValueError):
                document = json.loads(answer.read())
            return Ended(code if code in WORST_FIRST else _FAULT, document)

    def _time_budget(self) -> dict[str, float]:
        """Return the time that the study which begins now has, where all of them share one."""
        with self._lock:
            rounds = max(1, math.ceil(self._waiting / self._places))
            self._waiting -= 1
        if self._end_seconds is None:
            return {}
        left_seconds = max(1.0, self._end_seconds - time.monotonic())
        return {"time_budget_seconds": left_seconds / rounds}

    def stop(self) -> None:
        """Ask each driver to stop, once, and begin none any more."""
        with self._lock:
            asked, self._is_stopping = self._is_stopping, True
            for process in () if asked else self._running:
                process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End what did not stop."""
        with self._lock:
            for process in self._running:
                process.kill()
