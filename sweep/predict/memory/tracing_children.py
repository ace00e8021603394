"""Tracing children: processes in which torch and transformers are imported, as they never are in
this one, and which answer one question a line with one profile a line.

A child gets so long for an answer and no longer, whatever it does instead, and is gone with its
owner.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Timer
from typing import IO, Any, Protocol

from search_spaces.errors import EnvironmentFault, InputError, words_of
from search_spaces.models import ModelSpec
from sweep.child_environment import child_environment
from sweep.errands import last_words
from sweep.predict.memory.profiles import Structure, Untraceable
from sweep.processes import Child

_COMMAND = (sys.executable, "-P", "-m", "sweep.predict.memory.tracing")
"""Followed by this process's number."""
_DEADLINE_SECONDS = 120.0
"""For one structure, the imports included; a slow disk makes those take most of a minute."""
_CHILDREN_MAX = 4
"""Each takes half a GiB of the host's memory."""
_STRUCTURES_WORTH_A_CHILD = 12
"""Importing torch takes a child as long as tracing some forty structures; the processors are there
anyway, so a further child is started where it spares most of a second."""
_ANSWER_BYTES_MAX = 64 * 2**20
"""A profile takes some 60 KiB, and one of a model with ten times the layers ten times that."""
_LAST_MOMENT_SECONDS = 1.0
"""A child whose pipe is closed gets so long to end by itself, so that its own status is seen."""

Traced = dict[str, Any] | InputError | EnvironmentFault
"""A profile as JSON values, or why there is none."""


class Tracer(Protocol):
    """Traces structures of a model. Real: `TracingChildren`."""

    def trace_all(
        self, model: ModelSpec, structures: Iterable[Structure]
    ) -> Generator[tuple[Structure, Traced]]:
        """Yield each structure as it is done, with its profile or why it has none.

        That is `Untraceable` where the model's code cannot be walked, another `InputError` where
        the model's config cannot be built, `EnvironmentFault` where a child does not answer.
        """
        ...


