"""The profiles of a model's structures: shipped, from a cache on disk, or traced.

What traces are children: processes in which torch and transformers are imported, as they never are
in this one, and which answer one question a line with one profile a line. A child gets so long for
an answer and no longer, whatever it does instead, and is gone with its owner.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.rules import attention_of
from qlora_sweep.storage import files
from qlora_sweep.sweep.child_environment import child_environment
from qlora_sweep.sweep.json_child import JsonChild
from qlora_sweep.sweep.predict.memory.profiles import Profile, Structure, Untraceable, mixed
from qlora_sweep.sweep.predict.memory.shipped import (
    NOTHING,
    PROFILES,
    ROOT,
    ShippedProfiles,
    is_as_committed,
)

_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
TRACED_BY = (
    "search_spaces/config.py",
    "search_spaces/documents.py",
    "search_spaces/frozen.py",
    "search_spaces/linears.py",
    "search_spaces/models.py",
    "search_spaces/kinds.py",
    "search_spaces/quantized.py",
    "search_spaces/recurrent.py",
    "search_spaces/vision.py",
    "sweep/predict/memory/allocator.py",
    "sweep/predict/memory/profiles.py",
    "sweep/predict/memory/tracing",
    "sweep/training/adapters.py",
    "sweep/training/eight_bit.py",
    "sweep/training/experts.py",
    "sweep/training/grouped.py",
    "sweep/training/images.py",
    "sweep/training/model.py",
    "sweep/training/preference.py",
    "sweep/training/recomputing.py",
)
"""Modules and directories whose code the tracing child runs; a profile is of no use once any of it
changes."""
_ATTEMPTS = 2
"""Times that a structure is traced whose tracing process dies; each time in a new process."""
_FAULTS_MAX = 3 * _ATTEMPTS
"""Times in a row that a tracing process may die before nothing is traced any more: each may take
minutes to die, and a study would ask for hundreds."""
_COMMAND = (sys.executable, "-P", "-m", "qlora_sweep.sweep.predict.memory.tracing")
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


def ignore_progress(_done: int, _of: int) -> None:
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

    def close(self) -> None:
        """Give back what tracing holds. Idempotent; a later question takes it anew."""


class ProfileStore:
    """Profiles of one model's structures, each traced at most once on this machine.

    Those that ship are used although other versions of the libraries traced them (`has_borrowed`);
    what those could not trace is tried with the ones that are installed.

    Args:
        model: whose structures.
        cache_dir: where profiles are kept, by model, structure and the versions of what was traced.
        tracer: asked for what is not there.
        shipped: profiles that travel with the package; None for the package's own, which hold for
            the code that traced them alone.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        cache_dir: Path,
        tracer: Tracer,
        shipped: ShippedProfiles | None = None,
    ) -> None:
        self._model = model
        self._cache_dir = cache_dir
        self._tracer = tracer
        archive = PROFILES if is_as_committed(*TRACED_BY) else NOTHING
        self._shipped = shipped or ShippedProfiles(model, archive)
        self.has_borrowed = False
        self._known: dict[Structure, Profile | InputError] = {}
        self._has_answered = False
        self._faults = 0
        """Times in a row that a tracing process died."""
        self._last_fault = ""

    def fetch(
        self, structures: Iterable[Structure], *, on_progress: OnProgress = ignore_progress
    ) -> dict[Structure, Profile | InputError]:
        """Return the profiles of structures, or why they have none; what is not there yet is
        traced, several at once.

        What cannot be traced is not tried again. A process that dies once may have been the
        machine's fault, so its structure is tried again; where it always does, it is refused.

        Args:
            structures: of one space, say.
            on_progress: told before the first one and after each; of nothing where all are there.

        Raises:
            EnvironmentFault: the tracing process has never answered.
        """
        asked = list(structures)
        parts: list[Structure] = []
        in_bf16: list[Structure] = []
        for structure in asked:
            for part in structure.parts():
                parts.append(part)
                in_bf16.append(part.in_bf16() or part)
        # What tells the two 16-bit types apart has to be traced in both.
        for wanted in (in_bf16, parts):
            is_tried = self._faults < _FAULTS_MAX
            before = self._faults
            if is_tried:
                self._trace(wanted, on_progress)
            dead = dict.fromkeys(self._missing(wanted), Untraceable(self._last_fault))
            if dead and is_tried and not self._has_answered:
                # Of the others nothing is known yet: the next question is another attempt.
                self._known |= list(dead.items())[:1]
                self._faults = before + _ATTEMPTS
                raise EnvironmentFault(self._last_fault)
            self._known |= dead
        found: dict[Structure, Profile | InputError] = {}
        for structure in asked:
            known = self._look(structure)
            if known is not None:
                found[structure] = known
        return found

    def _missing(self, structures: Iterable[Structure]) -> list[Structure]:
        return [one for one in dict.fromkeys(structures) if self._look(one) is None]

    def _look(self, structure: Structure) -> Profile | InputError | None:
        """Return what is known of a structure; None where it has to be traced."""
        if structure not in self._known:
            found = self._read(structure)
            if found is None:
                return None
            self._known[structure] = found
        return self._known[structure]

    def _read(self, structure: Structure) -> Profile | InputError | None:
        if structure.is_mixed:
            packed, wide = map(self._look, structure.parts())
            if isinstance(packed, InputError):
                return packed
            if isinstance(wide, InputError):
                return wide
            if packed is None or wide is None:
                return None
            quantized = structure.config.quantized_layers(len(packed.positions))
            return mixed(packed, wide, quantized=quantized)
        in_bf16 = structure.in_bf16()
        shared = None if in_bf16 is None else self._look(in_bf16)
        if isinstance(shared, InputError) or (shared is not None and shared.is_same_in_fp16):
            return shared
        shipped = self._usable(structure)
        if shipped is None:
            return self._cached(structure)
        if self.other_versions:
            self.has_borrowed = True
        return shipped

    def _usable(self, structure: Structure) -> Profile | InputError | None:
        """Return what ships of a structure; None for what other versions could not trace."""
        shipped = self._shipped.get(structure)
        if self.other_versions and not isinstance(shipped, Profile):
            return None
        return shipped

    def origin(self, structure: Structure) -> str | None:
        """Return a digest of the file that a structure's profile ships in; None where it is traced
        here."""
        traced = structure.in_bf16() or structure
        return None if self._usable(traced) is None else self._shipped.digest

    def _cached(self, structure: Structure) -> Profile | None:
        try:
            values = json.loads(self._path(structure).read_text(encoding="utf-8"))
            return Profile.from_json(values)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @cached_property
    def other_versions(self) -> str:
        """The libraries of which others are installed than traced what ships, in words."""
        here = versions()
        others: list[str] = []
        for library, traced in self._shipped.versions.items():
            if here.get(library) != traced:
                others.append(f"{library} {traced} (here: {here[library] or 'none'})")
        return " and ".join(others)

    def _trace(self, wanted: Iterable[Structure], on_progress: OnProgress) -> None:
        """Trace what is missing, and again what a process died of."""
        missing = self._missing(wanted)
        done = 0
        of = len(missing)
        if missing:
            on_progress(done, of)
        for _ in range(_ATTEMPTS):
            # Closed at once, as what is still being traced has a process of its own.
            with contextlib.closing(self._tracer.trace_all(self._model, missing)) as answers:
                for structure, answer in answers:
                    if isinstance(answer, EnvironmentFault):
                        self._faults += 1
                        self._last_fault = f"model '{self._model.name}' cannot be traced: {answer}"
                        if self._faults == _FAULTS_MAX:
                            return
                        continue
                    self._has_answered = True
                    self._faults = 0
                    if isinstance(answer, InputError):
                        self._known[structure] = answer.with_traceback(None)
                    else:
                        write_cache(self._path(structure), answer)
                        self._known[structure] = Profile.from_json(answer)
                    done += 1
                    on_progress(done, of)
            missing = self._missing(missing)

    def _path(self, structure: Structure) -> Path:
        model = self._model.fingerprint_of(sees=structure.config.image_size is not None)
        parts = [model, structure.to_json(), tracing_fingerprint()]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return self._cache_dir / f"{digest[:32]}.json"


