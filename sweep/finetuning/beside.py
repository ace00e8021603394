"""What is as recorded: figures that a training reached beside those that were measured of its
configuration, how far they may be apart, and what may be behind it where they are further.

`sweep train` and `sweep verify` go by it. Pure values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reports import units
from storage.reading import changed_versions

SPEED_TOLERANCE = 0.05
"""Of tokens/s at the median step, either way."""
MEMORY_TOLERANCE = 0.02
"""Of peak allocated bytes, either way."""


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

    @property
    def is_below(self) -> bool:
        """Whether less was reached than the tolerance allows."""
        return self.ratio is not None and self.ratio < 1.0 and not self.is_within

    def to_json(self) -> dict[str, float | None]:
        """Return what programs read."""
        return {"promised": self.promised, "reached": self.reached, "ratio": self.ratio}


def compared_speed(promised: float, reached: float | None) -> Compared:
    """Return tokens/s beside each other."""
    return Compared(promised, reached, SPEED_TOLERANCE)


def compared_memory(promised: int, reached: int | None) -> Compared:
    """Return peak allocated bytes beside each other."""
    return Compared(float(promised), reached, MEMORY_TOLERANCE)


def off(speed: Compared, memory: Compared) -> Iterator[str]:
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


@dataclass(frozen=True)
class Deviation:
    """Figures that are not as promised, each in words, and likely causes."""

    figures: tuple[str, ...]
    causes: tuple[str, ...]

    @property
    def words(self) -> str:
        """All of it in a line."""
        causes = "; ".join(self.causes) or "nothing that is recorded explains it"
        return f"Not as promised: {'; '.join(self.figures)}. Likely causes: {causes}."


def behind(
    recorded: Mapping[str, Any],
    environment: Mapping[str, Any],
    *,
    flags: Iterable[str],
    is_confirmed: bool,
) -> Iterator[str]:
    """Yield what may be behind a difference: what is another thing here, and what makes the record
    doubtful.

    Args:
        recorded: fingerprint of the machine that measured; what it does not know is no difference.
        environment: this machine's.
        flags: of the measurement.
        is_confirmed: whether it was measured again.
    """
    known = {
        key: environment.get(key)
        for key in ("gpu", "driver", "cuda_driver", "python", "commit")
        if recorded.get(key) is not None
    }
    before = recorded.get("versions") or {}
    versions = environment.get("versions") or {}
    known["versions"] = {name: versions.get(name) for name in before}
    narrowed = {key: recorded.get(key) for key in known} | {"versions": before}
    yield from changed_versions(narrowed, known)
    then, now = recorded.get("cpu"), environment.get("cpu")
    if recorded.get("gpu") is None and then and now and then != now:
        yield f"processor {then} -> {now}"
    for flag in flags:
        if flag in _FLAGS:
            yield f"the record is flagged {flag}: {_FLAGS[flag]}"
    if not is_confirmed:
        yield "the record is not confirmed: `sweep confirm` measures it again"


_FLAGS = {
    "noisy": "its steps varied, so its speed is uncertain",
    "throttled": "the GPU was slowed down as it was measured",
    "neighbour": "something else used the GPU as it was measured",
    "accumulation_extrapolated": "a part of its accumulation was derived",
    "round_extrapolated": "its speed was derived from micro-batches of other sizes",
}
