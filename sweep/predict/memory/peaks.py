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
from qlora_sweep.sweep.predict.memory.profiles import ACTIVATIONS, GRADIENTS, VARYING, Profile
from qlora_sweep.sweep.predict.memory.replay import Step, base_allocator

PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "loss")
"""What a peak is made of, in the order it is shown."""
KNOWN_PARTS = ("weights", "adapters", "optimizer")
"""Those that are known exactly, as they are counted and not traced."""

_VARYING_ROWS = list(map(PARTS.index, VARYING))
_KNOWN_ROWS = list(map(PARTS.index, KNOWN_PARTS))
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
class StepPeaks:
    """The most that is alive at once in each of many steps."""

    there: Bytes
    """What is alive throughout. (`PARTS`, steps)"""
    passing: Bytes
    """The same, with the most that comes and goes. (`PARTS`, steps)"""
    passing_moments: NDArray[np.int8]
    """When that is, as places in `_MOMENTS`. (steps,)"""

    @cached_property
    def _update(self) -> Bytes:
        """What is alive at the update, which needs every gradient and next to nothing else.
        (`PARTS`, steps)"""
        update = self.there.copy()
        update[PARTS.index("gradients")] = self.there[PARTS.index("adapters")]
        return update

    def total_bytes(self, wasted_bytes: Bytes) -> Bytes:
        """Return each peak, with so much that blocks hold beyond what was asked for. (steps,)"""
        passing = self.passing.sum(axis=0) + wasted_bytes
        return np.asarray(np.maximum(self._update.sum(axis=0), passing))

    @cached_property
    def known_bytes(self) -> Bytes:
        """What of each peak is known exactly: weights, adapters and optimizer states. (steps,)"""
        return np.asarray(self.there[_KNOWN_ROWS].sum(axis=0))

    def of(self, step: int, *, wasted_bytes: int = 0) -> tuple[dict[str, int], str]:
        """Return the parts of one step's peak, and when that is: ``forward``, ``loss``,
        ``backward`` or ``optimizer``."""
        update = dict(zip(PARTS, self._update[:, step].tolist(), strict=True))
        passing = dict(zip(PARTS, self.passing[:, step].tolist(), strict=True))
        passing["activations"] += wasted_bytes
        if sum(update.values()) > sum(passing.values()):
            return update, "optimizer"
        return passing, _MOMENTS[self.passing_moments[step]]


def alike(steps: Mapping[int, Step]) -> list[list[int]]:
    """Return the keys of steps that share their profiles, as many as are worked out together."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for key, step in steps.items():
        groups[tuple(map(id, step.profiles.values()))].append(key)
    parts: list[list[int]] = []
    for group in groups.values():
        for start in range(0, len(group), _AT_ONCE):
            parts.append(group[start : start + _AT_ONCE])
    return parts


def find_peaks(steps: Sequence[Step]) -> StepPeaks:
    """Return the peak of each of steps `alike`, as if every block were as large as what was asked
    for."""
    width = _width(steps)
    there = np.array([_resident(step) for step in steps], width).T  # (parts, steps)
    moments, highest = _highest(steps, width)
    passing = there.copy()
    passing[_VARYING_ROWS] += highest
    return StepPeaks(there, passing, moments)


def _width(steps: Sequence[Step]) -> Any:
    """Return the type of numbers that the steps' bytes go into."""
    batch = max(step.values["b"] for step in steps)
    length = max(step.values["s"] for step in steps)
    if batch * length * max(length, _LENGTHY) < _WIDE:
        return np.int64
    return object


def _resident(step: Step) -> list[int]:
    """Return the bytes of each of `PARTS` that are there throughout; many steps of the same
    profiles have the same adapters."""
    config = step.config
    key = (
        config.lora_rank,
        config.adapter_dtype,
        config.optimizer,
        config.is_sharded and config.data_parallel,
        config.expandable_segments,
        step.workspace_bytes,
        step.held_gradients,
    )
    known: dict[Any, list[int]] = step.profile.worked_out
    if key not in known:
        known[key] = _worked_out_resident(step)
    return known[key]


def _worked_out_resident(step: Step) -> list[int]:
    """Return the bytes of each of `PARTS` that are there throughout.

    No small block holds more than was asked for, and none does where segments expand.
    """
    base = step.profile.base
    weights = base.allocated_bytes
    allocator = base_allocator(step)

    def allocated(sizes: Sequence[int]) -> int:
        """Return what the allocator takes for tensors of these sizes."""
        if step.config.expandable_segments:
            return _rounded(sizes)
        before = allocator.allocated_bytes
        small: list[int] = []
        large: list[tuple[int, int]] = []
        for size in sizes:
            if size <= SMALL_BYTES:
                small.append(size)
            else:
                large.append((grains(size), 0))
        allocator.run(large, [0])
        return _rounded(small) + allocator.allocated_bytes - before

    if step.config.expandable_segments:
        weights = base.requested_bytes
    adapters = allocated(step.adapters)
    gradients = 0
    for _ in range(step.held_gradients):
        gradients += allocated(step.adapters)
    states = allocated(step.states)
    return [weights, adapters, gradients, states, step.workspace_bytes, 0]


def _rounded(sizes: Sequence[int]) -> int:
    """Return the bytes of blocks, each as large as what is asked for in whole grains."""
    counts = Counter(sizes)  # many are alike
    return GRAIN_BYTES * sum(grains(size) * count for size, count in counts.items())


