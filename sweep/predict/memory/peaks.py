"""The most that is alive at once in a step, of many steps at a time.

What is alive is a sum, so that a few polynomials for each segment give its peak at once; with an
array for each symbol they give it of all configurations of a structure. What the allocator does not
split off comes on top (`sweep.predict.memory.replay`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.sweep.predict.memory.allocator import GRAIN_BYTES, SMALL_BYTES, grains
from qlora_sweep.sweep.predict.memory.profiles import GRADIENTS, VARYING, Profile
from qlora_sweep.sweep.predict.memory.replay import Step, base_allocator

PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "loss")
"""What a peak is made of, in the order it is shown."""
KNOWN_PARTS = ("weights", "adapters", "optimizer")
"""Those that are known exactly, as they are counted and not traced."""

_ROWS = [PARTS.index(part) for part in VARYING]
_MOMENTS = ("forward", "loss", "backward")
_MOMENT_OF = {"embed": "forward", "head": "loss", "head_backward": "loss"}
_LENGTHY = 4096
"""Bytes a token are a few thousand times this at most, and as many times its length."""
_WIDE = 2**48
"""Tokens by length from which a sum may not go into 64 bits."""
_AT_ONCE = 1024
"""Steps whose numbers take some MiB."""
_NEVER = -(2**62)
"""Bytes before a segment that no layer of a kind has."""
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

    @cached_property
    def _update(self) -> Bytes:
        """What is alive at the update, which needs every gradient and next to nothing else."""
        update = self.there.copy()
        update[_ROWS[GRADIENTS]] = self.there[PARTS.index("adapters")]
        return update

    def total_bytes(self, wasted_bytes: Bytes) -> Bytes:
        """Return each peak, with so much that blocks hold beyond what was asked for."""
        passing = self.passing.sum(axis=0) + wasted_bytes
        return np.asarray(np.maximum(self._update.sum(axis=0), passing))

    @cached_property
    def known_bytes(self) -> Bytes:
        """What of each peak is known exactly: weights, adapters and optimizer states."""
        return np.asarray(self.there[[PARTS.index(part) for part in KNOWN_PARTS]].sum(axis=0))

    def of(self, row: int, *, wasted_bytes: int = 0) -> tuple[dict[str, int], str]:
        """Return the parts of one step's peak, and when that is: ``forward``, ``loss``,
        ``backward`` or ``optimizer``."""
        passing, update = (
            dict(zip(PARTS, bytes_[:, row].tolist(), strict=True))
            for bytes_ in (self.passing, self._update)
        )
        passing["activations"] += wasted_bytes
        if sum(update.values()) > sum(passing.values()):
            return update, "optimizer"
        return passing, _MOMENTS[self.passing_moments[row]]


def alike(steps: Mapping[int, Step]) -> list[list[int]]:
    """Return the keys of steps that share their profiles, as many as are worked out together."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for key, step in steps.items():
        groups[tuple(map(id, step.profiles.values()))].append(key)
    return [
        every[start : start + _AT_ONCE]
        for every in groups.values()
        for start in range(0, len(every), _AT_ONCE)
    ]


def find_peaks(steps: Sequence[Step]) -> Peaks:
    """Return the peak of each of steps `alike`, as if every block were as large as what was asked
    for."""
    width = _width(steps)
    there = np.array([_resident(step) for step in steps], width).T
    moments, highest = _highest(steps, width)
    passing = there.copy()
    passing[_ROWS] += highest
    return Peaks(there, passing, moments)


def _width(steps: Sequence[Step]) -> Any:
    batch, length = (max((step.values[key] for step in steps), default=0) for key in "bs")
    return np.int64 if batch * length * max(length, _LENGTHY) < _WIDE else object


def _resident(step: Step) -> list[int]:
    """Return the bytes of each of `PARTS` that are there throughout; many steps of the same
    profiles have the same adapters."""
    config = step.config
    sharded = config.is_sharded and config.data_parallel
    trained = config.lora_rank, config.adapter_dtype, config.optimizer, sharded
    key = *trained, config.expandable_segments, step.workspace_bytes, step.held_gradients
    known: dict[Any, list[int]] = step.profile.worked_out
    if key not in known:
        known[key] = _worked_out_resident(step)
    return known[key]


def _worked_out_resident(step: Step) -> list[int]:
    """Return the bytes of each of `PARTS` that are there throughout.

    No small block holds more than was asked for, and none does where segments expand.
    """
    base = step.profile.base
    if step.config.expandable_segments:

        def taken(sizes: Sequence[int]) -> int:
            counts = Counter(sizes).items()
            return sum(grains(size) * count for size, count in counts) * GRAIN_BYTES

        weights = base.requested_bytes
    else:
        allocator = base_allocator(step)

        def taken(sizes: Sequence[int]) -> int:
            before = allocator.allocated_bytes
            large = [size for size in sizes if size > SMALL_BYTES]
            allocator.run([(grains(size), 0) for size in large], [0])
            counts = Counter(size for size in sizes if size <= SMALL_BYTES).items()
            small = sum(grains(size) * count for size, count in counts)
            return small * GRAIN_BYTES + allocator.allocated_bytes - before

        weights = base.allocated_bytes
    adapters = taken(step.adapters)
    gradients = sum(taken(step.adapters) for _ in range(step.held_gradients))
    return [weights, adapters, gradients, taken(step.states), step.workspace_bytes, 0]


