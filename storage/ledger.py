"""Owns what a driver asks of its study's finished trials between any two of them.

It is told each trial once and answers at once, whatever the number of trials before. What each
answer means is said by the functions of all records in `recovery`, with which it always agrees.
Knows nothing of databases or rankings.
"""

from __future__ import annotations

from collections.abc import Iterable

from search_spaces.config import TrialConfig
from storage.records import RETRYABLE, Errand, TrialRecord
from storage.recovery import MAX_ATTEMPTS, attempts, is_kept


class Tries:
    """What became of each configuration that some trials tried."""

    def __init__(self) -> None:
        self._concluded: set[TrialConfig] = set()
        self._failed: dict[TrialConfig, list[TrialRecord]] = {}
        self._open: dict[TrialConfig, None] = {}
        """What failed and never concluded, in the order in which it was first tried."""
        self._final = 0

    def add(self, record: TrialRecord) -> None:
        """Take in a trial, later than every one before."""
        if record.verdict in RETRYABLE and not is_kept(record):
            self._failed.setdefault(record.config, []).append(record)
            if record.config not in self._concluded:
                self._open[record.config] = None
        else:
            self._final += 1
            self._concluded.add(record.config)
            self._open.pop(record.config, None)

    def __contains__(self, config: object) -> bool:
        return config in self._concluded or config in self._failed

    def attempts(self, config: TrialConfig, *, since: int) -> int:
        """See `recovery.attempts`."""
        return attempts(self._failed.get(config, ()), config, since=since)

    def to_retry(self, *, since: int) -> tuple[TrialConfig, ...]:
        """Return what came to nothing, fewer than three times, and never concluded.

        In the order in which it was first tried.

        Args:
            since: number of the first trial of this run: an earlier run's failures are tried anew.
        """
        left = (c for c in self._open if self.attempts(c, since=since) < MAX_ATTEMPTS)
        return tuple(left)

    def spent(self, *, since: int) -> int:
        """Return how many trials are spent: all but those that are tried again.

        A configuration that failed as often as it may counts once.
        """
        return self._final + len(self._open) - len(self.to_retry(since=since))


class Ledger:
    """The finished trials of one study, in order of their numbers.

    Args:
        records: of the search, and of what measured its winners again.
    """

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self._count(records)

    def _count(self, records: Iterable[TrialRecord]) -> None:
        known = {record.number: record for record in records}
        self._by_number: dict[int, TrialRecord] = {}
        self._searched: list[TrialRecord] = []
        self._errands: dict[tuple[str, int], list[TrialRecord]] = {}
        self._confirming: list[TrialRecord] = []
        self._tries, self._own = Tries(), Tries()
        self._last = -1
        self._shown: tuple[TrialRecord, ...] | None = None
        for number in sorted(known):
            self._append(known[number])

    def add(self, record: TrialRecord) -> None:
        """Take in a finished trial; one that is told again counts as it was told last."""
        if record.number <= self._last:
            # What a crash left behind is told late: rare, and worth counting all of it anew.
            self._by_number[record.number] = record
            self._count(self._by_number.values())
        else:
            self._append(record)

    def _append(self, record: TrialRecord) -> None:
        self._by_number[record.number] = record
        self._last = record.number
        self._errands.setdefault((record.purpose, record.series), []).append(record)
        if record.purpose != "search":
            self._confirming.append(record)
            return
        self._searched.append(record)
        self._shown = None
        self._tries.add(record)
        if record.carried is None:
            self._own.add(record)

    def record(self, number: int) -> TrialRecord | None:
        """Return the trial of a number, whatever it was for; None where none has ended."""
        return self._by_number.get(number)

    @property
    def all(self) -> tuple[TrialRecord, ...]:
        """Every trial, whatever it was for, by number."""
        return tuple(self._by_number.values())

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        """The trials of the search, by number."""
        if self._shown is None:
            self._shown = tuple(self._searched)
        return self._shown

    @property
    def confirmations(self) -> tuple[TrialRecord, ...]:
        """What measured winners again, by number."""
        return tuple(self._confirming)

    def on_errand(self, errand: Errand) -> tuple[TrialRecord, ...]:
        """Return the trials of one purpose and one confirmation, by number."""
        return tuple(self._errands.get((errand.purpose, errand.series), ()))

    def __contains__(self, config: object) -> bool:
        """Whether a trial of the search was of a configuration, spelled just so."""
        return config in self._tries

    def attempts(self, config: TrialConfig, *, since: int = 0) -> int:
        """Return how often the search tried a configuration in vain; see `recovery.attempts`."""
        return self._tries.attempts(config, since=since)

    def to_retry(self, *, since: int = 0) -> tuple[TrialConfig, ...]:
        """Return what the search tries again; see `Tries.to_retry`."""
        return self._tries.to_retry(since=since)

    def trials_spent(self, *, since: int = 0) -> int:
        """Return how many of the study's trials are spent: all but those that are tried again.

        What another study ran is none of them.

        Args:
            since: number of the first trial of this run, which tries anew what failed in earlier
                ones.
        """
        return self._own.spent(since=since)

    @property
    def next_number(self) -> int:
        """The least number that the search's next trial can have; see `recovery.next_number`."""
        return self._searched[-1].number + 1 if self._searched else 0
