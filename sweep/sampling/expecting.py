"""Owns what a sampler asks of whoever knows something of configurations before they run.

`sweep.study.preflight` does. Knows nothing of how anything is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from search_spaces.config import TrialConfig
from sweep.sampling.belief import Array, Physics


class Expectation(Protocol):
    """What choosing asks of one configuration; each part costs only when read."""

    @property
    def is_refused(self) -> bool:
        """Whether it is known to be hopeless: a rule forbids it or it cannot fit."""
        ...


@dataclass(frozen=True)
class Foreseen:
    """What is known of many configurations at once, a row each."""

    physics: Physics | None = None
    """Predicts their steps; None where nothing does."""
    peak_bytes: Array | None = None
    """Predicted allocated peaks, not a number where one is not predicted; None for none."""
    uncertainty: Array | None = None
    """Relative, of the peaks."""
    budget_bytes: int | None = None
    """What a trial may allocate; None where nobody knows."""
    is_cut_up: bool = False
    """Whether the allocator may fail below the budget, as free memory is in pieces."""
    trainable_parameters: Array | None = None
    """Of the adapters; None where that is not known."""
    target: Physics | None = None
    """Predicts their steps on the target, where another GPU stands in for it; else None."""
    tokens_per_step: Array | None = None
    """That carry loss; None where rows are full and all do."""


class Expecting(Protocol):
    """Says what is known of configurations before they run."""

    def expect(self, config: TrialConfig) -> Expectation:
        """Return what is known of ``config``; the same value until a further trial is told."""
        ...

    def is_valid(self, config: TrialConfig) -> bool:
        """Return whether no rule forbids ``config``."""
        ...

    def foresee(self, configs: Sequence[TrialConfig]) -> Foreseen:
        """Return what is predicted of many configurations, whatever the trials have shown."""
        ...


@dataclass(frozen=True)
class NothingExpected:
    """Knows nothing of any configuration, and refuses none."""

    is_refused: bool = False

    def expect(self, config: TrialConfig) -> Expectation:
        """Return the same of every configuration."""
        return self

    def is_valid(self, config: TrialConfig) -> bool:
        """Return that it is."""
        return True

    def foresee(self, configs: Sequence[TrialConfig]) -> Foreseen:
        """Return that nothing is predicted."""
        return Foreseen()


NOTHING_EXPECTED = NothingExpected()