def _highest(steps: Sequence[Step], width: Any) -> tuple[NDArray[np.int8], Bytes]:
    """Return when the most comes and goes in steps with the same profiles, and how much of it is
    alive then: `VARYING`.

    A segment peaks in the visit before which most is alive, so that of all visits of one segment in
    layers of one kind a single one is looked at. Of equal peaks it is the earliest.

    Args:
        steps: they differ in their sizes and in which layers are recomputed.
        width: of the numbers.
    """
    walk = _walk(steps[0])
    flags = np.array([step.flags for step in steps], np.bool_)  # (steps, layers)
    is_recomputed = flags[:, walk.layers].T  # (visits, steps)
    left = np.zeros((len(walk.layers), len(VARYING), len(steps)), width)
    risen: dict[bool, Bytes] = {}
    for flag, profile in steps[0].profiles.items():
        columns = _columns(steps, profile, flags == flag, width)
        ends = profile.ends[[profile.places[name] for name in walk.names]]
        once, repeated = ends[:, :, 0], ends[:, :, 1:]
        own = np.tensordot(once, columns[0], 1)[walk.segments]
        left += own * (is_recomputed == flag)[:, None]
        # What a segment that happens once (embedding, head) lets go of for each layer of one kind
        # stands in the profile of that kind, whichever the segment itself is of.
        left += np.tensordot(repeated, columns[1:], 2)[walk.segments]
        risen[flag] = np.tensordot(profile.births, columns, 2)  # (births, varying, steps)
    # Gradients that earlier micro-batches have left are there throughout.
    left[:, GRADIENTS, [step.held_gradients > 0 for step in steps]] = 0
    alive = left.cumsum(axis=0) - left  # (visits, varying, steps)
    alive_in_all = alive.sum(axis=1)  # (visits, steps)
    step = np.arange(len(steps))
    found_visits: list[NDArray[np.intp]] = []
    found_above: list[Bytes] = []
    found_totals: list[Bytes] = []
    for flag, above_of_all in risen.items():
        births_of = steps[0].profiles[flag].births_of
        for name, visits in walk.visits_of.items():
            is_own = is_recomputed[visits] == flag  # (visits of it, steps)
            before = np.where(is_own, alive_in_all[visits], _NEVER)
            first = before.argmax(axis=0)  # (steps,)
            above = above_of_all[births_of[name]]
            found_above.append(above)
            found_totals.append(before[first, step] + above.sum(axis=1))
            found_visits.append(np.broadcast_to(visits[first], (len(above), len(steps))))
    totals = np.concatenate(found_totals)  # (births, steps)
    visit = np.concatenate(found_visits)  # (births, steps)
    earliest = np.where(totals == totals.max(axis=0), visit, len(walk.layers))
    birth = earliest.argmin(axis=0)  # (steps,)
    at = visit[birth, step]
    above = np.concatenate(found_above)
    return walk.moments[at], (alive[at, :, step] + above[birth, :, step]).T


class _Walk(NamedTuple):
    """The segments of a step in the order in which they are visited."""

    names: Sequence[str]
    """Of the segments."""
    segments: NDArray[np.intp]
    """By visit, which of them it is."""
    layers: NDArray[np.intp]
    """By visit, the layer whose kind decides over it."""
    moments: NDArray[np.int8]
    """By visit, its place in `_MOMENTS`."""
    visits_of: Mapping[str, NDArray[np.intp]]
    """The visits of each segment."""


def _walk(step: Step) -> _Walk:
    """Return the visits of a step, which are the same for all steps of its profile."""
    known: _Walk | None = step.profile.worked_out.get(_Walk)
    if known is None:
        visits = list(step.visits())
        names = list(step.profile.segments)
        kinds = [visit.name.partition(" ")[0] for visit in visits]
        segments = np.array([names.index(visit.name) for visit in visits])
        known = _Walk(
            names=names,
            segments=segments,
            layers=np.array([_BESIDE.get(visit.name, visit.layer) for visit in visits]),
            moments=np.array(
                [_MOMENTS.index(_MOMENT_OF.get(kind, kind)) for kind in kinds], np.int8
            ),
            visits_of={
                names[place]: np.flatnonzero(segments == place)
                for place in dict.fromkeys(segments.tolist())
            },
        )
        step.profile.worked_out[_Walk] = known
    return known


def _columns(
    steps: Sequence[Step], profile: Profile, is_own: NDArray[np.bool_], width: Any
) -> Bytes:
    """Return what each monomial comes to in each step: once, and with each traced layer that has
    it, as often as layers of its kind are like it.

    Args:
        steps: by which the last axis goes.
        profile: that has the monomials.
        is_own: of each step and layer, whether it is of the profile.
        width: of the numbers.
    """
    values = {
        symbol: np.array([step.values[symbol] for step in steps], width)
        for symbol in steps[0].values
    }
    once = np.ones(len(steps), width)
    monomials = np.array(profile.scale(values, one=once), width)
    stands = np.equal.outer(np.arange(len(profile.adapters)), profile.positions)
    repeats = stands.astype(int) @ is_own.T.astype(int)
    return np.asarray(np.array([once, *repeats.astype(width)])[:, None] * monomials)
