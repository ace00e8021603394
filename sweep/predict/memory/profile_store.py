"""The profiles of a model's structures: from a cache on disk, or traced."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.models import ModelSpec
from storage import files
from sweep.predict.memory.derived import mixed
from sweep.predict.memory.profiles import Profile, Structure, Untraceable
from sweep.predict.memory.tracing_children import Traced, Tracer

_ROOT = Path(__file__).parents[3]
_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
TRACED_BY = ("search_spaces", "sweep/predict/memory", "sweep/training")
"""Directories whose code the tracing child runs; a profile is of no use once any of it changes."""
_ATTEMPTS = 2
"""Times that a structure is traced whose tracing process dies; each time in a new process."""
_FAULTS_MAX = 3 * _ATTEMPTS
"""Times in a row that a tracing process may die before nothing is traced any more: each may take
minutes to die, and a study would ask for hundreds."""
OnProgress = Callable[[int, int], None]
"""Told how many structures are done, of how many."""


def tell_nobody(_done: int, _of: int) -> None:
    """Hear of no progress."""


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
