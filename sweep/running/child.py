"""A worker's process as its supervisor sees it: how it is started, told, heard and ended, and what
an end without an answer means.

Whatever the worker does, nothing here waits for it without an end: its pipes are never waited for
alone, but with the clock and the process beside them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter

from qlora_sweep.search_spaces import redaction
from qlora_sweep.search_spaces.errors import MORE_DESCRIPTORS, EnvironmentFault, words_of
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.storage import files
from qlora_sweep.storage.records import CrashCause, Crashed, Outcome, Phase, TimedOut
from qlora_sweep.sweep.processes import KILL_SECONDS, End
from qlora_sweep.sweep.running.starting import (
    Starting,
    compiler_directory,
    take,
    worker_environment,
)
from qlora_sweep.sweep.running.wire import (
    LINE_BYTES_MAX,
    ChildSettings,
    M,
    UnreadableError,
    read_line,
)

_TURN_SECONDS = 0.2
"""Between two looks at the clock, the process and the log; what comes in the pipe is seen at once.
"""
_CHUNK_BYTES = 2**20
"""More than a pipe holds, so that one read takes all that is in it."""
_HOST_MEMORY = re.compile(r"std::bad_alloc|Cannot allocate memory|\bMemoryError\b")
"""What is printed last by a process that the host refused memory, and that gave up over it."""
_SENDERS: dict[int, str] = {
    signal.SIGKILL: " from outside: from a person, from a scheduler, or from the kernel where "
    "memory ran out",
    **dict.fromkeys(
        (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1),
        " from outside",
    ),
    signal.SIGXCPU: ", as a limit of processor time was reached (`ulimit -t`)",
    signal.SIGXFSZ: ", as a limit of file size was reached (`ulimit -f`)",
}
"""Who may have sent a signal that a process does not send itself."""
_DETAIL_MAX = 1000
LOG_BYTES_MAX = 10 * 2**20
"""Of the file; what was there before is kept in one of that size beside it."""
_TAIL_BYTES = 65536
"""Thirty frames of C++ with their templates take ten thousand and more."""
_TOLD_CHARACTERS = 8192
_TAIL_LINES = 3
_TAIL_CHARACTERS = 600
_REASON_CHARACTERS = 300
_REASON_LINES = 12
"""From the end, among which an error is the one that ended the process, and no earlier one."""
_PLACE = re.compile(
    r"frame #\d+:"
    r"|File \".*\", line \d+"
    r"|(?:Current thread|Thread) 0x\w+.*:$"
    r"|Extension modules:"
    r"|Exception raised from .* \(most recent call first\):"
    r"|(?:CUDA|HIP) kernel errors might be asynchronously reported"
    r"|For debugging consider passing"
    r"|Compile with `TORCH_USE_"
    r"|Search for `\w+' in https:"
    r"|[\^~]+$"
)
"""Begins a line that says where in the code it was, or how to look for it, and never what went
wrong."""
_NOISE = re.compile(
    r"USDT:"
    r"|\[W.*\] Memory block of unknown size was allocated before the profiling started"
    r"|Failed to load CPU gemm_4bit_forward "
)
"""Begins a line that torch's profiler and bitsandbytes always print, whatever becomes of them."""
_REASON = re.compile(r"what\(\): |(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception)\b: ")
"""Begins a line that names an error, as C++ and Python print one that was not caught."""
_COUNTED_SECONDS_MAX = 1.0
"""Most seconds between two looks that count: a longer gap means that this process was stopped."""
_ABSENCE_SECONDS = 5.0
"""Between two looks, from which on the worker's silence is counted anew: it may have been stopped
as well, with a machine that was suspended."""


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
        now = self.clock()
        elapsed = now - self._last
        self._last = now
        self.now += min(elapsed, _COUNTED_SECONDS_MAX)
        if elapsed >= _ABSENCE_SECONDS:
            self.returned_at = self.now
        return self.now


class WorkerFault(Exception):  # noqa: N818 - an end is not always an error
    """The worker gives no answer any more, and is to be ended."""


class WorkerEnded(WorkerFault):
    """Its process ended, and all that it had said was heard."""