def write_cache(path: Path, values: Any) -> None:
    """Write into a cache, whole or not at all; one that cannot be written costs time only."""
    with contextlib.suppress(OSError):
        files.replace(path, json.dumps(values).encode(), is_durable=False)


@cache
def tracing_fingerprint() -> str:
    """Return a digest of the libraries' versions and of the code that traces them."""
    parts = json.dumps(versions()) + source_digest(*TRACED_BY)
    return hashlib.sha256(parts.encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of the libraries whose code is traced; empty for one that is not there.

    Without what tells builds apart (``+cu130``): what is traced touches no GPU.
    """
    return {library: _version(library).partition("+")[0] for library in _LIBRARIES}


def source_digest(*places: str) -> str:
    """Return a digest of modules and of all code in directories of this program, named from where
    it lies."""
    digest = hashlib.sha256()
    for path in source_files(*places):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def source_files(*places: str) -> list[Path]:
    """Return modules of this program, and those in directories of it and further down."""
    paths: list[Path] = []
    for place in places:
        path = ROOT / place
        if path.is_dir():
            paths += sorted(path.rglob("*.py"))
        else:
            paths.append(path)
    return paths


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


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

    def trace_all(
        self, model: ModelSpec, structures: Iterable[Structure]
    ) -> Generator[tuple[Structure, Traced]]:
        """See `Tracer.trace_all`."""
        waiting = deque(structures)
        is_space = len(waiting) > 1
        most = min(self._count, -(-len(waiting) // _STRUCTURES_WORTH_A_CHILD))
        busy: dict[Future[Traced], tuple[_Child, Structure]] = {}
        # A thread waits for each child; the children are this thread's, with which they end.
        with ThreadPoolExecutor(self._count) as pool:
            try:
                while waiting or busy:
                    while waiting and len(busy) < most:
                        structure = waiting.popleft()
                        try:
                            child = self._free_child()
                        except EnvironmentFault as fault:
                            yield structure, fault
                            continue
                        busy[pool.submit(child.trace, model, structure)] = child, structure
                    for answer in wait(busy, return_when=FIRST_COMPLETED).done:
                        child, structure = busy.pop(answer)
                        if isinstance(answer.result(), EnvironmentFault):
                            child.close()
                        else:
                            self._idle.append(child)
                        yield structure, answer.result()
            finally:
                for child, _ in busy.values():
                    child.process.kill()
                wait(busy)
                _end([child for child, _ in busy.values()])
                if is_space and not self._outlive:
                    self.close()

    def _free_child(self) -> _Child:
        return _idle_child(self._idle) or self._left_over() or _Child(self._command)

    def _left_over(self) -> _Child | None:
        return _idle_child(_left) if self._command == _COMMAND else None

    def close(self) -> None:
        """End the children. See `Tracer.close`."""
        _end(self._idle)


def trace_layers(model: ModelSpec) -> list[dict[str, Any]]:
    """Return the kinds of a model's decoder layers, from a process that then traces structures.

    Raises:
        Untraceable: the model's code cannot be walked.
        InputError: its config cannot be built.
        EnvironmentFault: the process does not answer.
    """
    child = _idle_child(_left) or _Child(_COMMAND)
    answer = child.answer({"model": model.to_json(), "attention": attention_of(model)})
    if isinstance(answer, EnvironmentFault):
        child.close()
        raise answer
    _left.append(child)
    match answer:
        case {"layers": list(layers)}:
            return layers
        case {"untraceable": str(reason)}:
            raise Untraceable(reason)
        case _:
            raise InputError(str(answer.get("input")))


class _Child(JsonChild):
    """One tracing process, asked one question at a time."""

    def __init__(self, command: tuple[str, ...]) -> None:
        # It walks shapes: the GPU's memory is the trials'. transformers goes through sets of
        # words, in an order that decides what is freed first: the same each time.
        fixed = {"CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
        environment = child_environment() | fixed
        super().__init__(command, environment=environment, name="the tracing process")

    def trace(self, model: ModelSpec, structure: Structure) -> Traced:
        """Return the profile of a structure, or why it has none."""
        answer = self.answer({"model": model.to_json(), "structure": structure.to_json()})
        match answer:
            case {"profile": dict(profile)}:
                return profile
            case {"untraceable": str(reason)}:
                return Untraceable(f"model '{model.name}': memory is not predicted: {reason}")
            case {"input": str(reason)}:
                return InputError(f"model '{model.name}': {reason}")
        assert isinstance(answer, EnvironmentFault), answer
        return answer

    def answer(self, question: dict[str, Any]) -> dict[str, Any] | EnvironmentFault:
        """Return the answer to a question, or why there is none."""
        with self.deadline(_DEADLINE_SECONDS) as timer:
            self.ask(question)
            said = self.next_line(bytes_max=_ANSWER_BYTES_MAX)
            is_late = not timer.is_alive()
        try:
            answer = json.loads(said)
        except ValueError:
            answer = None
        match answer:
            case (
                {"profile": dict()} | {"layers": list()} | {"untraceable": str()} | {"input": str()}
            ):
                return dict(answer)
        if said.endswith(b"\n") or len(said) == _ANSWER_BYTES_MAX:
            text = said[:200].decode(errors="replace").rstrip("\n")
            return EnvironmentFault(f"{self.name} said what is no answer: {text!r}")
        end = self.end(patience=_LAST_MOMENT_SECONDS)
        how = "it closed its pipe"
        if not end.was_killed:
            how = f"it ended with {end}"
        elif is_late:
            how = "it took too long"
        return EnvironmentFault(f"{self.name} gave no answer: {how}{self.last_words()}")


_left: list[_Child] = []
"""Children that read a model's layers; its structures are asked of them next, as a rule."""


def _idle_child(idle: list[_Child]) -> _Child | None:
    """Return one of the children that still runs; None where none does."""
    while idle:
        child = idle.pop()
        if not child.process.has_ended():
            return child
        # With the thread that started it, or by somebody's hand.
        child.close()
    return None


def _end(children: list[_Child]) -> None:
    while children:
        children.pop().close()
