"""The worker as a child process: how it is started, what is said to it and heard from it, how it
is ended.

Whatever the worker does, nothing here waits for it without an end: its pipes are never waited for
alone, but with the clock and the process beside them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Literal, Protocol

from search_spaces.errors import MORE_DESCRIPTORS, EnvironmentFault, words_of
from search_spaces.space import Weights
from storage import files
from sweep.child_environment import child_environment
from sweep.paths import cache_directory
from sweep.processes import KILL_SECONDS, Child, End
from sweep.running.patience import AttentiveClock
from sweep.running.wire import (
    LINE_BYTES_MAX,
    UnreadableError,
    WorkerMessage,
    read_message,
)
from sweep.running.worker_log import WorkerLog

_CPU_ENVIRONMENT = {
    # A study for the CPU never sees a card, whatever library looks for one.
    "CUDA_VISIBLE_DEVICES": "",
    # Fixed sizes and one arena make the budget repeatable: freed tensors go back at once.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    # bitsandbytes compiles its optimizers on the CPU, one C++ build for each shape, in the budget.
    "TORCHDYNAMO_DISABLE": "1",
}
_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONUNBUFFERED": "1",
}
_TURN_SECONDS = 0.2
"""Between two looks at the clock, the process and the log; what comes in the pipe is seen at once.
"""
_CHUNK_BYTES = 65536
_START_SECONDS = 120.0
"""Until the system has started a process: it may wait for a disk that is gone."""


class WorkerEnded(Exception):  # noqa: N818 - an end is not always an error
    """The worker's process ended, and all that it had said was heard."""


class WorkerSilent(Exception):  # noqa: N818 - nor is silence
    """The worker said nothing in time."""


class WorkerMisbehaved(Exception):  # noqa: N818 - what it did is the exception's text
    """The worker did what no worker does, and is to be ended; says what that was."""


class ChildSettings(Protocol):
    """What a child is for, as far as starting it goes."""

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """A child for the CPU never sees a card."""
        ...

    @property
    def weights(self) -> Weights:
        """Whoever loads real ones may need the hub's token."""
        ...

    @property
    def cards(self) -> tuple[str, ...]:
        """Those that it sees, as CUDA names them; none for those that this process sees."""
        ...

    @property
    def neighbours(self) -> int:
        """How many others share the machine's cores with it."""
        ...

    def model_dump_json(self) -> str:
        """Return all of it as a line of JSON."""
        ...


