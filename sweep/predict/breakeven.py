"""Owns where two costs that grow with an amount of work are equal. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CostLine:
    """A cost over an amount of work: a fixed part, a part per unit, and a least charge."""

    fixed: float
    per_unit: float
    least: float = 0.0

    def at(self, amount: float) -> float:
        """Return the cost of ``amount``."""
        return max(self.least, self.fixed + self.per_unit * amount)

    @property
    def bend(self) -> float:
        """Amount from which on the least charge is exceeded."""
        return max(0.0, (self.least - self.fixed) / self.per_unit)


@dataclass(frozen=True)
class Crossing:
    """An amount at which two costs change places."""

    amount: float
    is_first_below: bool
    """Whether the first of the two is the cheaper one for smaller amounts."""


def crossings(first: CostLine, second: CostLine) -> list[Crossing]:
    """Return where two costs change places, by amount; as each bends once, there may be two."""
    edges = sorted({0.0, first.bend, second.bend})
    pieces = zip(edges, [*edges[1:], math.inf], strict=True)
    roots = [root for piece in pieces if (root := _root(first, second, *piece)) is not None]
    probes = [(one + other) / 2 for one, other in zip([0.0, *roots], roots, strict=False)]
    probes.append(2 * roots[-1] if roots else 1.0)
    gaps = [first.at(amount) - second.at(amount) for amount in probes]
    return [
        Crossing(root, is_first_below=gaps[index] < 0)
        for index, root in enumerate(roots)
        # Two costs may touch and part again without changing places.
        if gaps[index] * gaps[index + 1] < 0
    ]


def _root(first: CostLine, second: CostLine, start: float, end: float) -> float | None:
    """Return where both are equal between two bends, ``start`` excluded."""
    probe = end if end < math.inf else start + 1.0
    gap = first.at(start) - second.at(start)
    slope = (first.at(probe) - second.at(probe) - gap) / (probe - start)
    if slope == 0.0:
        return None
    root = start - gap / slope
    return root if start < root <= end and root < math.inf else None
