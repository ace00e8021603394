"""Owns the tracing children: processes in which torch and transformers are imported, as they never
are in this one, and which answer one question a line with one profile a line.

A child is started at its first question and gone with its owner. It gets so long for an answer and
no longer, whatever it does instead. A whole space's structures are traced by several at once. Knows
nothing of what is done with profiles.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
import weakref
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import IO, Any, Protocol

from search_spaces.errors import EnvironmentFault, InputError, words_of
from search_spaces.models import ModelSpec
from sweep.child_environment import child_environment
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
_LAST_WORDS_BYTES = 16384
"""Of what a child prints beside its answers so much is kept, the last."""
_CHUNK_BYTES = 65536
_TURN_SECONDS = 0.2
"""Between two looks at whether the process is there."""
_LONGEST_TURN_SECONDS = 1.0
"""Counts of a turn that took longer: this process was stopped meanwhile, and the child perhaps."""
_LAST_MOMENT_SECONDS = 1.0
"""A child whose pipe is closed gets so long to end by itself, so that its own status is seen."""

Traced = dict[str, Any] | InputError | EnvironmentFault
"""A profile as JSON values, or why there is none."""


class Tracer(Protocol):
    """Traces structures of a model. Real: `TracingChildren`, and `TracingChild` alone."""

    def trace(self, model: ModelSpec, structure: Structure) -> dict[str, Any]:
        """Return the structure's profile as JSON values.

        Raises:
            Untraceable: the model's code cannot be walked.
            InputError: the model's config cannot be built.
            EnvironmentFault: the child does not answer.
        """
        ...

    def trace_all(
        self, model: ModelSpec, structures: Iterable[Structure]
    ) -> Generator[tuple[Structure, Traced]]:
        """Yield each structure as it is done, with what `trace` would return or raise of it."""
        ...


class _Process:
    """One process, its three pipes, and the question that it was asked last."""

    def __init__(self, command: Sequence[str]) -> None:
        self._child = Child(
            [*command, str(os.getpid())],
            stderr=subprocess.PIPE,
            # It walks shapes: the GPU's memory is the trials'.
            environment=child_environment() | {"CUDA_VISIBLE_DEVICES": ""},
        )
        process = self._child.process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        for stream in self._streams:
            os.set_blocking(stream.fileno(), False)
        # At exit, too, and where nobody refers to it any more.
        self.close = weakref.finalize(self, _close, self._child, self._streams)
        self._open: set[IO[bytes]] = {self._stdout, self._stderr}
        self._to_send = self._said = self._printed = b""
        self._seconds_left = 0.0
        self._is_garrulous = False

    @property
    def _streams(self) -> tuple[IO[bytes], ...]:
        return self._stdin, self._stdout, self._stderr

    def poll(self) -> int | None:
        """Return the exit status once it was ended and waited for."""
        return self._child.process.returncode

    def ask(self, question: bytes, *, seconds: float) -> None:
        """Have it asked, as soon as it listens, and answer within so many seconds."""
        self._seconds_left = seconds
        self._to_send = question + b"\n"

    def wait(self, seconds: float) -> None:
        """Count so many seconds in which it was waited for, and could answer."""
        self._seconds_left -= seconds

    def speaks_unasked(self) -> bool:
        """Return whether it says what is the answer to no question: the next would get it."""
        self._read_all()
        return bool(self._said)

    @property
    def is_done(self) -> bool:
        """Whether there is an answer, or none will come."""
        return b"\n" in self._said or self._fault is not None

    @property
    def _fault(self) -> str | None:
        """Why no answer will come."""
        if self._is_garrulous:
            return f"it said more than {_ANSWER_BYTES_MAX:,} bytes without a line end"
        if self._child.has_ended():
            # All that it wrote is in the pipe by then.
            self._read_all()
            return None if b"\n" in self._said else "it ended"
        if self._stdout not in self._open:
            return "it closed its pipe"
        if self._seconds_left > 0:
            return None
        # What came while this process was stopped itself is in time.
        self._read_all()
        return None if b"\n" in self._said else "it took too long"

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have it looked at, by functions that are to be called."""
        for stream in self._open:
            selector.register(stream, selectors.EVENT_READ, partial(self._read, stream))
        if self._to_send:
            selector.register(self._stdin, selectors.EVENT_WRITE, self._write)

    def answer(self) -> bytes:
        """Return the answer that is there.

        Raises:
            EnvironmentFault: there is none; it has been ended.
        """
        if b"\n" not in self._said:
            raise EnvironmentFault(f"the tracing process gave no answer: {self._last_words()}")
        line, _, self._said = self._said.partition(b"\n")
        return line

    def _read_all(self) -> None:
        for stream in (self._stdout, self._stderr):
            # Not for ever: what it started may have its pipes, and go on.
            for _ in range(_ANSWER_BYTES_MAX // _CHUNK_BYTES):
                if stream not in self._open or self._is_garrulous or not self._read(stream):
                    break

    def _read(self, stream: IO[bytes]) -> bool:
        """Read what is there, and return whether anything was."""
        try:
            chunk = os.read(stream.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._open.discard(stream)
        elif stream is self._stderr:
            self._printed = (self._printed + chunk)[-_LAST_WORDS_BYTES:]
        else:
            self._said += chunk
            self._is_garrulous = len(self._said) > _ANSWER_BYTES_MAX and b"\n" not in self._said
        return bool(chunk)

    def _write(self) -> None:
        try:
            self._to_send = self._to_send[os.write(self._stdin.fileno(), self._to_send) :]
        except BlockingIOError:
            return
        except OSError:
            # It reads no more; how it ends is still to be heard.
            self._to_send = b""

    def _last_words(self) -> str:
        """End it, and return why that had to be or how it ended by itself."""
        fault = self._fault
        is_leaving = fault in ("it ended", "it closed its pipe")
        end = self._child.end(patience=_LAST_MOMENT_SECONDS if is_leaving else 0.0)
        self._read_all()
        self.close()
        words = self._printed.decode(errors="replace").strip().splitlines()
        how = fault if end.was_killed else f"it ended with {end}"
        return f"{how}: {words[-1].strip()[:500]}" if words else f"{how}"


def _close(child: Child, streams: Iterable[IO[bytes]]) -> None:
    child.end()
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.close()


class TracingChild:
    """A `Tracer` in a process of its own, in which torch and transformers are imported."""

    def __init__(self, command: tuple[str, ...] = _COMMAND) -> None:
        self._command = command
        self._process: _Process | None = None
        self._never_began: str | None = None

    def trace(self, model: ModelSpec, structure: Structure) -> dict[str, Any]:
        """See `Tracer.trace`."""
        self.ask(model, structure)
        _first_to_answer([self])
        return self.answer(model)

    def trace_all(
        self, model: ModelSpec, structures: Iterable[Structure]
    ) -> Generator[tuple[Structure, Traced]]:
        """See `Tracer.trace_all`; one after another."""
        return _all_traced([self], model, structures)

    def ask(self, model: ModelSpec, structure: Structure) -> None:
        """Have a structure traced; one that has no process to do it is answered by that."""
        self._never_began = None
        if self._process is not None and self._process.speaks_unasked():
            self.close()
        if self._process is None:
            try:
                self._process = _Process(self._command)
            except OSError as error:
                # Too many processes or open files, say.
                self._never_began = words_of(error)
                return
        question = {"model": model.to_json(), "structure": structure.to_json()}
        self._process.ask(json.dumps(question).encode(), seconds=_DEADLINE_SECONDS)

    def answer(self, model: ModelSpec) -> dict[str, Any]:
        """Return what was asked for, once it `is_done`. Raises what `Tracer.trace` does."""
        if self._process is None:
            raise EnvironmentFault(f"the tracing process cannot be started: {self._never_began}")
        try:
            line = self._process.answer()
        except EnvironmentFault:
            self.close()
            raise
        match _parsed(line):
            case {"profile": dict(profile)}:
                return profile
            case {"untraceable": str(reason)}:
                raise Untraceable(f"model '{model.name}': memory is not predicted: {reason}")
            case {"input": str(reason)}:
                raise InputError(f"model '{model.name}': {reason}")
        # What says one thing that is no answer may say another before the next.
        self.close()
        text = line[:200].decode(errors="replace")
        raise EnvironmentFault(f"the tracing process said what is no answer: {text!r}")

    @property
    def is_done(self) -> bool:
        """Whether `answer` would wait for nothing."""
        return self._process is None or self._process.is_done

    def wait(self, seconds: float) -> None:
        """Count so many seconds in which it was waited for."""
        if self._process is not None:
            self._process.wait(seconds)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have its pipes looked at, by functions that are to be called."""
        if self._process is not None:
            self._process.register(selector)

    def close(self) -> None:
        """End the child with all that it started. Idempotent; a later question starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.close()


def _parsed(line: bytes) -> Any:
    """Return the values of a line; None where it is not JSON, or nested past all reason."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class TracingChildren:
    """A `Tracer` of several children: one traces a structure, all of them a space.

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
        self._children = [TracingChild(command) for _ in range(count)]

    def trace(self, model: ModelSpec, structure: Structure) -> dict[str, Any]:
        """See `Tracer.trace`."""
        return self._children[0].trace(model, structure)

    def trace_all(
        self, model: ModelSpec, structures: Iterable[Structure]
    ) -> Generator[tuple[Structure, Traced]]:
        """See `Tracer.trace_all`."""
        known = tuple(structures)
        count = -(-len(known) // _STRUCTURES_WORTH_A_CHILD)
        try:
            yield from _all_traced(self._children[:count], model, known)
        finally:
            if not self._outlive:
                self.close()

    def close(self) -> None:
        """End the children. Idempotent; a later question starts new ones."""
        for child in self._children:
            child.close()


def _all_traced(
    children: Iterable[TracingChild], model: ModelSpec, structures: Iterable[Structure]
) -> Generator[tuple[Structure, Traced]]:
    """Give each child the next structure whenever it has answered, and yield the answers."""
    idle, waiting = list(children), iter(structures)
    busy: dict[TracingChild, Structure] = {}
    try:
        while True:
            for child, structure in zip(tuple(idle), waiting, strict=False):
                busy[child] = structure
                idle.remove(child)
                child.ask(model, structure)
            if not busy:
                return
            for child in _first_to_answer(busy):
                structure = busy.pop(child)
                idle.append(child)
                yield structure, _traced(child, model)
    finally:
        for child in busy:
            child.close()


def _first_to_answer(children: Iterable[TracingChild]) -> list[TracingChild]:
    """Wait for an answer, and return who has one, or will have none any more."""
    known = tuple(children)
    while not (done := [child for child in known if child.is_done]):
        began = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for child in known:
                child.register(selector)
            for key, _ in selector.select(_TURN_SECONDS):
                key.data()
        for child in known:
            child.wait(min(time.monotonic() - began, _LONGEST_TURN_SECONDS))
    return done


def _traced(child: TracingChild, model: ModelSpec) -> Traced:
    try:
        return child.answer(model)
    except (InputError, EnvironmentFault) as error:
        return error
