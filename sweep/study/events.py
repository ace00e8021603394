"""What a study says while it is driven: one frozen value per thing that happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from search_spaces.config import TrialConfig
from storage.records import SEARCH, Errand, TrialRecord
from sweep.running.wire import Progress


class StopReason(StrEnum):
    """Why a study stopped; all of them leave it resumable."""

    TRIALS_SPENT = "trials_spent"
    TIME_SPENT = "time_spent"
    DOLLARS_SPENT = "dollars_spent"
    EXHAUSTED = "exhausted"
    GAIN_SPENT = "gain_spent"
    """Nothing that is left is expected to gain enough."""
    CONFIRMED = "confirmed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class SpaceTraced:
    """Of the structures that a space's memory is predicted from, so many are traced.

    Said before the first one and after each; never where all were kept from before.
    """

    done: int
    of: int


@dataclass(frozen=True)
class GainForeseen:
    """What the sampler expects of the next trial. Said before it is chosen, if it can tell."""

    gain: float
    """Relative to the best so far; infinite where nothing fits yet."""
    open: int
    """Configurations that could still be better, with a probability worth naming."""


@dataclass(frozen=True)
class TrialStarted:
    """A configuration is about to be checked and, if it passes, run."""

    number: int
    config: TrialConfig
    is_baseline: bool
    attempt: int
    errand: Errand = SEARCH


@dataclass(frozen=True)
class TrialProgress:
    """The running trial gave a sign of life."""

    number: int
    progress: Progress


@dataclass(frozen=True)
class TrialFinished:
    """A trial ended, with what the study has of it: a result that could not be told is lost to it,
    and its record says where it is kept."""

    record: TrialRecord


@dataclass(frozen=True)
class LanesOpened:
    """Trials run in several places at a time; said once, before the first of them."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class LaneLost:
    """A place where trials ran is lost; what ran there is tried again on another."""

    name: str
    reason: str
    left: int
    """Places that trials still run on."""


@dataclass(frozen=True)
class ConfirmationStarted:
    """The search has ended, and what it found is about to be measured again."""

    series: int
    numbers: tuple[int, ...]
    """Trials whose configurations are run in turns, the baseline last."""
    recipe: TrialConfig | None = None
    """The baseline in the winner's class, run with them; None where it is one of them."""


@dataclass(frozen=True)
class StudyFinished:
    """The loop ended in an orderly way."""

    reason: StopReason


Event = (
    SpaceTraced
    | GainForeseen
    | TrialStarted
    | TrialProgress
    | TrialFinished
    | LanesOpened
    | LaneLost
    | ConfirmationStarted
    | StudyFinished
)
Listener = Callable[[Event], None]
