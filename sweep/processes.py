"""Child processes: started in a session of their own, bound to their parent, ended with all they
started.

Both halves are here, the parent's (`Child`, `process_pool`) and the child's first lines
(`bind_to_parent`, `leave_a_guard`). Light to import, as a child does so before anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""From the keyboard; from a scheduler or a spot market that wants the machine back; from a terminal
that is gone; from a queue that tells of a time limit ahead."""
KILL_SECONDS = 20.0
"""How long a process that got SIGKILL may take to end. One that a driver holds in the kernel may
take for ever; a large one gives its memory back first."""
_OOM_SCORE = 500
"""Of 1000: where the host's memory runs out the kernel takes a child, which can be started again,
rather than its parent, which knows what was measured. It is added to what the parent has."""
_MARK = "QLORA_SWEEP_CHILD"
"""Variable that every process below a child inherits, by which those that left its process group
are found."""
_ORPHANS_SECONDS = 0.5
"""That killed orphans get to end, where this process is to reap them."""
_SWEEPS_MAX = 5
"""Times that is looked for processes which were started while others were ended."""
_PR_SET_PDEATHSIG = 1
_GUARDED_ENDED = signal.SIGUSR2
"""What the kernel tells a guard by."""
_unending: list[subprocess.Popen[bytes]] = []
"""Children that even SIGKILL did not end; kept, as nothing is to be done about them any more."""


@dataclass(frozen=True)
class End:
    """How a child ended."""

    status: int | None
    """The exit status, or minus the signal's number; None for one that even SIGKILL did not end."""
    was_killed: bool = False
    """Whether this process killed it, so that the status says nothing of its own doing."""
    is_host_out_of_memory: bool = False
    """Whether the kernel killed it, or seems to have, as the host's or the container's memory ran
    out."""

    def __str__(self) -> str:
        """Return it as the end of 'the process ended with ...'."""
        if self.status is None:
            return "no end, not even by SIGKILL: the kernel holds it"
        if self.is_host_out_of_memory:
            return "signal SIGKILL from the kernel, as the host's memory ran out"
        if self.status >= 0:
            return f"exit status {self.status}"
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-self.status).name}"
        return f"signal {-self.status}"


class Child:
    """A process in a session of its own, and everything that it starts.

    A session of its own: Ctrl-C in the terminal reaches the parent alone, and one signal reaches
    the child with everything below it. It calls `bind_to_parent` with this process's number in its
    first lines, and ends with the thread that started it; so that is to be one which stays.

    Without a session of its own it is one more process of its parent's group, which whoever ends
    the parent ends with it; then `kill` and `end` are not for it.

    Args:
        command: what runs.
        stdin, stdout, stderr: as `subprocess.Popen` takes them.
        pass_fds: descriptors that it inherits beside those.
        environment: its variables; None for this process's own.
        has_own_session: whether it gets a session, and a mark by which all below it is found.

    Raises:
        OSError: it cannot be started, for want of processes or descriptors, say.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int | IO[bytes] | None = subprocess.PIPE,
        stdout: int | IO[bytes] | None = subprocess.PIPE,
        stderr: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        has_own_session: bool = True,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._oom_kills = oom_kills()
        self._was_killed = False
        self._end: End | None = None
        variables = dict(os.environ if environment is None else environment)
        if has_own_session:
            variables[_MARK] = self._mark
        self.process = subprocess.Popen(
            list(command),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(pass_fds),
            start_new_session=has_own_session,
            env=variables,
        )

    @property
    def pid(self) -> int:
        """Its number, and that of its process group."""
        return self.process.pid

    def has_ended(self) -> bool:
        """Return whether it ended. It is not reaped: its number stays its own until `end`."""
        if self._end is not None:
            return True
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            # Reaped by the system, where SIGCHLD is ignored.
            return True
        return ended is not None

    def is_stopped(self) -> bool:
        """Return whether somebody stopped it, so that it does nothing until it is told to go on."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return False
        # Behind its name, which may be anything.
        return stat.rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])

    def kill(self) -> None:
        """Kill it and its process group, and return at once; from a signal handler too."""
        if self._end is not None:
            return
        if not self.has_ended():
            self._was_killed = True
        # Not ours to signal any more: all of them are gone.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, *, patience: float = 0.0, kill_seconds: float = KILL_SECONDS) -> End:
        """Return how it ended; after ``patience`` seconds by force. Idempotent.

        Whatever it started is killed too, however it ended, and before it is reaped: its number
        could then be another's. The pipes are the caller's to close.
        """
        if self._end is None:
            self._await(patience)
            self.kill()
            if self._await(kill_seconds):
                status = self.process.wait()
                kills = oom_kills()
                is_oom = status == -signal.SIGKILL and not self._was_killed
                has_grown = self._oom_kills is not None and (kills or 0) > self._oom_kills
                self._end = End(status, self._was_killed, is_oom and has_grown)
            else:
                _unending.append(self.process)
                self._end = End(None, was_killed=True)
            _kill_marked(self._mark)
            self._reap_orphans()
        return self._end

    def _await(self, seconds: float) -> bool:
        """Wait for its end, and return whether that came; by looking, as a wait would reap it."""
        deadline = time.monotonic() + seconds
        pause = 0.001
        while not self.has_ended():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.05)
        return True

    def _reap_orphans(self) -> None:
        """Reap what it left, where this process inherits it: as a container's first, say."""
        deadline = time.monotonic() + _ORPHANS_SECONDS
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-self.pid, os.WNOHANG) == (0, 0):
                    time.sleep(0.005)


