"""Owns when failing trials are the machine's fault: one after another in the same way, or all that
ran.

Knows nothing of studies or runners.
"""

from __future__ import annotations

from collections.abc import Iterable

from search_spaces.errors import EnvironmentFault
from storage.records import Crashed, Outcome, TimedOut, TrialRecord, Verdict

FAILURES_IN_A_ROW = 5
"""So many trials that fail alike are the machine's doing; a night of them teaches nothing more."""


class FailureStreak:
    """The trials since the last one that the machine brought to an end of its own."""

    def __init__(self) -> None:
        self._failures: list[Crashed | TimedOut] = []

    def __bool__(self) -> bool:
        return bool(self._failures)

    def count(self, outcome: Outcome) -> None:
        """Count a trial that ran.

        Raises:
            EnvironmentFault: this was one failure of a kind too many; names the first cause.
        """
        if not isinstance(outcome, Crashed | TimedOut):
            self._failures.clear()
            return
        if self._failures and _kind(self._failures[0]) != _kind(outcome):
            self._failures.clear()
        self._failures.append(outcome)
        if len(self._failures) >= FAILURES_IN_A_ROW:
            raise _fault(self._failures[0])


def _kind(failure: Crashed | TimedOut) -> tuple[str, str]:
    return failure.verdict, failure.phase


def nothing_concluded(records: Iterable[TrialRecord]) -> EnvironmentFault | None:
    """Return the fault of a study in which every trial that ran failed; None where one did not.

    What was refused before it ran says nothing of those that did: that nothing fits is not known.
    """
    known = tuple(records)
    failures = [r.outcome for r in known if isinstance(r.outcome, Crashed | TimedOut)]
    if not failures or any(record.verdict in _CONCLUDED for record in known):
        return None
    count = "the only trial that ran" if len(failures) == 1 else f"all {len(failures)} trials"
    return EnvironmentFault(
        f"nothing is known of what fits: {count} failed, and {_suspect(failures[0])}. "
        f"{_first_words(failures[0])} See `sweep doctor`; the same command tries them again"
    )


_CONCLUDED = frozenset(
    {Verdict.FITS, Verdict.OOM, Verdict.PRUNED_SLOW, Verdict.DIVERGED, Verdict.INEFFECTIVE}
)


def _fault(first: Crashed | TimedOut) -> EnvironmentFault:
    return EnvironmentFault(
        f"{FAILURES_IN_A_ROW} trials in a row {_how(first)}: {_suspect(first)}. "
        f"{_first_words(first)} What was measured is stored; see `sweep doctor`, then run the "
        "same command again"
    )


def _how(failure: Crashed | TimedOut) -> str:
    return f"{failure.verdict.replace('_', ' ')} in phase '{failure.phase}'"


def _suspect(first: Crashed | TimedOut) -> str:
    if first.phase == "build":
        return "either the model cannot be built from its config here, or the machine is at fault"
    return "the machine is at fault rather than a configuration"


def _first_words(first: Crashed | TimedOut) -> str:
    return f"The first {_how(first)} and said: {first.detail.rstrip('.') or 'nothing'}."