class WorkerSilent(WorkerFault):
    """It took longer than it may; says which limit it passed."""


class WorkerMisbehaved(WorkerFault):
    """It did what no worker does; says what that was."""


def outcome_of(fault: WorkerFault, phase: Phase, end: End, *, words: str) -> Crashed | TimedOut:
    """Return what a trial came to whose worker gave no answer.

    Args:
        fault: why there was none.
        phase: where the trial was.
        end: how the worker ended.
        words: the last that it printed.
    """
    if isinstance(fault, WorkerSilent):
        return TimedOut(
            phase=phase, detail=_with_last_words(f"{fault}; the worker was ended", words)
        )
    if isinstance(fault, WorkerMisbehaved):
        detail = _with_last_words(f"the worker was ended, as {fault}", words)
        return Crashed(phase=phase, cause="protocol", detail=detail)
    how = f"the worker ended with {end}"
    cause: CrashCause = "exit"
    if end.is_host_out_of_memory:
        cause = "host_out_of_memory"
    elif end.status != 0 and _HOST_MEMORY.search(words):
        cause = "host_out_of_memory"
        how += ", as the host's memory ran out"
    elif end.status is not None and end.status < 0:
        cause = "signal"
        how += _SENDERS.get(-end.status, "")
    return Crashed(phase=phase, cause=cause, detail=_with_last_words(how, words))


def _with_last_words(what: str, words: str) -> str:
    if not words:
        return shown(f"{what}; it printed nothing")
    return shown(f"{what}; it printed last: {words}")


def shown(text: str) -> str:
    """Return text that came from a worker as it may be stored: short, without a password in it, and
    with nothing that works unseen."""
    return " | ".join(redaction.shown(text).splitlines())[:_DETAIL_MAX]


def storable(outcome: Outcome) -> Outcome:
    """Return an outcome with its words as they may be stored."""
    detail: str = getattr(outcome, "detail", "")
    if shown(detail) == detail:
        return outcome
    return replaced(outcome, detail=shown(detail))


class WorkerLog:
    """A log that is appended to by the worker, and kept small by its supervisor.

    Args:
        path: of the log; what is older is kept under the same name with ``.1`` behind it.

    Raises:
        EnvironmentFault: it cannot be written.
    """

    def __init__(self, path: Path, *, bytes_max: int = LOG_BYTES_MAX) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._file = _opened(path)
        self._begins_at = self._size()
        self._before = b""
        """The end of what was put aside last."""
        self._elsewhere: IO[bytes] | None = None

    def fileno(self) -> int:
        """Return the descriptor that the worker prints to."""
        return self._file.fileno()

    def follow(self, printed: IO[bytes] | None) -> None:
        """Take what a worker prints into another file, until it is told this one, for said here."""
        self._elsewhere = printed

    def keep_small(self) -> None:
        """Where it is too large, put its end aside and begin anew.

        A line that is printed at this very moment may be lost; nothing waits.
        """
        if self._size() <= self._bytes_max:
            return
        # Where there is no room for the copy, room is what is needed most.
        with contextlib.suppress(OSError):
            begin = self._size() - self._bytes_max
            kept = os.pread(self._file.fileno(), self._bytes_max, begin)
            files.replace(self.path.with_name(f"{self.path.name}.1"), kept, is_durable=False)
        # Last of all: these may be the worker's last words.
        self._before = self._end()
        with contextlib.suppress(OSError):
            os.ftruncate(self._file.fileno(), 0)
        self._begins_at = 0

    def tail(self) -> str:
        """Return the last lines that were printed since this was opened, as they may be shown.

        Those that say where in the code it happened are left out unless there are no others, and
        the error that they follow comes first. Of a log of any size a few thousand bytes are read.
        """
        before = self._before
        if self._elsewhere is not None:
            before += os.pread(self._elsewhere.fileno(), _TAIL_BYTES, 0)
        printed = (before + self._end()).decode(errors="replace").splitlines()
        printed = [line for line in printed if _NOISE.match(line.strip()) is None]
        without_places = [line for line in printed if _PLACE.match(line.strip()) is None]
        if any(map(str.strip, without_places)):
            # Places alone say more than nothing.
            printed = without_places
        # Before it is cut any further: half a password would not be found.
        shortened = redaction.shown("\n".join(printed)[-_TOLD_CHARACTERS:]).splitlines()
        lines = list(filter(None, map(str.strip, shortened)))
        last = " | ".join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]
        reasons = list(filter(_REASON.match, lines[-_REASON_LINES:])) or [""]
        reason = reasons[-1][:_REASON_CHARACTERS]
        if reason in last:
            return last
        return f"{reason} | {last[-(_TAIL_CHARACTERS - len(reason)) :]}"

    def close(self) -> None:
        """Free the descriptor, once nothing is printed any more. Idempotent."""
        if not self._file.closed:
            self.keep_small()
            self._file.close()
        if self._elsewhere is not None:
            self._elsewhere.close()

    def _end(self) -> bytes:
        begin = max(self._begins_at, self._size() - _TAIL_BYTES)
        try:
            return os.pread(self._file.fileno(), _TAIL_BYTES, begin)
        except OSError:
            return b""

    def _size(self) -> int:
        try:
            return os.fstat(self._file.fileno()).st_size
        except OSError:
            return 0