def own_age_seconds() -> float:
    """Return for how long this process has run."""
    stat = Path("/proc/self/stat").read_bytes()
    # Behind its name, which may be anything; counted from the machine's start.
    ticks = int(stat.rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _kill_marked(mark: str) -> None:
    """Kill the processes below a child that are in no group of its own, until there are none.

    A process that cleared its variables, or that runs as somebody else, is not found.
    """
    variable = f"{_MARK}={mark}".encode()
    for _ in range(_SWEEPS_MAX):
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            # Gone, ending, or somebody else's.
            with contextlib.suppress(OSError):
                if variable in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        others = [number for number in found if number != os.getpid()]
        for number in others:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        if not others:
            return


def bind_to_parent(parent: int) -> None:
    """Bind this process to its parent's life, however that ends (Linux). For a child's first lines.

    What stops a study is the parent's to hear: whoever signals all processes of a job, as systemd
    and schedulers do, still gets the running trial's result.

    Args:
        parent: number of the process that is to be the parent. Where it ended before this was
            called, no signal will come, and this process ends here.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # SIGXCPU, which tells why, is to come before the SIGKILL at the limit of processor time.
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard > 1 and soft in (resource.RLIM_INFINITY, hard):
        resource.setrlimit(resource.RLIMIT_CPU, (hard - 1, hard))
    # Without /proc, or where it is not to be written, the kernel chooses as it likes.
    with contextlib.suppress(OSError, ValueError):
        file = Path("/proc/self/oom_score_adj")
        score = min(1000, int(file.read_text(encoding="ascii")) + _OOM_SCORE)
        file.write_text(str(score), encoding="ascii")


def leave_a_guard(*descriptors: int) -> None:
    """Fork a process that ends everything below this one as soon as this one ends.

    A signal at its parent's death reaches a child alone, and not what the child has started. For a
    child's first lines, while it is small and has one thread; where no process can be forked, there
    is no guard.

    Args:
        descriptors: those that only this process may hold, beside its standard ones.
    """
    guarded = os.getpid()
    mark = os.environ.get(_MARK, "")
    # Blocked before there is a guard, so that it cannot miss its signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {_GUARDED_ENDED})
    try:
        number = os.fork()
    except OSError:
        number = -1
    if number != 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {_GUARDED_ENDED})
        return
    try:
        for descriptor in (0, 1, 2, *descriptors):
            os.close(descriptor)
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, _GUARDED_ENDED)
        while os.getppid() == guarded:
            signal.sigwait({_GUARDED_ENDED})
        if mark:
            _kill_marked(mark)
        os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(1)


def oom_kills() -> int | None:
    """Return how many processes the kernel killed for want of memory; None where it does not say.

    Those of this process's control group, or of the whole machine where the group does not count.
    """
    group = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        group = next((line[4:] for line in lines if line.startswith("0::/")), "")
    # A container may see the host's path, and its own group at the top.
    for place in (
        f"/sys/fs/cgroup/{group}/memory.events",
        "/sys/fs/cgroup/memory.events",
        "/proc/vmstat",
    ):
        with contextlib.suppress(OSError):
            text = Path(place).read_text(encoding="ascii")
            if (found := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)) is not None:
                return int(found[1])
    return None


@contextmanager
def process_pool(
    count: int, *, settle_in: Callable[[], None] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool; what it still does where the ``with`` is left by an exception is given up.

    Args:
        count: of processes. They are not forked: this one may have threads, of which a child would
            have the locks alone.
        settle_in: called in each before it works; a function of a module.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    arguments = (os.getpid(), settle_in)
    with ProcessPoolExecutor(count, context, _settle_in, arguments) as pool:
        # All are started here, where they hear no signal until they have learned to ignore it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            for _ in range(count):
                pool.submit(int)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            yield pool
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _settle_in(parent: int, further: Callable[[], None] | None) -> None:
    bind_to_parent(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if further is not None:
        further()
