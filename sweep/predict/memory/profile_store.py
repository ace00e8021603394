"""Owns where the profiles of a model's structures come from: a cache on disk, or whoever traces.

What cannot be traced is remembered, and what a dying process said of the machine. Knows nothing of
predictions, or of how tracing processes are spoken to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.models import ModelSpec
from storage import files
from sweep.predict.memory.mixing import mixed
from sweep.predict.memory.profiles import Profile, Structure, Untraceable
from sweep.predict.memory.tracing_children import Tracer

_ROOT = Path(__file__).parents[3]
_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
TRACED_BY = ("search_spaces", "sweep/predict/memory", "sweep/training")
"""Directories whose code the tracing child runs; a profile is of no use once any of it changes."""
_ATTEMPTS = 2
"""Times that a structure is traced whose tracing process dies; each time in a new process."""
_DEAD_STRUCTURES_MAX = 3
"""Structures in a row that no process survived, after which no other one is tried."""
OnProgress = Callable[[int, int], None]
"""Told how many structures are done, of how many."""


def _counted_from(done: int, of: int, on_progress: OnProgress) -> Callable[[int], None]:
    return lambda more: on_progress(done + more, of)


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
        if (known := self.find(structure)) is not None:
            return known
        if structure.is_mixed:
            return _put_together(structure, *map(self.get, structure.parts()))
        in_bf16 = structure.in_bf16()
        if in_bf16 is not None and (shared := self.get(in_bf16)).is_same_in_fp16:
            return shared
        return self._trace(structure)

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
            parts = tuple(map(self.find, structure.parts()))
            return None if None in parts else _put_together(structure, *filter(None, parts))
        in_bf16 = structure.in_bf16()
        shared = None if in_bf16 is None else self._read(in_bf16)
        is_shared = shared is not None and shared.is_same_in_fp16
        return shared if is_shared else self._read(structure)

    def _read(self, structure: Structure) -> Profile | None:
        """Return what was traced of exactly this structure, by this process or another."""
        if structure in self._profiles:
            return self._profiles[structure]
        try:
            values = json.loads(self._path(structure).read_text(encoding="utf-8"))
            return Profile.from_json(values)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def fetch(self, structures: Iterable[Structure], *, on_progress: OnProgress) -> None:
        """Trace what is not there yet of structures that will be asked for, several at once.

        `get` refuses those that cannot be traced.

        Args:
            structures: of one space, say.
            on_progress: told before the first one and after each; of nothing where all are there.

        Raises:
            EnvironmentFault: the tracing process has never answered.
        """
        wanted = [part for structure in structures for part in structure.parts()]
        self._fetch([s.in_bf16() or s for s in wanted], on_progress)
        # What tells the two 16-bit types apart has to be traced in both.
        self._fetch(wanted, on_progress)

    def _fetch(self, structures: Iterable[Structure], on_progress: OnProgress) -> None:
        wanted = [s for s in dict.fromkeys(structures) if not self._is_settled(s)]
        missing = wanted
        while missing and self._dead_structures < _DEAD_STRUCTURES_MAX:
            done = len(wanted) - len(missing)
            died = self._trace_together(missing, _counted_from(done, len(wanted), on_progress))
            # Alone, it is tried again and given up as any other.
            for structure in died:
                with contextlib.suppress(InputError):
                    self.get(structure)
            missing = [s for s in wanted if not self._is_settled(s)]

    def _trace_together(
        self, structures: list[Structure], on_done: Callable[[int], None]
    ) -> list[Structure]:
        """Trace structures, and return those whose process died.

        Where as many die as may in a row, the rest is left for later: it is likely the machine.
        """
        done = 0
        died: list[Structure] = []
        on_done(done)
        # Closed at once, as what is still being traced has a process of its own.
        with contextlib.closing(self._tracer.trace_all(self._model, structures)) as answers:
            for structure, answer in answers:
                if isinstance(answer, EnvironmentFault):
                    died.append(structure)
                    if len(died) == _DEAD_STRUCTURES_MAX:
                        break
                else:
                    self._note(structure, answer)
                    done += 1
                    on_done(done)
        return died

    def _is_settled(self, structure: Structure) -> bool:
        """Whether `get` would trace nothing."""
        is_refused = structure in self._refused or structure.in_bf16() in self._refused
        return is_refused or self.find(structure) is not None

    def _trace(self, structure: Structure) -> Profile:
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
                self._note(structure, error)
                raise
            except EnvironmentFault as error:
                fault = error
            else:
                self._note(structure, values)
                return self._profiles[structure]
        self._dead_structures += 1
        reason = f"model '{self._model.name}' cannot be traced: {fault}"
        self._refused[structure] = Untraceable(reason)
        raise Untraceable(reason) if self._has_answered else EnvironmentFault(reason)

    def _note(self, structure: Structure, answer: dict[str, Any] | InputError) -> None:
        """Keep what a process answered; that it did says that processes work."""
        self._has_answered = True
        self._dead_structures = 0
        if isinstance(answer, InputError):
            self._refused[structure] = answer.with_traceback(None)
        else:
            write_cache(self._path(structure), answer)
            self._profiles[structure] = Profile.from_json(answer)

    def _path(self, structure: Structure) -> Path:
        return self._cache_dir / f"{self._digest(structure)}.json"

    def _digest(self, structure: Structure) -> str:
        parts = [self._model.fingerprint, structure.to_json(), tracing_fingerprint()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _put_together(structure: Structure, packed: Profile, wide: Profile) -> Profile:
    layers = len(packed.positions)
    return mixed(packed, wide, quantized=structure.config.quantized_layers(layers))


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
