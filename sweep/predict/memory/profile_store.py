"""The profiles of a model's structures: from a cache on disk, or traced.

What traces are children: processes in which torch and transformers are imported, as they never are
in this one, and which answer one question a line with one profile a line. A child gets so long for
an answer and no longer, whatever it does instead, and is gone with its owner.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from search_spaces.errors import EnvironmentFault, InputError, words_of
from search_spaces.models import ModelSpec
from storage import files
from sweep.child_environment import child_environment
from sweep.errands import last_words
from sweep.predict.memory.profiles import Profile, Structure, Untraceable, mixed
from sweep.processes import Child

_ROOT = Path(__file__).parents[3]
_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
TRACED_BY = ("search_spaces", "sweep/predict/memory", "sweep/training")
"""Directories whose code the tracing child runs; a profile is of no use once any of it changes."""
_ATTEMPTS = 2
"""Times that a structure is traced whose tracing process dies; each time in a new process."""
_FAULTS_MAX = 3 * _ATTEMPTS
"""Times in a row that a tracing process may die before nothing is traced any more: each may take
minutes to die, and a study would ask for hundreds."""
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

OnProgress = Callable[[int, int], None]
"""Told how many structures are done, of how many."""

Traced = dict[str, Any] | InputError | EnvironmentFault
"""A profile as JSON values, or why there is none."""


def tell_nobody(_done: int, _of: int) -> None:
    """Hear of no progress."""


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


class ProfileStore:
    """Profiles of one model's structures, each traced at most once on this machine.

    Args:
        model: whose structures.
        cache_dir: where profiles are kept, by model, structure and the versions of what was traced.
        tracer: asked for what is not there.
    """

    def __init__(self, model: ModelSpec, *, cache_dir: Path, tracer: Tracer) -> None:
        self._model = model
        self._cache_dir = cache_dir
        self._tracer = tracer
        self._profiles: dict[Structure, Profile] = {}
        self._refused: dict[Structure, InputError] = {}
        self._has_answered = False
        self._faults = 0
        """Times in a row that a tracing process died."""
        self._last_fault = ""

    def get(self, structure: Structure) -> Profile:
        """Return a structure's profile.

        What cannot be traced is not tried again: it is refused at once, with the same reason.

        Raises:
            InputError: it cannot be traced.
            EnvironmentFault: the tracing process has never answered.
        """
        self.fetch([structure])
        for part in structure.parts():
            for needed in (part.in_bf16(), part):
                if needed in self._refused:
                    # A new exception each time, as one that is raised twice keeps both's frames.
                    refused = self._refused[needed]
                    raise type(refused)(*refused.args)
        known = self.find(structure)
        assert known is not None, "what was fetched is there or refused"
        return known

    def find(self, structure: Structure) -> Profile | None:
        """Return a structure's profile where nothing has to be traced for it, now or ever."""
        if structure not in self._profiles:
            profile = self._find(structure)
            if profile is None:
                return None
            self._profiles[structure] = profile
        return self._profiles[structure]

    def _find(self, structure: Structure) -> Profile | None:
        if structure.is_mixed:
            packed, wide = map(self.find, structure.parts())
            if packed is None or wide is None:
                return None
            quantized = structure.config.quantized_layers(len(packed.positions))
            return mixed(packed, wide, quantized=quantized)
        in_bf16 = structure.in_bf16()
        shared = None if in_bf16 is None else self.find(in_bf16)
        if shared is not None and shared.is_same_in_fp16:
            return shared
        try:
            values = json.loads(self._path(structure).read_text(encoding="utf-8"))
            return Profile.from_json(values)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def fetch(
        self, structures: Iterable[Structure], *, on_progress: OnProgress = tell_nobody
    ) -> None:
        """Trace what is not there yet of structures that will be asked for, several at once.

        A process that dies once may have been the machine's fault, so its structure is tried again;
        where it always does, `get` refuses the structure as any other that cannot be traced.

        Args:
            structures: of one space, say.
            on_progress: told before the first one and after each; of nothing where all are there.

        Raises:
            EnvironmentFault: the tracing process has never answered.
        """
        parts = [part for structure in structures for part in structure.parts()]
        # What tells the two 16-bit types apart has to be traced in both.
        for wanted in ([part.in_bf16() or part for part in parts], parts):
            missing = [s for s in dict.fromkeys(wanted) if not self._is_settled(s)]
            if not missing:
                continue
            is_tried, before = self._faults < _FAULTS_MAX, self._faults
            if is_tried:
                self._trace(missing, on_progress)
            dead = [structure for structure in missing if not self._is_settled(structure)]
            if dead and is_tried and not self._has_answered:
                # Of the others nothing is known yet: the next question is another attempt.
                self._refused[dead[0]] = Untraceable(self._last_fault)
                self._faults = before + _ATTEMPTS
                raise EnvironmentFault(self._last_fault)
            self._refused |= {structure: Untraceable(self._last_fault) for structure in dead}

    def _is_settled(self, structure: Structure) -> bool:
        """Whether a structure is there, or known not to be traceable."""
        is_refused = structure in self._refused or structure.in_bf16() in self._refused
        return is_refused or self.find(structure) is not None

    def _trace(self, structures: Sequence[Structure], on_progress: OnProgress) -> None:
        done = 0
        on_progress(done, len(structures))
        for _ in range(_ATTEMPTS):
            missing = [s for s in structures if not self._is_settled(s)]
            # Closed at once, as what is still being traced has a process of its own.
            with contextlib.closing(self._tracer.trace_all(self._model, missing)) as answers:
                for structure, answer in answers:
                    self._note(structure, answer)
                    if self._faults == _FAULTS_MAX:
                        return
                    if self._faults == 0:
                        done += 1
                        on_progress(done, len(structures))

    def _note(self, structure: Structure, answer: Traced) -> None:
        """Keep what a process answered; that it did says that processes work."""
        if isinstance(answer, EnvironmentFault):
            self._faults += 1
            self._last_fault = f"model '{self._model.name}' cannot be traced: {answer}"
            return
        self._has_answered, self._faults = True, 0
        if isinstance(answer, InputError):
            self._refused[structure] = answer.with_traceback(None)
        else:
            write_cache(self._path(structure), answer)
            self._profiles[structure] = Profile.from_json(answer)

    def _path(self, structure: Structure) -> Path:
        parts = [self._model.fingerprint, structure.to_json(), tracing_fingerprint()]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return self._cache_dir / f"{digest[:32]}.json"