def _opened(path: Path) -> IO[bytes]:
    """Return a private file that is appended to; nothing's, where the disk is full."""
    try:
        return files.open_append(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return open(os.devnull, "r+b", buffering=0)
        reason = f"the worker's log cannot be written: {_why(error)}"
        raise EnvironmentFault(reason) from error


class WorkerProcess:
    """One worker: a process group of its own, its log, and two pipes that never make anybody wait.

    It ends with the thread that starts it, so that is to be one that stays.

    Args:
        settings: the first thing that it is told, and the device and weights that it is for.
        log_path: where it prints.
        module: what it runs.
        clock: what deadlines are told by.
        patience: seconds that it gets to end by itself once it closed one of its pipes.

    Raises:
        EnvironmentFault: the machine has no room for another process, or its log.
    """

    def __init__(
        self,
        settings: ChildSettings,
        *,
        log_path: Path,
        module: str,
        clock: AttentiveClock,
        patience: float,
    ) -> None:
        self._patience = patience
        self._clock = clock
        self._lines: deque[bytes] = deque()
        self._torn = b""
        self._to_send = b""
        self._closed_at: float | None = None
        """When one of its pipes was seen closed, or broken."""
        self._has_messages = True
        with contextlib.ExitStack() as undo:
            self._log = undo.enter_context(contextlib.closing(WorkerLog(log_path)))
            environment = worker_environment(
                settings.device,
                weights=settings.weights,
                gpus=settings.gpus,
                concurrent_jobs=settings.concurrent_jobs,
            )
            # By this process, as the compiler would leave the rights to the umask.
            with contextlib.suppress(OSError):
                files.make_directory(compiler_directory())
            begun = take(environment, module)
            if begun is not None:
                self._log.follow(begun.printed)
                settings = replaced(settings, log_path=str(log_path.absolute()))
            try:
                begun = begun or Starting(environment, module=module, log=self._log)
            except OSError as error:
                raise EnvironmentFault(f"the worker cannot be started: {_why(error)}") from error
            self._child = begun.child
            self._messages = begun.messages
            undo.pop_all()
        assert self.process.stdin is not None
        self._stdin = self.process.stdin.fileno()
        for descriptor in (self._messages, self._stdin):
            os.set_blocking(descriptor, False)
        self.send(settings.model_dump_json().encode() + b"\n")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process itself."""
        return self._child.process

    def send(self, line: bytes) -> None:
        """Write a line to the worker as soon as it takes it; that is seen to with each look."""
        if self._messages >= 0:
            self._to_send += line
            self._write()

    def next_message(self, adapter: TypeAdapter[M]) -> M | None:
        """Return its next message; None where none came in a moment.

        Raises:
            WorkerEnded: its process ended without one.
            WorkerMisbehaved: it said what is no message, nothing can come any more, or a line does
                not end.
        """
        line = self._next_line()
        if line is None:
            return None
        try:
            return read_line(line, adapter)
        except UnreadableError as error:
            raise WorkerMisbehaved(f"it said {error}") from None

    def _next_line(self) -> bytes | None:
        now = self._clock.look()
        if not self._lines and self._messages < 0:
            raise WorkerEnded
        if not self._lines:
            has_ended = self._look(_TURN_SECONDS)
            if has_ended and not self._lines:
                raise WorkerEnded
            is_deaf = self._closed_at is not None and now >= self._closed_at + self._patience
            if is_deaf and not has_ended:
                raise WorkerMisbehaved("it closed its pipe, and lived on")
        if not self._lines:
            return None
        return self._lines.popleft()

    def is_waiting(self) -> bool:
        """Return whether it waits in silence for something to do."""
        try:
            has_ended = self._look(0)
        except WorkerMisbehaved:
            return False
        return not (has_ended or self._lines or self._torn) and self._closed_at is None

    def is_stopped(self) -> bool:
        """Return whether it was stopped (SIGSTOP), and not continued."""
        return self._child.is_stopped()

    def kill(self) -> None:
        """Kill its whole process group; from a signal handler, too."""
        self._child.kill()

    def close(
        self, *, patience: float = 0.0, kill_seconds: float = KILL_SECONDS
    ) -> tuple[End, str]:
        """Free log and pipes; return how it ended, after ``patience`` seconds by force, and the
        last that it printed. Idempotent.

        Everything that it started ends too, however it ended itself.
        """
        if self._messages < 0:
            return self._child.end(), ""
        try:
            end = self._child.end(patience=patience, kill_seconds=kill_seconds)
            return end, self._log.tail()
        except BaseException:
            # Interrupted while it was waited for: nothing else would end it.
            self.kill()
            raise
        finally:
            self._log.close()
            os.close(self._messages)
            self._messages = -1
            assert self.process.stdin is not None
            # What was still to be written was for a process that is gone.
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def _look(self, seconds: float) -> bool:
        """Wait so long until it speaks or listens, read and write what goes, and return whether it
        had ended by then."""
        # Before the pipe is read: all that an ended process wrote is in it by then.
        has_ended = self._child.has_ended()
        if not has_ended:
            poll = select.poll()
            if self._has_messages:
                poll.register(self._messages, select.POLLIN)
            if self._to_send:
                poll.register(self._stdin, select.POLLOUT)
            poll.poll(1000 * seconds)
        if self._has_messages:
            # Whatever an ended worker started may still hold the pipe, and write on.
            self._has_messages = not has_ended
            self._read()
        self._write()
        self._log.keep_small()
        return has_ended

    def _read(self) -> None:
        try:
            chunk = os.read(self._messages, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._has_messages = False
            self._note_closed()
        *whole, self._torn = (self._torn + chunk).split(b"\n")
        self._lines.extend(whole)
        if any(len(line) > LINE_BYTES_MAX for line in (*whole, self._torn)):
            raise WorkerMisbehaved(f"it said more than {LINE_BYTES_MAX:,} bytes without a line end")

    def _write(self) -> None:
        """Write as much as it takes now, if anything is left to be written."""
        try:
            while self._to_send:
                self._to_send = self._to_send[os.write(self._stdin, self._to_send) :]
        except BlockingIOError:
            return
        except OSError:
            # It reads no more. How it ends is still to be heard.
            self._to_send = b""
            self._note_closed()

    def _note_closed(self) -> None:
        if self._closed_at is None:
            self._closed_at = self._clock.look()


def _why(error: OSError) -> str:
    """Return what the machine has too little of, with what to do."""
    return {
        errno.EMFILE: f"too few file descriptors; {MORE_DESCRIPTORS}",
        errno.ENFILE: f"too few file descriptors; {MORE_DESCRIPTORS}",
        errno.EAGAIN: "too few processes are allowed; raise the limit, with `ulimit -u 4096` say",
        errno.ENOMEM: "the host's memory is used up; end what else runs here",
    }.get(error.errno or 0, words_of(error))
