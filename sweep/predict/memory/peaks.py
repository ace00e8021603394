"""The most that is alive at once in a step, of many steps at a time.

What is alive is a sum, so that a few polynomials for each segment give its peak at once; with an
array for each symbol they give it of all configurations of a structure. What the allocator does not
split off comes on top (`sweep.predict.memory.replay`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sweep.predict.memory.allocator import GRAIN_BYTES, SMALL_BYTES, grains
from sweep.predict.memory.profiles import ACTIVATIONS, GRADIENTS, VARYING
from sweep.predict.memory.replay import Step, Visit, base_allocator

PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "loss")
"""What a peak is made of, in the order it is shown."""

_ROWS = [PARTS.index(part) for part in VARYING]
_MOMENTS = ("forward", "loss", "backward")
_MOMENT_OF = {"embed": "forward", "head": "loss", "head_backward": "loss"}
_LENGTHY = 4096
"""Bytes a token are a few thousand times this at most, and as many times its length."""
_WIDE = 2**48
"""Tokens by length from which a sum may not go into 64 bits."""
_NEVER = -(2**60)
"""A rise that makes no peak."""
_BESIDE = {"embed": 0, "head": -1, "head_backward": -1}
"""The layer whose kind decides over a segment that happens once."""

Bytes = NDArray[Any]
"""Whole numbers, 64 bits wide or as wide as it takes."""


@dataclass(frozen=True, eq=False)
class Peaks:
    """The most that is alive at once in each of many steps. Rows are `PARTS`."""

    there: Bytes
    """What is alive throughout."""
    passing: Bytes
    """The same, with the most that comes and goes."""
    passing_moments: NDArray[np.int8]

    def wasting(self, wasted_bytes: Bytes) -> Peaks:
        """Return the peaks with so much that blocks hold beyond what was asked for."""
        passing = self.passing.copy()
        passing[_ROWS[ACTIVATIONS]] += wasted_bytes
        return replace(self, passing=passing)

    def at(self, row: int) -> Peaks:
        """Return the peak of one step alone."""
        one = slice(row, row + 1)
        return Peaks(self.there[:, one], self.passing[:, one], self.passing_moments[one])

    @cached_property
    def parts(self) -> Bytes:
        """What each peak is made of."""
        # The update needs every gradient, and next to nothing else.
        update = self.there.copy()
        update[_ROWS[GRADIENTS]] = self.there[PARTS.index("adapters")]
        return np.where(update.sum(axis=0) > self.passing.sum(axis=0), update, self.passing)

    @cached_property
    def total_bytes(self) -> Bytes:
        """Bytes of all parts."""
        return np.asarray(self.parts.sum(axis=0))

    def breakdown(self, row: int) -> dict[str, int]:
        """Return the parts of one step's peak."""
        return dict(zip(PARTS, self.parts[:, row].tolist(), strict=True))

    def moment(self, row: int) -> str:
        """Return when one step's peak is: ``forward``, ``loss``, ``backward``, ``optimizer``."""
        is_update = self.total_bytes[row] > self.passing[:, row].sum()
        return "optimizer" if is_update else _MOMENTS[self.passing_moments[row]]


def find_peaks(steps: Sequence[Step]) -> Peaks:
    """Return the peak of each step, as if every block were as large as what was asked for.

    Steps that share their profiles are worked out together.
    """
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, step in enumerate(steps):
        alike[tuple(map(id, step.profiles.values()))].append(row)
    width = _width(steps)
    there, passing = (np.zeros((len(PARTS), len(steps)), width) for _ in range(2))
    moments = np.zeros(len(steps), np.int8)
    known: dict[Hashable, list[int]] = {}
    for rows in alike.values():
        walk = _Walk([steps[row] for row in rows], width)
        there[:, rows] = np.array([_resident(steps[row], known) for row in rows], width).T
        moments[rows], passing[np.ix_(_ROWS, rows)] = walk.highest()
    return Peaks(there, passing + there, moments)


def _width(steps: Sequence[Step]) -> Any:
    batch, length = (max((step.values[key] for step in steps), default=0) for key in "bs")
    return np.int64 if batch * length * max(length, _LENGTHY) < _WIDE else object


def _resident(step: Step, known: dict[Hashable, list[int]]) -> list[int]:
    """Return the bytes of each of `PARTS` that are there throughout; many steps have the same
    adapters, and many structures the same base."""
    config, profile = step.config, step.profile
    key = (
        (profile.base, profile.adapters, profile.positions),
        (config.lora_rank, config.adapter_dtype, config.optimizer, config.expandable_segments),
        (config.is_sharded and config.data_parallel, step.workspace_bytes, step.held_gradients),
    )
    if key not in known:
        expands, allocator = config.expandable_segments, base_allocator(step)

        def taken(sizes: Sequence[int]) -> int:
            """Return what blocks of these sizes take: no small one holds more than was asked for,
            and none does where segments expand."""
            before = allocator.allocated_bytes
            large = [size for size in sizes if size > SMALL_BYTES and not expands]
            allocator.run([(grains(size), 0) for size in large], [0])
            exact = sum(grains(size) for size in sizes if size <= SMALL_BYTES or expands)
            return exact * GRAIN_BYTES + allocator.allocated_bytes - before

        known[key] = [
            profile.base.requested_bytes if expands else profile.base.allocated_bytes,
            taken(step.adapters),
            sum(taken(step.adapters) for _ in range(step.held_gradients)),
            taken(step.states),
            step.workspace_bytes,
            0,
        ]
    return known[key]


