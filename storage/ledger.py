"""What a driver asks of its study's finished trials between any two of them."""

from __future__ import annotations

from collections.abc import Iterable

from search_spaces.config import TrialConfig
from storage.records import RETRYABLE, Errand, TrialRecord
from storage.recovery import MAX_ATTEMPTS, attempts, is_kept, next_number


class Ledger:
    """The finished trials of one study, in order of their numbers.

    Args:
        records: of the search, and of what measured its winners again.
    """

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        known = {record.number: record for record in records}
        self._by_number = {number: known[number] for number in sorted(known)}
        self.all = tuple(self._by_number.values())
        """Every trial, whatever it was for, by number."""
        self.records = tuple(r for r in self.all if r.purpose == "search")
        """The trials of the search."""
        self.confirmations = tuple(r for r in self.all if r.purpose != "search")
        """What measured winners again."""
        self._tried = {r.config for r in self.records}

    def add(self, record: TrialRecord) -> None:
        """Take in a finished trial; one that is told again counts as it was told last."""
        vars(self).update(vars(Ledger((*self.all, record))))

    def record(self, number: int) -> TrialRecord | None:
        """Return the trial of a number, whatever it was for; None where none has ended."""
        return self._by_number.get(number)

    def on_errand(self, errand: Errand) -> tuple[TrialRecord, ...]:
        """Return the trials of one purpose and one confirmation, by number."""
        wanted = errand.purpose, errand.series
        return tuple(record for record in self.all if (record.purpose, record.series) == wanted)

    def __contains__(self, config: object) -> bool:
        """Whether a trial of the search was of a configuration, spelled just so."""
        return config in self._tried

    def attempts(self, config: TrialConfig, *, since: int = 0) -> int:
        """Return how often the search tried a configuration in vain; see `recovery.attempts`."""
        return attempts(self.records, config, since=since)

    def to_retry(self, *, since: int = 0) -> tuple[TrialConfig, ...]:
        """Return what came to nothing, fewer than three times, and never concluded.

        In the order in which it was first tried.

        Args:
            since: number of the first trial of this run: an earlier run's failures are tried anew.
        """
        return _to_retry(self.records, since=since)

    def trials_spent(self, *, since: int = 0) -> int:
        """Return how many of the study's trials are spent: all but those that are tried again.

        What another study ran is none of them. A configuration that failed as often as it may
        counts once.

        Args:
            since: number of the first trial of this run, which tries anew what failed in earlier
                ones.
        """
        own = [record for record in self.records if record.carried is None]
        final = sum(not _has_failed(record) for record in own)
        return final + len(_never_concluded(own)) - len(_to_retry(own, since=since))

    @property
    def next_number(self) -> int:
        """The least number that the search's next trial can have; see `recovery.next_number`."""
        return next_number(self.records)


def _has_failed(record: TrialRecord) -> bool:
    return record.verdict in RETRYABLE and not is_kept(record)


def _never_concluded(records: Iterable[TrialRecord]) -> dict[TrialConfig, list[TrialRecord]]:
    failed: dict[TrialConfig, list[TrialRecord]] = {}
    concluded = set()
    for record in records:
        if _has_failed(record):
            failed.setdefault(record.config, []).append(record)
        else:
            concluded.add(record.config)
    return {config: tries for config, tries in failed.items() if config not in concluded}


def _to_retry(records: Iterable[TrialRecord], *, since: int) -> tuple[TrialConfig, ...]:
    known = _never_concluded(records).items()
    return tuple(c for c, tries in known if attempts(tries, c, since=since) < MAX_ATTEMPTS)
