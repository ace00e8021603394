"""What a driver asks of its study's finished trials: which are known, and what is tried again."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import RETRYABLE, Lost, RunKind, TrialRecord, Verdict

MAX_ATTEMPTS = 3
"""The first try and two more."""
_number = attrgetter("number")


def attempts(records: Iterable[TrialRecord], config: TrialConfig, *, since: int = 0) -> int:
    """Return how often ``config`` was tried and failed without a result.

    What somebody interrupted is no attempt, however often that happens.

    Args:
        records: of one study.
        config: what was tried.
        since: number of the first trial that counts. A crash before it may have had a cause that
            is gone by now; a trial that its driver did not outlive, of which it is unknown how
            long it had run, counts for ever: it would else bring the machine down every time.
    """
    failed = 0
    for record in records:
        if record.verdict not in RETRYABLE or record.is_interrupted or record.config != config:
            continue
        is_unexplained = record.verdict is Verdict.LOST and record.device_seconds == 0.0
        if record.number >= since or is_unexplained:
            failed += 1
    return failed


def next_number(records: Iterable[TrialRecord]) -> int:
    """Return the least number that the next trial can have: where a run of the driver begins."""
    return max(map(_number, records), default=-1) + 1


class _Failures:
    """The configurations that failed whenever some trials tried them."""

    def __init__(self) -> None:
        self.final = 0
        """How many of the trials did not fail."""
        self._failed: dict[TrialConfig, list[TrialRecord]] = {}
        self._concluded: set[TrialConfig] = set()

    def add(self, record: TrialRecord) -> None:
        """Take in a trial, whatever its number."""
        config = record.config
        if not _has_failed(record):
            self.final += 1
            self._concluded.add(config)
            self._failed.pop(config, None)
        elif config not in self._concluded:
            self._failed.setdefault(config, []).append(record)

    def to_retry(self, *, since: int) -> tuple[TrialConfig, ...]:
        """Return what failed fewer times than it may; see `Ledger.to_retry`."""
        first_tried = {}
        for config, failed in self._failed.items():
            if attempts(failed, config, since=since) < MAX_ATTEMPTS:
                first_tried[config] = min(record.number for record in failed)
        return tuple(sorted(first_tried, key=lambda config: first_tried[config]))

    def trials_spent(self, *, since: int) -> int:
        """Return how many trials are spent; see `Ledger.trials_spent`."""
        return self.final + len(self._failed) - len(self.to_retry(since=since))


class TrialLedger:
    """The finished trials of one study, in order of their numbers.

    Args:
        records: of the search, and of what measured its winners again.
    """

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self._all: list[TrialRecord] = []
        self._search: list[TrialRecord] = []
        self._confirmations: list[TrialRecord] = []
        self._numbers: set[int] = set()
        self._of_config: dict[TrialConfig, list[TrialRecord]] = {}
        """Every trial of a configuration."""
        self._searched = _Failures()
        self._searched_here = _Failures()
        """Without what another study ran."""
        for record in records:
            self.add(record)

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
        """Take in a finished trial; one that is told again counts as it was told last.

        Trials of several lanes end in any order: each is put in its place, and only one that is
        told again makes the ledger anew.
        """
        if record.number in self._numbers:
            others = [known for known in self._all if known.number != record.number]
            vars(self).update(vars(TrialLedger(others)))
        self._numbers.add(record.number)
        insort(self._all, record, key=_number)
        self._of_config.setdefault(record.config, []).append(record)
        if record.purpose != "search":
            insort(self._confirmations, record, key=_number)
            return
        insort(self._search, record, key=_number)
        self._searched.add(record)
        if record.carried is None:
            self._searched_here.add(record)

    def attempts(self, config: TrialConfig, run_kind: RunKind) -> int:
        """Return how often ``config`` was run in this way; see `attempts`."""
        wanted = (run_kind.purpose, run_kind.series)
        tried = self._of_config.get(config, ())
        alike = [record for record in tried if (record.purpose, record.series) == wanted]
        return attempts(alike, config)

    def __contains__(self, config: TrialConfig) -> bool:
        """Whether a trial of the search was of a configuration, spelled just so."""
        return any(record.purpose == "search" for record in self._of_config.get(config, ()))

    def to_retry(self, *, since: int = 0) -> tuple[TrialConfig, ...]:
        """Return what failed fewer than three times, and never concluded.

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
        return self._searched_here.trials_spent(since=since)

    @property
    def next_number(self) -> int:
        """The least number that the search's next trial can have; see `next_number`."""
        return next_number(self._search[-1:])


def _has_failed(record: TrialRecord) -> bool:
    """Whether a trial failed, and its result is not on disk either."""
    is_kept = isinstance(record.outcome, Lost) and record.outcome.is_kept
    return record.verdict in RETRYABLE and not is_kept