class WorkerProcess:
    """One worker: a process group of its own, and two pipes that never make anybody wait.

    Args:
        settings: the first thing that it is told, and the device and weights that it is for.
        log: where it prints.
        module: what it runs.
        clock: what deadlines are told by.
        patience: seconds that it gets to end by itself once it closed one of its pipes.

    Raises:
        EnvironmentFault: the machine has no room for another process.
    """

    def __init__(
        self,
        settings: ChildSettings,
        *,
        log: WorkerLog,
        module: str,
        clock: AttentiveClock,
        patience: float,
    ) -> None:
        self._log = log
        self._patience = patience
        self._clock = clock
        first_line = settings.model_dump_json().encode() + b"\n"
        self._child, self._messages = _start(settings, log, module)
        self._lines: deque[bytes] = deque()
        self._torn = b""
        self._to_send = b""
        self._closed_at: float | None = None
        """When one of its pipes was seen closed, or broken."""
        self._has_messages = True
        self.send(first_line)

    @property
    def clock(self) -> AttentiveClock:
        """What its deadlines are told by."""
        return self._clock

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process itself."""
        return self._child.process

    def send(self, line: bytes) -> None:
        """Write a line to the worker as soon as it takes it; that is seen to with each look."""
        self._to_send += line
        self._write()

    def next_message(self, *, until: float) -> WorkerMessage:
        """Return its next message. Raises what `next_line` raises, and on what is no message."""
        try:
            return read_message(self.next_line(until=until))
        except UnreadableError as error:
            raise WorkerMisbehaved(f"it said {error}") from None

    def next_line(self, *, until: float) -> bytes:
        """Return the next line that it says.

        Args:
            until: by the clock, when it is to be there.

        Raises:
            WorkerSilent: it was not. What came in the meantime is read first.
            WorkerEnded: its process ended without one.
            WorkerMisbehaved: nothing can come any more, or a line does not end.
        """
        while not self._lines:
            now = self._clock.look()
            if self._closed_at is not None and now >= self._closed_at + self._patience:
                raise WorkerMisbehaved("it closed its pipe, and lived on")
            is_late = now >= until
            # What came while this process was away is there, and is read first.
            self._turn(0 if is_late else _TURN_SECONDS)
            if is_late and not self._lines:
                raise WorkerSilent
        return self._lines.popleft()

    def fault(self) -> str | None:
        """Return why it cannot be given anything to do; None where it waits for that in silence."""
        try:
            self._turn(0)
        except WorkerEnded:
            return "it ended while it had nothing to do"
        except WorkerMisbehaved as error:
            return str(error)
        if self._closed_at is not None:
            return "it closed its pipe"
        return "it spoke without being asked" if self._lines or self._torn else None

    def is_stopped(self) -> bool:
        """Return whether somebody stopped it, and did not tell it to go on."""
        return self._child.is_stopped()

    def kill(self) -> None:
        """Kill its whole process group; from a signal handler, too."""
        self._child.kill()

    def close(self, *, patience: float = 0.0, kill_seconds: float = KILL_SECONDS) -> End:
        """Free the pipes and return how it ended; after ``patience`` seconds, by force.

        Everything that it started ends too, however it ended itself.
        """
        end = self._child.end(patience=patience, kill_seconds=kill_seconds)
        if self._messages >= 0:
            os.close(self._messages)
            self._messages = -1
        if self.process.stdin is not None:
            # What was still to be written was for a process that is gone.
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        return end

    def _turn(self, seconds: float) -> None:
        """Look once at everything: the pipes, for so long, the process and the log."""
        # Before the pipe is read: all that an ended process wrote is in it by then.
        has_ended = self._child.has_ended()
        if has_ended:
            self._read_last_words()
        else:
            self._exchange(seconds)
        self._log.keep_small()
        if has_ended and not self._lines:
            raise WorkerEnded

    def _exchange(self, seconds: float) -> None:
        """Wait until it speaks or listens, at most so long, and read and write what goes."""
        poll = select.poll()
        if self._has_messages:
            poll.register(self._messages, select.POLLIN)
        if self._to_send:
            poll.register(self._stdin, select.POLLOUT)
        for descriptor, _ in poll.poll(1000 * seconds):
            if descriptor == self._messages:
                self._read()
            else:
                self._write()

    def _read_last_words(self) -> None:
        """Read what an ended worker left in the pipe: no more than goes into one. Whatever it
        started may still hold the pipe, and write on.
        """
        if self._has_messages:
            left = fcntl.fcntl(self._messages, fcntl.F_GETPIPE_SZ)
            for _ in range(-(-left // _CHUNK_BYTES)):
                if not self._read():
                    break
            self._has_messages = False

    def _read(self) -> bool:
        """Read what is there, and return whether anything was."""
        try:
            chunk = os.read(self._messages, _CHUNK_BYTES) if self._has_messages else b""
        except BlockingIOError:
            return False
        if not chunk:
            self._has_messages = False
            self._note_closed()
            return False
        *whole, self._torn = (self._torn + chunk).split(b"\n")
        self._lines.extend(whole)
        if any(len(line) > LINE_BYTES_MAX for line in (*whole, self._torn)):
            raise WorkerMisbehaved(f"it said more than {LINE_BYTES_MAX:,} bytes without a line end")
        return True

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

    @property
    def _stdin(self) -> int:
        assert self.process.stdin is not None
        return self.process.stdin.fileno()


def _start(settings: ChildSettings, log: WorkerLog, module: str) -> tuple[Child, int]:
    """Return the started process, and the end of the pipe that its messages come out of."""
    try:
        read_end, write_end = os.pipe()
    except OSError as error:
        raise _no_room(error) from error
    environment = _environment(settings)
    try:
        # -P: a module of the user's directory must not shadow ours.
        command = [sys.executable, "-P", "-m", module, str(write_end), str(os.getpid())]
        child = _in_lasting_thread(
            lambda: Child(
                command,
                stdout=log.fileno(),
                stderr=log.fileno(),
                # Not stdout, which C libraries print to as they like.
                pass_fds=[write_end],
                environment=environment,
            )
        )
    except (OSError, RuntimeError) as error:
        os.close(read_end)
        raise _no_room(error) from error
    except BaseException:
        os.close(read_end)
        raise
    finally:
        # The child's copy is then the only one, so that its death closes the pipe.
        os.close(write_end)
    assert child.process.stdin is not None
    for descriptor in (read_end, child.process.stdin.fileno()):
        os.set_blocking(descriptor, False)
    return child, read_end


def _in_lasting_thread(start: Callable[[], Child]) -> Child:
    """Start a child from a thread that lives as long as this process.

    The kernel ends a child that is bound to its parent with the thread that started it. A child
    that is there when whoever waits for it is interrupted has nobody, and is ended.
    """
    starting = _lasting_thread(os.getpid()).submit(start)
    try:
        return starting.result(timeout=_START_SECONDS)
    except TimeoutError as error:
        starting.add_done_callback(_abandon)
        raise OSError(f"no process could be started for {_START_SECONDS:g} s") from error
    except KeyboardInterrupt:
        starting.add_done_callback(_abandon)
        raise


def _abandon(starting: Future[Child]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().end()


@cache
def _lasting_thread(_process: int) -> ThreadPoolExecutor:
    """Return this process's own; one that was forked off another has none of that one's threads."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="sweep-start")


