"""The judgement: whether what a run reached is what was recorded, and what differs.

Pure values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sweep.export.record import Record
from sweep.finetuning.beside import Compared, behind, compared_memory, compared_speed, off


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


_MISSED = (
    "the peak is lower and not compared: a script's few steps on padded texts may meet none of the "
    "longest rows"
)


def _may_have_missed_the_longest(record: Record) -> bool:
    """Whether a run takes the rows of texts as they come: ours begins with the widest."""
    is_padded = record.texts is not None and record.config.packing != "packed"
    return record.kind != "training" and is_padded


def judge(record: Record, reached: Reached, *, environment: Mapping[str, Any]) -> Verification:
    """Return how a run compares with what was recorded.

    Args:
        record: what was measured.
        reached: by the run.
        environment: this machine's fingerprint.
    """
    speed = compared_speed(record.measurement.tokens_per_second, reached.tokens_per_second)
    memory = compared_memory(record.measurement.peak_allocated_bytes, reached.peak_allocated_bytes)
    notes = reached.notes
    if _may_have_missed_the_longest(record) and memory.is_below:
        memory, notes = (
            compared_memory(record.measurement.peak_allocated_bytes, None),
            (*notes, _MISSED),
        )
    elsewhere = behind(
        record.environment,
        environment,
        flags=record.measurement.flags,
        is_confirmed=record.confirmed,
    )
    differences = (*off(speed, memory), *elsewhere, *notes)
    return Verification(
        label=record.label,
        kind=record.kind,
        steps=reached.steps,
        speed=speed,
        memory=memory,
        differences=differences,
    )