def _highest(steps: Sequence[Step], width: Any) -> tuple[NDArray[np.int8], Bytes]:
    """Return when the most comes and goes in steps with the same profiles, (steps,), and how much
    of it is alive then, (varying, steps).

    A segment peaks in the visit before which most is alive, so that of all visits of one segment in
    layers of one kind a single one is looked at. Of equal peaks it is the earliest.

    Args:
        steps: they differ in their sizes and in which layers are recomputed.
        width: of the numbers.
    """
    walk = _walk(steps[0])
    flags = np.array([step.flags for step in steps], np.bool_)  # (steps, layers)
    is_recomputed = flags[:, walk.layers].T  # (visits, steps)
    # What each visit leaves, and how far each birth rises above the beginning of its segment.
    left = np.zeros((len(walk.layers), len(VARYING), len(steps)), width)
    risen: dict[bool, Bytes] = {}
    for flag, profile in steps[0].profiles.items():
        columns = _columns(steps, profile, flags == flag, width)  # (layers, monomials, steps)
        ends = profile.ends[list(map(profile.places.__getitem__, walk.names))]
        once = ends[:, :, 0]  # (segments, varying, monomials)
        repeated = ends[:, :, 1:]  # (segments, varying, traced layers, monomials)
        own = np.tensordot(once, columns[0], 1)[walk.segments]  # (visits, varying, steps)
        left += own * (is_recomputed == flag)[:, None]
        # What a segment that happens once (embedding, head) lets go of for each layer of one kind
        # stands in the profile of that kind, whichever the segment itself is of.
        left += np.tensordot(repeated, columns[1:], 2)[walk.segments]
        risen[flag] = np.tensordot(profile.births, columns, 2)  # (births, varying, steps)
    # Gradients that earlier micro-batches have left are there throughout.
    beside = np.array([step.first_step_bytes for step in steps], width)  # (steps,)
    has_gradients = np.array([step.held_gradients > 0 for step in steps])  # (steps,)
    left[:, GRADIENTS, has_gradients] = 0
    alive = left.cumsum(axis=0) - left  # (visits, varying, steps): before each visit
    alive_in_all = alive.sum(axis=1)  # (visits, steps)

    step = np.arange(len(steps))
    visits_of_births: list[NDArray[np.intp]] = []
    totals_of_births: list[Bytes] = []
    rises_of_births: list[Bytes] = []
    for flag, rises in risen.items():
        births_of = steps[0].profiles[flag].births_of
        for name, visits in walk.visits_of.items():
            is_own = is_recomputed[visits] == flag  # (visits of the segment, steps)
            before = np.where(is_own, alive_in_all[visits], _NEVER)
            fullest = before.argmax(axis=0)  # (steps,)
            rise = rises[births_of[name]]  # (births of the segment, varying, steps)
            if name.startswith("backward"):
                rise = rise.copy()
                rise[:, ACTIVATIONS] += beside
            rises_of_births.append(rise)
            totals_of_births.append(before[fullest, step] + rise.sum(axis=1))
            visits_of_births.append(np.broadcast_to(visits[fullest], (len(rise), len(steps))))
    totals = np.concatenate(totals_of_births)  # (births, steps)
    visit_of = np.concatenate(visits_of_births)  # (births, steps)
    rises = np.concatenate(rises_of_births)  # (births, varying, steps)

    is_highest = totals == totals.max(axis=0)  # (births, steps)
    birth = np.where(is_highest, visit_of, len(walk.layers)).argmin(axis=0)  # (steps,)
    visit = visit_of[birth, step]  # (steps,)
    highest = alive[visit, :, step] + rises[birth, :, step]  # (steps, varying)
    return walk.moments[visit], highest.T


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
    if known is not None:
        return known
    names = list(step.profile.segments)
    segments: list[int] = []
    layers: list[int] = []
    moments: list[int] = []
    visits_of: dict[str, list[int]] = {}
    for number, visit in enumerate(step.visits()):
        kind = visit.name.partition(" ")[0]
        segments.append(names.index(visit.name))
        layers.append(_BESIDE.get(visit.name, visit.layer))
        moments.append(_MOMENTS.index(_MOMENT_OF.get(kind, kind)))
        visits_of.setdefault(visit.name, []).append(number)
    walk = _Walk(
        names=names,
        segments=np.array(segments),
        layers=np.array(layers),
        moments=np.array(moments, np.int8),
        visits_of={name: np.array(visits) for name, visits in visits_of.items()},
    )
    step.profile.worked_out[_Walk] = walk
    return walk


def _columns(
    steps: Sequence[Step], profile: Profile, is_own: NDArray[np.bool_], width: Any
) -> Bytes:
    """Return what each monomial comes to in each step: once, and with each traced layer that has
    it, as often as layers of its kind are like it. (1 + traced layers, monomials, steps)

    Args:
        steps: by which the last axis goes.
        profile: that has the monomials.
        is_own: of each step and layer, whether it is of the profile.
        width: of the numbers.
    """
    values: dict[str, Bytes] = {}
    for symbol in steps[0].values:
        values[symbol] = np.array([step.values[symbol] for step in steps], width)  # (steps,)
    once = np.ones((1, len(steps)), width)
    monomials = np.array(profile.scale(values, one=once[0]), width)  # (monomials, steps)
    traced = np.arange(len(profile.adapters))
    stands = np.equal.outer(traced, profile.positions).astype(int)  # (traced layers, layers)
    repeats = stands @ is_own.T.astype(int)  # (traced layers, steps)
    times = np.concatenate([once, repeats.astype(width)])  # (1 + traced layers, steps)
    return np.asarray(times[:, None] * monomials)
