"""Owns where the profiles of a model's structures come from: a cache on disk, or the tracing child.

The child is started at the first question, asked in JSON lines, and gone with its owner. It is
where torch and transformers are imported; this process never does. Knows nothing of predictions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import weakref
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Protocol

from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.models import ModelSpec
from sweep.predict.memory.mixing import mixed
from sweep.predict.memory.profiles import Profile, Structure, Untraceable

_ROOT = Path(__file__).parents[3]
_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
TRACED_BY = ("search_spaces", "sweep/predict/memory", "sweep/training")
"""Directories whose code the tracing child runs; a profile is of no use once any of it changes."""
_ATTEMPTS = 2
"""Times that a structure is traced whose tracing process dies; each time in a new process."""
_DEAD_STRUCTURES_MAX = 3
"""Structures in a row that no process survived, after which no other one is tried."""
_COMMAND = (sys.executable, "-P", "-m", "sweep.predict.memory.tracing")
_DEADLINE_SECONDS = 120.0
"""For one structure, the imports included; a slow disk makes those take most of a minute."""


class Tracer(Protocol):
    """Traces structures of a model. Real: `TracingChild`."""

    def trace(self, model: ModelSpec, structure: Structure) -> dict[str, Any]:
        """Return the structure's profile as JSON values.

        Raises:
            Untraceable: the model's code cannot be walked.
            InputError: the model's config cannot be built.
            EnvironmentFault: the child does not answer.
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
        self._dead_structures = 0

    def get(self, structure: Structure) -> Profile:
        """Return a structure's profile.

        What cannot be traced is not tried again: it is refused at once, with the same reason.
        Raises what `Tracer.trace` raises, and `EnvironmentFault` only as long as the tracing
        process has never answered.
        """
        if structure in self._refused:
            # A new exception each time, as one that is raised twice keeps the frames of both.
            refused = self._refused[structure]
            raise type(refused)(*refused.args)
        if structure not in self._profiles:
            self._profiles[structure] = self._put_together(structure)
        return self._profiles[structure]

    def _put_together(self, structure: Structure) -> Profile:
        if not structure.is_mixed:
            return Profile.from_json(self._read_or_trace(structure))
        packed, wide = map(self.get, structure.parts())
        layers = len(packed.positions)
        return mixed(packed, wide, quantized=structure.config.quantized_layers(layers))

    def _read_or_trace(self, structure: Structure) -> dict[str, Any]:
        path = self._cache_dir / f"{self._digest(structure)}.json"
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            values = self._trace(structure)
        write_cache(path, values)
        return values

    def _trace(self, structure: Structure) -> dict[str, Any]:
        """Trace a structure, and remember where that cannot work.

        A process that dies of it once may have been the machine's fault, so it is tried again. One
        that always does is the structure's: it has no profile from then on, so that others can go
        on. Where several in a row end like that, nothing else is started: each may take minutes to
        die, and a study would ask for hundreds. Where no structure was ever answered, it is said
        first that the machine is at fault.
        """
        if self._dead_structures == _DEAD_STRUCTURES_MAX:
            *_, last = self._refused.values()
            raise Untraceable(*last.args)
        for _ in range(_ATTEMPTS):
            try:
                values = self._tracer.trace(self._model, structure)
            except InputError as error:
                self._refused[structure] = error.with_traceback(None)
                self._note_answer()
                raise
            except EnvironmentFault as error:
                fault = error
            else:
                self._note_answer()
                return values
        self._dead_structures += 1
        reason = f"model '{self._model.name}' cannot be traced: {fault}"
        self._refused[structure] = Untraceable(reason)
        raise Untraceable(reason) if self._has_answered else EnvironmentFault(reason)

    def _note_answer(self) -> None:
        self._has_answered = True
        self._dead_structures = 0

    def _digest(self, structure: Structure) -> str:
        parts = [self._model.fingerprint, structure.to_json(), tracing_fingerprint()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def write_cache(path: Path, values: dict[str, Any]) -> None:
    """Write into a cache, whole or not at all; one that cannot be written costs time only."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(values), encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()


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


class TracingChild:
    """A `Tracer` in a process of its own, in which torch and transformers are imported."""

    def __init__(self, command: tuple[str, ...] = _COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def trace(self, model: ModelSpec, structure: Structure) -> dict[str, Any]:
        """See `Tracer.trace`."""
        answer = self._ask({"model": model.to_json(), "structure": structure.to_json()})
        match answer:
            case {"profile": dict(profile)}:
                return profile
            case {"untraceable": str(reason)}:
                raise Untraceable(f"model '{model.name}': memory is not predicted: {reason}")
            case {"input": str(reason)}:
                raise InputError(f"model '{model.name}': {reason}")
        raise EnvironmentFault(f"the tracing process answered {str(answer)[:200]}")

    def close(self) -> None:
        """End the child. Idempotent; a later question starts a new one."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._errors = self._finalizer = None

    def _ask(self, question: dict[str, Any]) -> Any:
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = _read_line(process.stdout)
        except OSError:
            line = b""
        if not line:
            reason = self._last_words()
            self.close()
            raise EnvironmentFault(f"the tracing process gave no answer{reason}")
        return json.loads(line)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                # Ctrl-C in the terminal is this process's to handle.
                start_new_session=True,
            )
            self._finalizer = weakref.finalize(self, _end, self._process, self._errors)
        return self._process

    def _last_words(self) -> str:
        """Return the last line that the child wrote to its standard error."""
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


def _read_line(stream: IO[bytes]) -> bytes:
    """Return the next line; nothing where the deadline passes or the child has ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(_DEADLINE_SECONDS) else b""


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, errors):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