class _Walk:
    """Steps whose layers are of the same structures, gone through segment by segment.

    Args:
        steps: with the same profiles; they differ in their sizes and in what is recomputed.
        width: of the numbers.
    """

    def __init__(self, steps: Sequence[Step], width: Any) -> None:
        self._steps, self._width = steps, width
        self._profiles = steps[0].profiles
        self._flags = np.array([step.flags for step in steps], np.bool_)
        self._columns = {flag: self._scaled(flag) for flag in self._profiles}
        self._known: dict[tuple[str, bool], tuple[Bytes, Bytes, Bytes]] = {}

    def _scaled(self, is_checkpointed: bool) -> Bytes:
        """Return what each monomial comes to in each step: once, and with each traced layer that
        has it, as often as there are layers of its kind."""
        profile = self._profiles[is_checkpointed]
        values = {
            symbol: np.array([step.values[symbol] for step in self._steps], self._width)
            for symbol in self._steps[0].values
        }
        once = np.ones(len(self._steps), self._width)
        monomials = np.array(profile.scale(values, one=once), self._width)
        stands = np.equal.outer(np.arange(len(profile.adapters)), profile.positions)
        repeats = stands.astype(int) @ (self._flags == is_checkpointed).T.astype(int)
        return np.asarray(np.array([once, *repeats.astype(self._width)])[:, None] * monomials)

    def highest(self) -> tuple[NDArray[np.int8], Bytes]:
        """Return when the most comes and goes, and how much of it is alive then: `VARYING`."""
        shape = (len(VARYING), len(self._steps))
        alive, best = np.zeros(shape, self._width), np.zeros(shape, self._width)
        most = np.full(len(self._steps), -1, self._width)
        moments = np.zeros(len(self._steps), np.int8)
        # Gradients that earlier micro-batches have left are there throughout.
        accumulates = np.array([step.held_gradients > 0 for step in self._steps], np.bool_)
        for visit in self._steps[0].visits():
            kept, rise, parts = self._visited(visit)
            total = alive.sum(axis=0) + rise
            is_higher = np.asarray(total > most, np.bool_)
            np.copyto(most, total, where=is_higher)
            np.copyto(best, alive + parts, where=is_higher)
            kind = visit.name.partition(" ")[0]
            moments[is_higher] = _MOMENTS.index(_MOMENT_OF.get(kind, kind))
            kept = kept.copy()
            kept[GRADIENTS, accumulates] = 0
            alive += kept
        return moments, best

    def _visited(self, visit: Visit) -> tuple[Bytes, Bytes, Bytes]:
        """Return what a segment leaves, how high it rises, and what of, in each step."""
        flags = self._flags[:, _BESIDE.get(visit.name, visit.layer)]
        if flags.all() or not flags.any():
            return self._of(visit.name, bool(flags[0]))
        both = zip(self._of(visit.name, True), self._of(visit.name, False), strict=True)
        kept, rise, parts = (np.where(flags, *pair) for pair in both)
        return kept, rise, parts

    def _of(self, name: str, is_checkpointed: bool) -> tuple[Bytes, Bytes, Bytes]:
        """Return the same for a segment of one profile."""
        key = name, is_checkpointed
        if key not in self._known:
            kept, peaks = self._profiles[is_checkpointed].accounts[name]
            columns = self._columns[is_checkpointed]
            left = np.tensordot(kept, columns[: kept.shape[1]], 2)
            # A profile has layers of one kind only. What a segment that happens once (embedding,
            # head) lets go of for each layer of the other kind stands in the other's profile.
            for flag, profile in self._profiles.items():
                if flag != is_checkpointed:
                    repeated = profile.accounts[name][0][:, 1:]
                    further = self._columns[flag][1 : repeated.shape[1] + 1]
                    left = left + np.tensordot(repeated, further, 2)
            if len(peaks):
                parts = np.tensordot(peaks, columns[: peaks.shape[2]], 2)
                totals = parts.sum(axis=1)
                first = totals.argmax(axis=0), np.arange(len(self._steps))
                self._known[key] = left, totals[first], parts[first[0], :, first[1]].T
            else:
                never = np.full(len(self._steps), _NEVER, self._width)
                self._known[key] = left, never, np.zeros_like(left)
        return self._known[key]
