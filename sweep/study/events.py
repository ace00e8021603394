"""What a study says while it is driven, one frozen value per thing that happens, and what it is
told: a request to stop.

The first request ends what runs, a further one waits for nothing any more, whichever of the signals
asks. What is stored is never at stake: it is cut short only what a resume does again, or finds in
the spool.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import SEARCH, RunKind, TrialRecord
from qlora_sweep.sweep.processes import STOP_SIGNALS
from qlora_sweep.sweep.running.wire import Progress
from qlora_sweep.sweep.stop_signals import handled


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
    run_kind: RunKind = SEARCH


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
    recipes: tuple[TrialConfig, ...] = ()
    """The baseline in the classes of those, where no trial was of it."""


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

_CUT_AT = 2
"""Requests from which on anything is cut short, a wait for a runner that was cancelled too."""
SETTLING_SECONDS = 1.0
"""In which a result reaches the disk. What takes longer waits for a database."""
TELLING_SECONDS = 5.0
"""In which what came of a study is read, drawn and printed, unless something hangs."""


class Interruption:
    """Counts requests to stop.

    Args:
        cancel: ends what runs at once and launches nothing more; called from a signal handler at
            each request.
        requests: those that were made before.
        clock: seconds; only differences count.
    """

    def __init__(
        self,
        *,
        cancel: Callable[[], None] = lambda: None,
        requests: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cancel = cancel
        self._requests = requests
        self._clock = clock
        self._cut_at = _CUT_AT
        self._cut_after = clock()

    def is_requested(self) -> bool:
        """Return whether anybody asked to stop."""
        return self._requests > 0

    def request(self) -> None:
        """Ask to stop now.

        Raises:
            KeyboardInterrupt: what is under way can be cut short, or was asked to end before.
        """
        self._requests += 1
        self._cancel()
        if self._requests >= self._cut_at and self._clock() >= self._cut_after:
            raise KeyboardInterrupt

    def interruptible(self) -> AbstractContextManager[None]:
        """Let the first request cut short what is inside the ``with``: no result is lost there."""
        return self.cutting(at=1)

    def settling(self) -> AbstractContextManager[None]:
        """Let a result reach the disk inside the ``with`` before a second request cuts it short;
        the database hears of it when the study resumes.
        """
        return self.cutting(at=_CUT_AT, after=SETTLING_SECONDS)

    @contextmanager
    def cutting(self, *, at: int, after: float = 0.0) -> Iterator[None]:
        """Let request number ``at`` cut short what is inside the ``with``, so many seconds on."""
        before = self._cut_at, self._cut_after
        self._cut_at, self._cut_after = at, self._clock() + after
        try:
            yield
        finally:
            self._cut_at, self._cut_after = before

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Take the signals as requests inside the ``with``."""
        numbers = set(STOP_SIGNALS)
        # Under nohup it is to outlive the terminal.
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            numbers.remove(signal.SIGHUP)
        with handled(dict.fromkeys(numbers, lambda *_: self.request())):
            yield


@contextmanager
def undisturbed(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Ignore signals inside the ``with``: whoever asked is being told what came of it.

    Not for ever: where that hangs, one more cuts it short.
    """
    hearing = Interruption(clock=clock)
    with hearing.cutting(at=1, after=TELLING_SECONDS), hearing.handling_signals():
        yield
