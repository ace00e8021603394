"""What of a trial's end is the machine's doing rather than the configuration's: another process on
its GPU, and failures of one trial after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from search_spaces.errors import MORE_DESCRIPTORS, EnvironmentFault
from storage.kept import WORTH_KEEPING
from storage.records import (
    INTERRUPTED,
    NEIGHBOUR,
    RETRYABLE,
    Crashed,
    Lost,
    Measured,
    Outcome,
    OutOfMemory,
    PrunedSlow,
    TimedOut,
    TrialRecord,
)

FAILURES_IN_A_ROW = 5
"""So many trials that fail alike are the machine's doing; a night of them teaches nothing more."""
REMEASURED_AT_MOST = 2
REMEASURED = "remeasured"


def lost_with_the_card(error: EnvironmentFault) -> Lost:
    """Return the outcome of the trial that ran when its GPU was lost: none of its own doing, as
    far as anybody knows, so it is tried again.
    """
    return Lost(detail=f"the card was lost: {error}", is_interrupted=True)


def run_undisturbed(run: Callable[[], Outcome], *, should_stop: Callable[[], bool]) -> Outcome:
    """Run a trial, again where another process disturbed it, and return the outcome to keep.

    Args:
        run: runs the trial once.
        should_stop: whether it is not to be run again.

    Returns:
        An interrupted trial where somebody asked to stop so often that the runner, which had been
        told to cancel it, was not waited for either.

    Raises:
        EnvironmentFault: the device is not to be had, and nothing was measured on it before.
    """
    outcomes: list[Outcome] = []
    while True:
        try:
            outcomes.append(run())
        except KeyboardInterrupt:
            outcomes.append(INTERRUPTED)
        except EnvironmentFault:
            # A neighbour that took the whole card: what was measured beside it is not lost.
            if not any(isinstance(outcome, Measured | PrunedSlow) for outcome in outcomes):
                raise
            break
        if not _is_disturbed(outcomes[-1]) or len(outcomes) > REMEASURED_AT_MOST or should_stop():
            break
    kept = _outcome_to_keep(outcomes)
    if len(outcomes) == 1 or not isinstance(kept, Measured | PrunedSlow):
        return kept
    flags = (*kept.measurement.flags, REMEASURED)
    measurement = kept.measurement.model_copy(update={"flags": flags})
    return kept.model_copy(update={"measurement": measurement})


def _is_disturbed(outcome: Outcome) -> bool:
    """Whether another process had a hand in how a trial ended."""
    match outcome:
        case Measured(measurement=measurement) | PrunedSlow(measurement=measurement):
            return NEIGHBOUR in measurement.flags
        case OutOfMemory(flags=flags):
            return NEIGHBOUR in flags
        case _:
            return False


def _outcome_to_keep(outcomes: Sequence[Outcome]) -> Outcome:
    """Return which of a configuration's outcomes to keep; only the last may be undisturbed.

    Without such a one the fastest measurement is kept, since a neighbour only takes speed away. A
    failure of the machine does not replace a measurement. Memory that a neighbour held all the time
    says nothing of the configuration: that is a failure of the machine too.
    """
    last = outcomes[-1]
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measured | PrunedSlow)]
    if not _is_disturbed(last) and not (measured and last.verdict in RETRYABLE):
        return last
    complete = [outcome for outcome in measured if isinstance(outcome, Measured)] or measured
    if complete:
        return max(complete, key=lambda outcome: outcome.measurement.tokens_per_second)
    assert isinstance(last, OutOfMemory)
    return Crashed(
        phase="build" if last.stage == "load" else "warmup",
        detail=f"another process held memory that this trial was to have: {last.detail}",
    )


class ConsecutiveFailures:
    """The trials since the last one that the machine brought to an end of its own."""

    def __init__(self) -> None:
        self._failures: list[Crashed | TimedOut] = []

    def __bool__(self) -> bool:
        return bool(self._failures)

    def count(self, outcome: Outcome) -> None:
        """Count a trial that ran; one that somebody interrupted says nothing either way.

        Raises:
            EnvironmentFault: this was one failure of a kind too many; names the first cause.
        """
        if isinstance(outcome, Lost) and outcome.is_interrupted:
            return
        if not isinstance(outcome, Crashed | TimedOut):
            self._failures.clear()
            return
        if self._failures and _kind(self._failures[0]) != _kind(outcome):
            self._failures.clear()
        self._failures.append(outcome)
        if len(self._failures) >= FAILURES_IN_A_ROW:
            first = self._failures[0]
            how, suspect, cure = _words_of(first)
            raise EnvironmentFault(
                f"{FAILURES_IN_A_ROW} trials in a row {how}: {suspect}. {_first_said(first)} "
                f"What was measured is stored; {cure}, then run the same command again"
            )


def _kind(failure: Crashed | TimedOut) -> tuple[str, str]:
    """Return what failures have in common that are the machine's doing; what the host lacks it
    lacks in whichever phase.
    """
    match failure:
        case Crashed(cause="host_out_of_memory" | "too_few_descriptors" as cause):
            return failure.verdict, cause
        case _:
            return failure.verdict, failure.phase


def nothing_concluded(records: Iterable[TrialRecord]) -> EnvironmentFault | None:
    """Return the fault of a study in which every trial that ran failed; None where one did not.

    What was refused before it ran says nothing of those that did: that nothing fits is not known.
    """
    known = tuple(records)
    failures = [r.outcome for r in known if isinstance(r.outcome, Crashed | TimedOut)]
    if not failures or any(record.verdict in WORTH_KEEPING for record in known):
        return None
    count = "the only trial that ran" if len(failures) == 1 else f"all {len(failures)} trials"
    _, suspect, cure = _words_of(failures[0])
    return EnvironmentFault(
        f"nothing is known of what fits: {count} failed, and {suspect}. "
        f"{_first_said(failures[0])} To go on, {cure}; the same command tries them again"
    )


def _words_of(failure: Crashed | TimedOut) -> tuple[str, str, str]:
    """Return how a trial failed, what is at fault, and what helps."""
    at_fault = "the machine is at fault rather than a configuration"
    if failure.phase == "build":
        at_fault = (
            "either the model cannot be built from its config here, or the machine is at fault"
        )
    match failure:
        case Crashed(cause="host_out_of_memory"):
            return (
                "ran out of this machine's own memory, not the card's",
                "no configuration is at fault, which are measured by the card's memory",
                "end what else uses this machine's memory, `free -h` shows how much is left, or "
                "raise the limit of its container",
            )
        case Crashed(cause="too_few_descriptors"):
            return "could open no further file", at_fault, MORE_DESCRIPTORS
        case _:
            how = f"{failure.verdict.replace('_', ' ')} in phase '{failure.phase}'"
            return how, at_fault, "see `sweep doctor`"


def _first_said(first: Crashed | TimedOut) -> str:
    how, _, _ = _words_of(first)
    return f"The first {how} and said: {first.detail.rstrip('.') or 'nothing'}."