def write_cache(path: Path, values: dict[str, Any]) -> None:
    """Write into a cache, whole or not at all; one that cannot be written costs time only."""
    with contextlib.suppress(OSError):
        files.replace(path, json.dumps(values).encode(), is_durable=False)


@cache
def tracing_fingerprint() -> str:
    """Return a digest of the libraries' versions and of the code that traces them."""
    versions = "".join(map(_version, _LIBRARIES))
    return hashlib.sha256((versions + source_digest(*TRACED_BY)).encode()).hexdigest()


def source_digest(*directories: str) -> str:
    """Return a digest of all code in directories of this program, named from where it lies."""
    digest = hashlib.sha256()
    for path in source_files(*directories):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def source_files(*directories: str) -> list[Path]:
    """Return the modules in directories of this program, those further down included."""
    return [path for name in directories for path in sorted((_ROOT / name).rglob("*.py"))]


def _version(library: str) -> str:
    try:
        return f"{library} {version(library)};"
    except PackageNotFoundError:
        return f"{library};"


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
        self._count = count or min(len(os.sched_getaffinity(0)), _CHILDREN_MAX)
        self._command = command
        self._outlive = outlive
        self._idle: list[_Child] = []
        # Where nobody refers to them any more, too.
        weakref.finalize(self, _end, self._idle)

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
        most = min(self._count, -(-len(waiting) // _STRUCTURES_WORTH_A_CHILD))
        busy: dict[_Child, Structure] = {}
        try:
            while waiting or busy:
                while waiting and len(busy) < most:
                    structure = waiting.popleft()
                    try:
                        child = self._free_child()
                    except OSError as error:
                        reason = f"the tracing process cannot be started: {words_of(error)}"
                        yield structure, EnvironmentFault(reason)
                        continue
                    child.ask(model, structure)
                    busy[child] = structure
                for child in _done(busy) if busy else ():
                    traced = child.traced(model.name)
                    structure = busy.pop(child)
                    if isinstance(traced, EnvironmentFault):
                        child.end()
                    else:
                        self._idle.append(child)
                    yield structure, traced
        finally:
            _end(list(busy))
            if is_space and not self._outlive:
                self.close()

    def _free_child(self) -> _Child:
        while self._idle:
            child = self._idle.pop()
            if not child.has_ended():
                return child
            # With the thread that started it, or by somebody's hand.
            child.end()
        return _Child(self._command)

    def close(self) -> None:
        """End the children. Idempotent; a later question starts new ones."""
        _end(self._idle)


def _end(children: list[_Child]) -> None:
    while children:
        children.pop().end()


def _done(children: Collection[_Child]) -> list[_Child]:
    """Wait for something to happen, and return the children of which no more is to be heard."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.stdout, selectors.EVENT_READ, child.read)
            if child.question:
                selector.register(child.stdin, selectors.EVENT_WRITE, child.write)
        first = min(child.deadline for child in children)
        for key, _ in selector.select(max(0.0, first - time.monotonic())):
            key.data()
    return [child for child in children if child.is_done]


class _Child:
    """One process, asked one question at a time by the thread that started it, with which it ends.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: tuple[str, ...]) -> None:
        with contextlib.ExitStack() as opened:
            self._printed = opened.enter_context(tempfile.TemporaryFile())
            self._child = Child(
                [*command, str(os.getpid())],
                stderr=self._printed,
                # It walks shapes: the GPU's memory is the trials'.
                environment=child_environment() | {"CUDA_VISIBLE_DEVICES": ""},
            )
            pipes = self._child.process.stdin, self._child.process.stdout
            self.stdin, self.stdout = (opened.enter_context(pipe) for pipe in pipes if pipe)
            os.set_blocking(self.stdin.fileno(), False)
            self._opened = opened.pop_all()

    def ask(self, model: ModelSpec, structure: Structure) -> None:
        """Have a structure traced."""
        question = {"model": model.to_json(), "structure": structure.to_json()}
        self.question = json.dumps(question).encode() + b"\n"
        self._answer = bytearray()
        self._is_closed = False
        self.deadline = time.monotonic() + _DEADLINE_SECONDS

    def write(self) -> None:
        """Send as much of the question as is taken at once."""
        try:
            self.question = self.question[os.write(self.stdin.fileno(), self.question) :]
        except OSError:
            # It may have ended before it reads; how, is still to be heard.
            self.question = b""

    def read(self) -> None:
        """Take what is there of the answer."""
        more = os.read(self.stdout.fileno(), 2**16)
        self._answer += more
        self._is_closed = not more

    @property
    def is_done(self) -> bool:
        """Whether no more is waited for."""
        is_told = self._answer.endswith(b"\n") or len(self._answer) >= _ANSWER_BYTES_MAX
        return is_told or self._is_closed or time.monotonic() >= self.deadline

    def traced(self, name: str) -> Traced:
        """Return what was answered, for a model of a name."""
        try:
            answer = json.loads(self._answer)
        except ValueError:
            answer = None
        match answer:
            case {"profile": dict(profile)}:
                return profile
            case {"untraceable": str(reason)}:
                return Untraceable(f"model '{name}': memory is not predicted: {reason}")
            case {"input": str(reason)}:
                return InputError(f"model '{name}': {reason}")
        if self._answer.endswith(b"\n") or len(self._answer) >= _ANSWER_BYTES_MAX:
            text = self._answer[:200].decode(errors="replace").rstrip("\n")
            return EnvironmentFault(f"the tracing process said what is no answer: {text!r}")
        end = self._child.end(patience=_LAST_MOMENT_SECONDS if self._is_closed else 0.0)
        how = "it closed its pipe" if self._is_closed else "it took too long"
        how = how if end.was_killed else f"it ended with {end}"
        fault = f"the tracing process gave no answer: {how}{last_words(self._printed)}"
        return EnvironmentFault(fault)

    def has_ended(self) -> bool:
        """Whether its process is gone."""
        return self._child.has_ended()

    def end(self) -> None:
        """End the process with all that it started."""
        self._child.end()
        # What was not read by then is lost with it.
        with contextlib.suppress(OSError):
            self._opened.close()
