"""Owns finding the most that is alive at once in a step, and what it consists of.

Knows nothing of reserved memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from sweep.predict.memory.allocator import SMALL_BYTES, CachingAllocator, rounded
from sweep.predict.memory.reserved import base_allocator, wasted_bytes
from sweep.predict.memory.step import Amounts, Step

PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "loss")

_VARYING = ("gradients", "activations", "loss")


@dataclass(frozen=True)
class Peak:
    """The most that is alive at once."""

    moment: str
    """``forward``, ``loss``, ``backward`` or ``optimizer``."""
    parts: Amounts
    """Every one of `PARTS`."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def find_peak(step: Step) -> Peak:
    """Return a step's peak."""
    there = _there_throughout(step)
    moment, alive = _highest(step)
    if not all(step.flags):
        # What layers keep is hundreds of blocks, each of which may hold up to a MiB too much. A
        # recomputed layer keeps one, so that it is not worth a replay.
        alive["activations"] += wasted_bytes(step)
    passing = Peak(moment, {part: there[part] + alive.get(part, 0) for part in PARTS})
    # The update needs every gradient, and next to nothing else.
    update = Peak("optimizer", {**there, "gradients": there["adapters"]})
    return max(passing, update, key=lambda peak: peak.total_bytes)


def _there_throughout(step: Step) -> Amounts:
    allocator = base_allocator(step)
    base = allocator.allocated_bytes
    adapters = _taken(allocator, step.adapters)
    gradients = _taken(allocator, step.adapters) if step.accumulates else 0
    return {
        "weights": base - step.workspace_bytes,
        "adapters": adapters,
        "gradients": gradients,
        "optimizer": _taken(allocator, step.states),
        "activations": step.workspace_bytes,
        "loss": 0,
    }


def _taken(allocator: CachingAllocator, sizes: list[int]) -> int:
    """Return what blocks of these sizes take."""
    before = allocator.allocated_bytes
    for size in sizes:
        if size > SMALL_BYTES:
            allocator.allocate(size)
    small = sum(rounded(size) for size in sizes if size <= SMALL_BYTES)
    return allocator.allocated_bytes - before + small


def _highest(step: Step) -> tuple[str, Amounts]:
    """Return when the most comes and goes, and how much of it is alive then."""
    alive = dict.fromkeys(_VARYING, 0)
    moment, best, best_total = "forward", dict(alive), -1
    known: dict[tuple[str, bool], tuple[Amounts, list[Amounts]]] = {}
    for visit in step.visits():
        key = (visit.name, visit.is_checkpointed)
        if key not in known:
            known[key] = (step.kept(visit), step.humps(visit))
        kept, humps = known[key]
        total = sum(alive.values())
        for hump in humps:
            if total + sum(hump.values()) > best_total:
                best_total = total + sum(hump.values())
                best = {part: alive[part] + hump.get(part, 0) for part in _VARYING}
                moment = visit.moment
        for part in _VARYING:
            if part != "gradients" or not step.accumulates:
                alive[part] += kept.get(part, 0)
    return moment, best
