"""What a driver asks of its study's finished trials: which are known, and what is tried again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from search_spaces.config import TrialConfig
from storage.records import RETRYABLE, Errand, Lost, TrialRecord, Verdict

MAX_ATTEMPTS = 3
"""The first try and two more."""


def attempts(records: Iterable[TrialRecord], config: TrialConfig, *, since: int = 0) -> int:
    """Return how often ``config`` was tried and came to nothing that says something about it.

    What somebody interrupted is no attempt, however often that happens.

    Args:
        records: of one study.
        config: what was tried.
        since: number of the first trial that counts. A crash before it may have had a cause that
            is gone by now; a trial that its driver did not outlive, of which nobody could say how
            long it had run, counts for ever: it would else bring the machine down every time.
    """
    return sum(
        record.verdict in RETRYABLE
        and not record.is_interrupted
        and record.config == config
        and (
            record.number >= since
            or (record.verdict is Verdict.LOST and record.device_seconds == 0.0)
        )
        for record in records
    )


def next_number(records: Iterable[TrialRecord]) -> int:
    """Return the least number that the next trial can have: where a run of the driver begins."""
    return max((record.number + 1 for record in records), default=0)


class Ledger:
    """The finished trials of one study, in order of their numbers.

    Args:
        records: of the search, and of what measured its winners again.
    """

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        known = {record.number: record for record in records}
        self.all = tuple(known[number] for number in sorted(known))
        """Every trial, whatever it was for."""
        self.records = tuple(r for r in self.all if r.purpose == "search")
        """The trials of the search."""
        self.confirmations = tuple(r for r in self.all if r.purpose != "search")
        """What measured winners again."""
        self._tried = {r.config for r in self.records}

    def add(self, record: TrialRecord) -> None:
        """Take in a finished trial; one that is told again counts as it was told last."""
        vars(self).update(vars(Ledger((*self.all, record))))

    def on_errand(self, errand: Errand) -> tuple[TrialRecord, ...]:
        """Return the trials of one purpose and one confirmation."""
        wanted = errand.purpose, errand.series
        return tuple(record for record in self.all if (record.purpose, record.series) == wanted)

    def __contains__(self, config: object) -> bool:
        """Whether a trial of the search was of a configuration, spelled just so."""
        return config in self._tried

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
        """The least number that the search's next trial can have; see `next_number`."""
        return next_number(self.records)


def _has_failed(record: TrialRecord) -> bool:
    """Whether a trial came to nothing, and its result is not known on disk either."""
    is_kept = isinstance(record.outcome, Lost) and record.outcome.is_kept
    return record.verdict in RETRYABLE and not is_kept


def _never_concluded(records: Sequence[TrialRecord]) -> list[TrialConfig]:
    """Return the configurations that failed whenever they were tried, in that order."""
    concluded = {record.config for record in records if not _has_failed(record)}
    return [c for c in dict.fromkeys(record.config for record in records) if c not in concluded]


def _to_retry(records: Sequence[TrialRecord], *, since: int) -> tuple[TrialConfig, ...]:
    failed = [record for record in records if _has_failed(record)]
    known = _never_concluded(records)
    return tuple(c for c in known if attempts(failed, c, since=since) < MAX_ATTEMPTS)
