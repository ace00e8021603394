"""Owns the profile of a model part of whose layers are in 4 bits, from those of one kind each.

Both are traced of the same layers, so that the layers of one profile are put behind those of the
other, and each layer of the model is told which of them stands for it. Knows nothing of how
profiles are made or used.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from sweep.predict.memory.profiles import BIRTH, LEAVE, Account, Base, Entry, Profile, Segment

_ONCE = ("embed", "head", "head_backward")


def mixed(packed: Profile, wide: Profile, *, quantized: Collection[int]) -> Profile:
    """Return the profile of a model of whose layers some are in 4 bits.

    Args:
        packed: of the model with all layers in 4 bits.
        wide: of the model with none.
        quantized: the layers that are.
    """
    shift = len(packed.adapters)
    pairs = enumerate(zip(packed.positions, wide.positions, strict=True))
    segments = {
        name: _once(segment, wide.segments[name], shift=shift) if name in _ONCE else segment
        for name, segment in packed.segments.items()
    }
    for name, segment in wide.segments.items():
        kind, _, position = name.partition(" ")
        if name not in _ONCE:
            tape = _shifted(segment.tape, by=len(packed.sizes))
            segments[f"{kind} {int(position) + shift}"] = replace(segment, tape=tape)
    return replace(
        packed,
        positions=tuple(
            in_packed if layer in quantized else in_wide + shift
            for layer, (in_packed, in_wide) in pairs
        ),
        base=_base(packed.base, wide.base, share=len(quantized) / len(packed.positions)),
        adapters=(*packed.adapters, *wide.adapters),
        segments=segments,
        sizes=(*packed.sizes, *wide.sizes),
    )


def _once(packed: Segment, wide: Segment, *, shift: int) -> Segment:
    """Return a segment that happens once: beside what its own profile tells of it, what each layer
    of the other kind adds."""
    kept: Account = dict(packed.kept)
    for key, polynomial in wide.repeated.items():
        part, _, position = key.partition(" ")
        kept[f"{part} {int(position) + shift}"] = polynomial
    return replace(packed, kept=kept)


def _shifted(tape: tuple[Entry, ...], *, by: int) -> tuple[Entry, ...]:
    """Return a tape whose births name sizes further back."""
    return tuple(
        (what, key, value + by) if what in (BIRTH, LEAVE) else (what, key, value)
        for what, key, value in tape
    )


def _base(packed: Base, wide: Base, *, share: float) -> Base:
    """Return the base in between: layers are alike, and all else is in both."""

    def between(low: int, high: int) -> int:
        return round(share * low + (1 - share) * high)

    return Base(
        allocated_bytes=between(packed.allocated_bytes, wide.allocated_bytes),
        requested_bytes=between(packed.requested_bytes, wide.requested_bytes),
        reserved_bytes=between(packed.reserved_bytes, wide.reserved_bytes),
        holes=packed.holes,
    )
