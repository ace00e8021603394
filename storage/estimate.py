"""A number with its interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A number that was measured or predicted."""

    value: float
    low: float | None = None
    """Ends of its interval; None where nothing bounds it."""
    high: float | None = None
