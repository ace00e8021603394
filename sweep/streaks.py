"""Owns when failing trials are the machine's fault: one after another, all in the same way.

Knows nothing of studies or runners.
"""

from __future__ import annotations

from search_spaces.errors import EnvironmentFault
from storage.records import Crashed, Outcome, TimedOut

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


def _fault(first: Crashed | TimedOut) -> EnvironmentFault:
    return EnvironmentFault(
        f"{FAILURES_IN_A_ROW} trials in a row {first.verdict.replace('_', ' ')} in phase "
        f"'{first.phase}': the machine is at fault rather than a configuration. The first said: "
        f"{first.detail or 'nothing'}. What was measured is stored; see `sweep doctor`, then run "
        "the same command again"
    )
