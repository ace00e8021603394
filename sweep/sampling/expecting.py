"""What a sampler asks of whoever predicts configurations before they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig

Array = NDArray[np.float64]
Codes = NDArray[np.intp]


class Physics(Protocol):
    """Predicts the configurations' steps, by factors that multiply the parts of a step."""

    @property
    def spread(self) -> Array:
        """Covariance of the factors' logarithms before anything was measured."""
        ...

    @property
    def launch_shares(self) -> Array:
        """Share of each step that goes with the host's launches, of which far less is known than of
        what the GPU takes."""
        ...

    def log_seconds(self, log_factors: Array, rows: Codes | slice) -> Array:
        """Return the logarithm of some configurations' seconds."""
        ...

    def slopes(self, log_factors: Array, rows: Codes | slice) -> Array:
        """Return by how much some configurations' log seconds rise with each log factor."""
        ...


class Expectation(Protocol):
    """What choosing asks of one configuration."""

    @property
    def is_refused(self) -> bool:
        """Whether it is known to be hopeless: a rule forbids it or it cannot fit."""
        ...


@dataclass(frozen=True)
class Foreseen:
    """What is predicted of many configurations at once, a row each."""

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
    """Supervised tokens; None where sequences are full and all are supervised."""


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
    """Predicts nothing of any configuration, and refuses none."""

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
