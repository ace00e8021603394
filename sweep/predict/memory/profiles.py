"""Owns what is known of a structure's memory, and where that comes from: disk or the tracing child.

A structure is what of a configuration decides which tensors exist; batch, length, rank and number
of steps only scale them. Knows nothing of predictions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from search_spaces.config import TrialConfig, parse_config
from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.knobs import KNOBS
from search_spaces.models import ModelSpec
from sweep.predict.memory.polynomials import Polynomial

Account = dict[str, Polynomial]
"""Polynomial by purpose; ``activations 2`` is added once for each layer that layer 2 stands for."""

_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
_ATTEMPTS = 2
"""Times that a structure is traced whose tracing process dies; each time in a new process."""
_BUILT_BY = ("model", "matrices", "adapters")
_TRACED_BY = ("tracing/*.py", "trace.py", *(f"../../training/{n}.py" for n in _BUILT_BY))


class Untraceable(InputError):  # noqa: N818 - the name says what happened
    """The model's code cannot be walked without data; the message names the module and why."""


@dataclass(frozen=True)
class Structure:
    """What of a configuration decides which tensors exist."""

    config: TrialConfig
    """A configuration that has it: what only scales tensors is the recipe's, and all decoder layers
    are recomputed or none; both together give what lies between.
    """
    has_flash: bool
    """Whether the card has flash attention."""
    is_long: bool = False
    """Whether the sequence passes the attention window, so that a mask has to exist."""

    @classmethod
    def of(
        cls,
        config: TrialConfig,
        *,
        is_checkpointed: bool,
        has_flash: bool = True,
        is_long: bool = False,
    ) -> Structure:
        """Return a configuration's structure, with all layers recomputed or none."""
        shaping = {
            key: knob.traced(getattr(config, key)) for key, knob in KNOBS.items() if knob.traced
        }
        # Without quantization there are no constants to quantize.
        shaping["double_quant"] &= config.quantization != "none"
        shaping["checkpoint_fraction"] = float(is_checkpointed)
        return cls(TrialConfig.model_construct(**shaping), has_flash, is_long)

    @property
    def is_checkpointed(self) -> bool:
        """Whether all decoder layers are recomputed."""
        return self.config.checkpoint_fraction > 0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**vars(self), "config": self.config.model_dump(mode="json")}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Structure:
        """Read what `to_json` wrote."""
        return cls(**{**values, "config": parse_config(values["config"])})


BIRTH, DEATH, LEAVE, FETCH, FETCH_ALL = range(5)
"""What happens in a segment: a temporary is born, or dies; something is left for a later segment;
what an earlier one left dies, in one layer or in all.
"""

Entry = tuple[int, int | str, int]
"""What happens, to what (a temporary's number or a path), and the index of the size that is born or
the layers that what dies lived through.
"""


@dataclass(frozen=True)
class Segment:
    """A stretch of a training step."""

    kept: Account
    """How much more is alive at its end than at its beginning."""
    humps: tuple[Account, ...]
    """How high it can rise above its beginning: its moments that are the highest at some size."""
    tape: tuple[Entry, ...]
    """Its births and deaths in order."""

    @cached_property
    def repeated(self) -> Account:
        """The part of `kept` that each layer adds."""
        return {key: part for key, part in self.kept.items() if " " in key}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Segment:
        """Read what the tracing child writes."""
        return cls(
            kept=values["kept"],
            humps=tuple(values["humps"]),
            tape=tuple((what, key, value) for what, key, value in values["tape"]),
        )


@dataclass(frozen=True)
class Base:
    """The frozen base on the card."""

    allocated_bytes: int
    """What its tensors take, remainders that the allocator does not split off included."""
    reserved_bytes: int
    """The segments that hold it."""
    holes: tuple[int, ...]
    """Free blocks within those segments."""


@dataclass(frozen=True)
class Profile:
    """A structure's memory over one step, for every batch, length and rank."""

    positions: tuple[int, ...]
    """For each decoder layer, the traced layer that stands for it."""
    base: Base
    adapters: tuple[tuple[int, ...], ...]
    """Elements of every trained tensor for each unit of rank, by traced layer, as attached."""
    segments: dict[str, Segment]
    """``embed``, ``forward 0``..., ``head``, ``head_backward``, ``backward 0``..., as traced."""
    sizes: tuple[Polynomial, ...]
    """Bytes, by the tapes' index."""
    window: int | None
    """Length from which the structure is another one; None where there is none."""
    quantized_share: float | None = None
    """Of the weights that QLoRA means to hold in 4 bits, how many are; None for a 16-bit base."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Profile:
        """Read what the tracing child writes."""
        base = values["base"]
        return cls(
            positions=tuple(values["positions"]),
            base=Base(base["allocated_bytes"], base["reserved_bytes"], tuple(base["holes"])),
            adapters=tuple(map(tuple, values["adapters"])),
            segments={n: Segment.from_json(part) for n, part in values["segments"].items()},
            sizes=tuple(values["sizes"]),
            window=values["window"],
            quantized_share=values.get("quantized_share"),
        )


class Tracer(Protocol):
    """Traces structures of a model. Real: `sweep.predict.memory.tracing_process.TracingChild`."""

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

    def get(self, structure: Structure) -> Profile:
        """Return a structure's profile.

        What cannot be traced is not tried again: it is refused at once, with the same reason.
        Raises what `Tracer.trace` raises.
        """
        if structure in self._refused:
            # A new exception each time, as one that is raised twice keeps the frames of both.
            refused = self._refused[structure]
            raise type(refused)(*refused.args)
        if structure not in self._profiles:
            self._profiles[structure] = Profile.from_json(self._read_or_trace(structure))
        return self._profiles[structure]

    def _read_or_trace(self, structure: Structure) -> dict[str, Any]:
        path = self._cache_dir / f"{self._digest(structure)}.json"
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            values = self._trace(structure)
        keep(path, values)
        return values

    def _trace(self, structure: Structure) -> dict[str, Any]:
        """Trace a structure, and remember where that cannot work.

        A process that dies of it once may have been the machine's fault, so it is tried again. One
        that always does is the structure's: it has no profile from then on, so that others can go
        on. Where no other was ever answered, the machine's fault is told first.
        """
        for _ in range(_ATTEMPTS):
            try:
                values = self._tracer.trace(self._model, structure)
            except InputError as error:
                self._has_answered = True
                self._refused[structure] = error.with_traceback(None)
                raise
            except EnvironmentFault as error:
                fault = error
            else:
                self._has_answered = True
                return values
        refused = Untraceable(f"model '{self._model.name}' cannot be traced: {fault}")
        self._refused[structure] = refused
        raise refused if self._has_answered else fault

    def _digest(self, structure: Structure) -> str:
        parts = [self._model.fingerprint, structure.to_json(), tracing_fingerprint()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def keep(path: Path, values: dict[str, Any]) -> None:
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
    digest = hashlib.sha256("".join(map(_version, _LIBRARIES)).encode())
    here = Path(__file__).parent
    for pattern in _TRACED_BY:
        for path in sorted(here.glob(pattern)) if "*" in pattern else [here / pattern]:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(library: str) -> str:
    try:
        return f"{library} {version(library)};"
    except PackageNotFoundError:
        return f"{library};"
