"""What a driver asks of its study's finished trials: which are known, and what is tried again."""

from __future__ import annotations

from collections.abc import Iterable

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import RETRYABLE, Errand, Lost, TrialRecord, Verdict

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


class _Failures:
    """The configurations that failed whenever some trials tried them."""

    def __init__(self) -> None:
        self.final = 0
        """How many of the trials did not fail."""
        self._failed: dict[TrialConfig, list[TrialRecord]] = {}
        """Trials of each, in the order in which they were first tried."""
        self._concluded: set[TrialConfig] = set()

    def add(self, record: TrialRecord) -> None:
        """Take in a trial whose number is larger than any before."""
        config = record.config
        if not _has_failed(record):
            self.final += 1
            self._concluded.add(config)
            self._failed.pop(config, None)
        elif config not in self._concluded:
            self._failed.setdefault(config, []).append(record)

    def to_retry(self, *, since: int) -> tuple[TrialConfig, ...]:
        """Return what failed fewer times than it may; see `Ledger.to_retry`."""
        return tuple(
            config
            for config, failed in self._failed.items()
            if attempts(failed, config, since=since) < MAX_ATTEMPTS
        )

    def trials_spent(self, *, since: int) -> int:
        """Return how many trials are spent; see `Ledger.trials_spent`."""
        return self.final + len(self._failed) - len(self.to_retry(since=since))


class Ledger:
    """The finished trials of one study, in order of their numbers.

    What a driver asks after each trial takes as long at ten thousand trials as at ten.

    Args:
        records: of the search, and of what measured its winners again.
    """

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self._all: list[TrialRecord] = []
        self._search: list[TrialRecord] = []
        self._confirmations: list[TrialRecord] = []
        self._of_config: dict[TrialConfig, list[TrialRecord]] = {}
        """Every trial of a configuration."""
        self._searched = _Failures()
        self._own = _Failures()
        """Without what another study ran."""
        known = {record.number: record for record in records}
        for number in sorted(known):
            self._append(known[number])

    @property
    def all(self) -> tuple[TrialRecord, ...]:
        """Every trial, whatever it was for."""
        return tuple(self._all)

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        """The trials of the search."""
        return tuple(self._search)

    @property
    def confirmations(self) -> tuple[TrialRecord, ...]:
        """What measured winners again."""
        return tuple(self._confirmations)

    def add(self, record: TrialRecord) -> None:
        """Take in a finished trial; one that is told again counts as it was told last."""
        if self._all and record.number <= self._all[-1].number:
            vars(self).update(vars(Ledger((*self._all, record))))
        else:
            self._append(record)

    def _append(self, record: TrialRecord) -> None:
        """Take in a trial whose number is larger than any before."""
        self._all.append(record)
        self._of_config.setdefault(record.config, []).append(record)
        if record.purpose != "search":
            self._confirmations.append(record)
            return
        self._search.append(record)
        self._searched.add(record)
        if record.carried is None:
            self._own.add(record)

    def attempts(self, config: TrialConfig, errand: Errand) -> int:
        """Return how often ``config`` was tried on an errand; see `attempts`."""
        wanted = (errand.purpose, errand.series)
        tried = self._of_config.get(config, ())
        return attempts((r for r in tried if (r.purpose, r.series) == wanted), config)

    def __contains__(self, config: TrialConfig) -> bool:
        """Whether a trial of the search was of a configuration, spelled just so."""
        tried = self._of_config.get(config, ())
        return any(record.purpose == "search" for record in tried)

    def to_retry(self, *, since: int = 0) -> tuple[TrialConfig, ...]:
        """Return what came to nothing, fewer than three times, and never concluded.

        In the order in which it was first tried.

        Args:
            since: number of the first trial of this run: an earlier run's failures are tried anew.
        """
        return self._searched.to_retry(since=since)

    def trials_spent(self, *, since: int = 0) -> int:
        """Return how many of the study's trials are spent: all but those that are tried again.

        What another study ran is none of them. A configuration that failed as often as it may
        counts once.

        Args:
            since: number of the first trial of this run, which tries anew what failed in earlier
                ones.
        """
        return self._own.trials_spent(since=since)

    @property
    def next_number(self) -> int:
        """The least number that the search's next trial can have; see `next_number`."""
        return next_number(self._search[-1:])


def _has_failed(record: TrialRecord) -> bool:
    """Whether a trial came to nothing, and its result is not known on disk either."""
    is_kept = isinstance(record.outcome, Lost) and record.outcome.is_kept
    return record.verdict in RETRYABLE and not is_kept