def _no_room(error: OSError | RuntimeError) -> EnvironmentFault:
    """Return why no worker can be started, with what to do."""
    match error:
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            why = f"too few file descriptors; {MORE_DESCRIPTORS}"
        case OSError(errno=errno.EAGAIN):
            why = "too few processes are allowed; raise the limit, with `ulimit -u 4096` say"
        case OSError(errno=errno.ENOMEM):
            why = "the host's memory is used up; end what else runs here"
        case _:
            why = words_of(error)
    return EnvironmentFault(f"the worker cannot be started: {why}")


def _environment(settings: ChildSettings) -> dict[str, str]:
    """Return the variables that a worker starts with."""
    inherited = child_environment(with_hub_token=settings.weights == "pretrained")
    # By default the compiler's files are in /tmp, and gone with the next start of the machine.
    compiled = cache_directory() / "compiled"
    # Made here, as the compiler would leave its rights to the umask. What cannot be made, it says.
    with contextlib.suppress(OSError):
        files.make_directory(compiled)
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    if settings.neighbours:
        # Each would take every core to compile, and the steps that another measures would wait.
        kept["TORCHINDUCTOR_COMPILE_THREADS"] = str(_share_of_cores(settings.neighbours))
    own = {"CUDA_VISIBLE_DEVICES": ",".join(settings.cards)} if settings.cards else {}
    if settings.device == "cpu":
        own = _CPU_ENVIRONMENT
        kept["OMP_NUM_THREADS"] = "1"
    return kept | inherited | _QUIET | own


def _share_of_cores(neighbours: int) -> int:
    """Return how many of this process's cores one of several workers compiles on: each of them
    keeps one to train with.
    """
    workers = neighbours + 1
    return max(1, (len(os.sched_getaffinity(0)) - workers) // workers)
