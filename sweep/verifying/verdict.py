"""Owns the judgement: what a run reached beside what was recorded, and what may explain the rest.

Pure values. Knows nothing of how anything was run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reports import units
from storage.reading import changed_versions
from sweep.verifying.record import Record

SPEED_TOLERANCE = 0.05
"""Of tokens/s at the median step, either way."""
MEMORY_TOLERANCE = 0.02
"""Of peak allocated bytes, either way."""


@dataclass(frozen=True)
class Reached:
    """What a run did."""

    steps: int
    tokens_per_second: float
    """That carry loss, at the median step."""
    peak_allocated_bytes: int | None
    """None where nothing counted it, as nothing does for a script on a CPU."""
    notes: tuple[str, ...] = ()
    """What else differs from what was measured, in words."""


@dataclass(frozen=True)
class Compared:
    """One figure, recorded and reached."""

    promised: float
    reached: float | None
    tolerance: float

    @property
    def ratio(self) -> float | None:
        """Reached over promised; None where nothing was reached that can be compared."""
        return None if self.reached is None else self.reached / self.promised

    @property
    def is_within(self) -> bool:
        """Whether it is within the tolerance, or not comparable."""
        return self.ratio is None or abs(self.ratio - 1.0) <= self.tolerance

    def to_json(self) -> dict[str, float | None]:
        """Return what programs read."""
        return {"promised": self.promised, "reached": self.reached, "ratio": self.ratio}


@dataclass(frozen=True)
class Verification:
    """How a run compares with its record."""

    label: str
    kind: str
    steps: int
    speed: Compared
    memory: Compared
    differences: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether both figures are what was recorded."""
        return self.speed.is_within and self.memory.is_within

    def to_json(self) -> dict[str, Any]:
        """Return the document that `sweep verify --json` prints."""
        return {
            "ok": self.ok,
            "what": self.label,
            "run": self.kind,
            "steps": self.steps,
            "tokens_per_second": self.speed.to_json(),
            "peak_allocated_bytes": self.memory.to_json(),
            "differences": list(self.differences),
        }


def judge(record: Record, reached: Reached, *, environment: Mapping[str, Any]) -> Verification:
    """Return how a run compares with what was recorded.

    Args:
        record: what was measured.
        reached: by the run.
        environment: this machine's fingerprint.
    """
    speed = Compared(record.tokens_per_second, reached.tokens_per_second, SPEED_TOLERANCE)
    memory = Compared(
        float(record.peak_allocated_bytes), reached.peak_allocated_bytes, MEMORY_TOLERANCE
    )
    differences = (*_off(speed, memory), *_elsewhere(record, environment), *reached.notes)
    return Verification(
        label=record.label,
        kind=record.kind,
        steps=reached.steps,
        speed=speed,
        memory=memory,
        differences=differences,
    )


def _off(speed: Compared, memory: Compared) -> Iterator[str]:
    """Yield which figure is not what was recorded, and by how much."""
    if not speed.is_within and speed.ratio is not None:
        yield (
            f"tokens/s {_apart(speed.ratio)} the record: {units.rate(speed.reached)} beside "
            f"{units.rate(speed.promised)}"
        )
    if not memory.is_within and memory.ratio is not None:
        yield (
            f"peak allocated {_apart(memory.ratio)} the record: {units.gib(memory.reached)} beside "
            f"{units.gib(memory.promised)}"
        )


def _apart(ratio: float) -> str:
    return f"{100 * abs(ratio - 1.0):.1f} % {'above' if ratio > 1.0 else 'below'}"


def _elsewhere(record: Record, environment: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs between here and where it was measured."""
    known = {
        key: environment.get(key)
        for key in ("gpu", "driver", "cuda_driver", "python", "commit")
        if record.environment.get(key) is not None
    }
    recorded = record.environment.get("versions") or {}
    versions = environment.get("versions") or {}
    known["versions"] = {name: versions.get(name) for name in recorded}
    narrowed = {key: record.environment.get(key) for key in known} | {"versions": recorded}
    yield from changed_versions(narrowed, known)
    for flag in record.flags:
        if flag in _FLAGS:
            yield f"the record is flagged {flag}: {_FLAGS[flag]}"
    if not record.is_confirmed:
        yield "the record was measured once: `sweep confirm` measures it again"


_FLAGS = {
    "noisy": "its steps varied, so its speed is uncertain",
    "throttled": "the card was slowed down as it was measured",
    "neighbour": "something else used the card as it was measured",
    "accumulation_extrapolated": "a part of its accumulation was derived",
    "round_extrapolated": "its speed was derived from micro-batches of other sizes",
}