class TracingChildren:
    """A `Tracer` in processes of its own, several of them for many structures.

    Args:
        count: of children at most; by default as many as there are processors, up to four.
        command: what each of them runs.
        outlive: whether they stay for further questions, until they are closed. Else they end with
            a space: what was asked of it is all.
    """

    def __init__(
        self,
        count: int | None = None,
        *,
        command: tuple[str, ...] = _COMMAND,
        outlive: bool = False,
    ) -> None:
        self._outlive = outlive
        count = count or min(len(os.sched_getaffinity(0)), _CHILDREN_MAX)
        self._children = [_Child(command) for _ in range(count)]

    def trace(self, model: ModelSpec, structure: Structure) -> dict[str, Any]:
        """Return the profile of one structure, or raise why it has none."""
        ((_, traced),) = self.trace_all(model, [structure])
        if isinstance(traced, dict):
            return traced
        raise traced

    def trace_all(
        self, model: ModelSpec, structures: Iterable[Structure]
    ) -> Generator[tuple[Structure, Traced]]:
        """See `Tracer.trace_all`."""
        waiting = deque(structures)
        is_space = len(waiting) > 1
        idle = self._children[: -(-len(waiting) // _STRUCTURES_WORTH_A_CHILD)]
        busy: dict[Future[Traced], tuple[_Child, Structure]] = {}
        try:
            while waiting or busy:
                while waiting and idle:
                    child, structure = idle.pop(), waiting.popleft()
                    busy[child.ask(model, structure)] = child, structure
                for answered in wait(busy, return_when=FIRST_COMPLETED).done:
                    child, structure = busy.pop(answered)
                    idle.append(child)
                    yield structure, answered.result()
        finally:
            for child, _ in busy.values():
                child.close()
            if is_space and not self._outlive:
                self.close()

    def close(self) -> None:
        """End the children. Idempotent; a later question starts new ones."""
        for child in self._children:
            child.close()


class _Child:
    """One process, and a thread that speaks with it: a child ends with the thread that started it
    (`Child`), and reading from it takes as long as it likes.
    """

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command
        self._thread = ThreadPoolExecutor(1)
        self._child: Child | None = None
        self._printed: IO[bytes]
        self._end: weakref.finalize[..., Any]

    def ask(self, model: ModelSpec, structure: Structure) -> Future[Traced]:
        """Have a structure traced, in a new process where there is none."""
        if self._child is None:
            try:
                self._thread.submit(self._start).result()
            except (OSError, RuntimeError) as error:
                # Neither a process nor, perhaps, a thread; what was queued for one is not run.
                self._thread, failed = ThreadPoolExecutor(1), Future[Traced]()
                reason = f"the tracing process cannot be started: {words_of(error)}"
                failed.set_result(EnvironmentFault(reason))
                return failed
        question = {"model": model.to_json(), "structure": structure.to_json()}
        return self._thread.submit(self._traced, model.name, json.dumps(question).encode() + b"\n")

    def close(self) -> None:
        """End the process with all that it started. Idempotent; a later question starts a new
        one."""
        if (child := self._child) is not None:
            # The thread is told so at once, where it waits for an answer.
            child.kill()
            self._thread.submit(self._close).result()

    def _start(self) -> None:
        with contextlib.ExitStack() as opened:
            self._printed = opened.enter_context(tempfile.TemporaryFile())
            self._child = Child(
                [*self._command, str(os.getpid())],
                stderr=self._printed,
                # It walks shapes: the GPU's memory is the trials'.
                environment=child_environment() | {"CUDA_VISIBLE_DEVICES": ""},
            )
            opened.pop_all()
        # Where nobody refers to it any more, too.
        self._end = weakref.finalize(self, _end, self._child, self._printed)

    def _close(self) -> None:
        if self._child is not None:
            self._child = None
            self._end()

    def _traced(self, name: str, question: bytes) -> Traced:
        """Ask, and return what is answered in time."""
        child = self._child
        if child is None:
            return EnvironmentFault("the tracing process was ended")
        assert child.process.stdin is not None
        assert child.process.stdout is not None
        began, line = time.monotonic(), b""
        timer = Timer(_DEADLINE_SECONDS, child.kill)
        timer.daemon = True
        timer.start()
        # It may have ended before it reads; how, is still to be heard.
        with contextlib.suppress(OSError):
            child.process.stdin.write(question)
            child.process.stdin.flush()
            line = child.process.stdout.readline(_ANSWER_BYTES_MAX)
        timer.cancel()
        match _parsed(line):
            case {"profile": dict(profile)}:
                return profile
            case {"untraceable": str(reason)}:
                return Untraceable(f"model '{name}': memory is not predicted: {reason}")
            case {"input": str(reason)}:
                return InputError(f"model '{name}': {reason}")
        if line.endswith(b"\n") or len(line) == _ANSWER_BYTES_MAX:
            text = line[:200].decode(errors="replace").rstrip("\n")
            fault = f"the tracing process said what is no answer: {text!r}"
        else:
            is_late = time.monotonic() - began >= _DEADLINE_SECONDS
            end = child.end(patience=_LAST_MOMENT_SECONDS)
            how = "it took too long" if is_late else "it closed its pipe"
            how = how if end.was_killed else f"it ended with {end}"
            fault = f"the tracing process gave no answer: {how}{last_words(self._printed)}"
        self._close()
        return EnvironmentFault(fault)


def _parsed(line: bytes) -> Any:
    """Return the values of a line; None where it is not JSON."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _end(child: Child, printed: IO[bytes]) -> None:
    child.end()
    for stream in (child.process.stdin, child.process.stdout, printed):
        # What was not read by then is lost with it.
        with contextlib.suppress(OSError):
            assert stream is not None
            stream.close()
