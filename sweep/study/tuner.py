"""A study from its first trial to its last: the search, then the confirmation of its winner."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import Outcome, TrialRecord, Verdict
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.sweep.running.runner import Lane
from qlora_sweep.sweep.sampling.encoding import Frontier, identity
from qlora_sweep.sweep.study.confirmation import Confirmation, ranking_of
from qlora_sweep.sweep.study.confirmation_plan import SOAKS_MAX, ConfirmationPlan
from qlora_sweep.sweep.study.driver import Driver, TrialSource, Wanted, quality_command, tokens_of
from qlora_sweep.sweep.study.events import StopReason, StudyFinished
from qlora_sweep.sweep.study.stopping import (
    ConsecutiveFailures,
    Rivals,
    nothing_concluded,
    outlook_document,
)


def tune(driver: Driver, *, is_anew: bool = False) -> StopReason:
    """Run a study until its trials, time or money are spent, nothing is left, or somebody asks.

    Then its winner is confirmed, unless somebody asked to stop; where it does not hold and nothing
    else that was tried fits, the search goes on. That is a part of the time budget,
    and of the money, of which the search leaves as much as it may take, up to a third. `trials` of
    the study's space is the total over all runs; its time budget is for this run alone. What an
    earlier driver left open is closed first.

    Args:
        driver: of this run.
        is_anew: whether the winner is measured again, whatever was measured of it before, and
            nothing is searched. What was begun of that and not finished is resumed.

    Raises:
        InputError: the time budget is too short for one trial; nothing was begun.
        EnvironmentFault: the device or the database is not to be had, trial after trial fails in
            the same way, or no trial that ran came to anything else. What was measured is stored.
    """
    with driver.within_time():
        with driver.interruption.interruptible():
            driver.recover()
        if is_anew:
            confirmation = Confirmation(driver, then=StopReason.CONFIRMED, is_anew=True)
            reason = driver.run(confirmation)
        else:
            reason = _searched(driver)
            while reason is StopReason.GAIN_SPENT and _has_lost_all(driver.study):
                tried = len(driver.study.records())
                reason = _searched(driver)
                if len(driver.study.records()) == tried:
                    break
    driver.on_event(StudyFinished(reason))
    fault = None if is_anew else nothing_concluded(driver.study.records())
    if fault is not None and reason is not StopReason.INTERRUPTED:
        raise fault
    return reason


def _searched(driver: Driver) -> StopReason:
    """Search until nothing is to be gained, and confirm the winner."""
    with driver.interruption.interruptible():
        search = Search(driver)
    reason = driver.run(search)
    if reason is StopReason.INTERRUPTED:
        return reason
    with driver.interruption.interruptible():
        driver.study.note(ended=_outlook(driver, reason))
    return driver.run(Confirmation(driver, then=reason, is_anew=False))


def _has_lost_all(study: OpenStudy) -> bool:
    """Whether what was the winner did not hold where it was measured longer, and nothing else that
    was tried fits."""
    ranking = ranking_of(study)
    fallen = ranking.confirmations.fallen
    return ranking.winner is None and 0 < len(fallen) < SOAKS_MAX


def _outlook(driver: Driver, reason: StopReason) -> dict[str, Any]:
    """Return what a search that ended leaves unmeasured, as it is stored."""
    limits = driver.limits
    return outlook_document(reason, limits.outlook(None), limits.unmeasured_classes())


@dataclass(frozen=True)
class _Work:
    """What a run of a search has begun, and which trials are open."""

    running: set[TrialConfig]
    spent: int
    """Trials that were begun, those that run among them."""
    lacks_baseline: bool
    """Whether the baseline was not begun yet."""
    to_retry: list[TrialConfig]
    """What failed and is to be tried again."""


def _any_fits(records: Sequence[TrialRecord]) -> bool:
    return any(record.verdict is Verdict.FITS for record in records)


class Search(TrialSource):
    """Wants what the sampler chooses, what failed, and the baseline, until the stop rule ends it.

    The baseline is no part of a guided search that is followed by a confirmation, which measures it
    beside the winner. Any other search begins with it, or has it second, where the sampler knows
    what is fastest before anything ran.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._study = driver.study
        self._space = driver.space
        self._since = driver.study.ledger.next_number
        # The guided sampler alone never asks for what a rule forbids.
        rules = driver.forecaster.is_valid if self._space.sampler == "guided" else None
        self._frontier = Frontier(driver.encoding, is_asked_for=rules)
        self._tokens: int | None = None
        records = driver.study.records()
        self._rivals = Rivals(
            driver.study.definition, records, confirmations=driver.study.confirmations()
        )
        self._tried: set[str] = set()
        """What was begun, by identity: told or running."""
        for record in records:
            self._tried.add(identity(record.config))
        self._failures: dict[Lane, ConsecutiveFailures] = {}
        self._failed_on: dict[TrialConfig, Lane] = {}
        """Where what is tried again failed last: another lane may know better."""

    def next(self, lane: Lane) -> Wanted | StopReason | None:
        """Return the next trial of the search, or why it ends.

        After a failure the sampler goes first, so that a fault of the machine shows as different
        configurations failing alike.
        """
        driver = self._driver
        work = self._work()
        self._tried.update(map(identity, work.running))
        if self._tokens is None:
            self._tokens = tokens_of(self._study)
        kept_seconds = self._kept_seconds()
        decision = self._reason_to_stop(work)
        if isinstance(decision, StopReason):
            return decision
        if self._is_late(kept_seconds):
            return driver.time.reason
        if work.running and driver.asks_for_loss and self._tokens is None:
            # The first speed says how much every trial is to learn from.
            return None
        retries = self._retries_on(lane, work)
        if work.to_retry and (not retries or self._failures.get(lane)):
            if self._has_room_beside(work):
                retries = []
            elif not retries:
                return None
        config = decision
        if self._wants_baseline(work):
            config = driver.baseline
        elif retries:
            config = retries[0]
        return Wanted(
            self._space.steps,
            config,
            quality=quality_command(self._space, tokens=self._tokens),
            rivals=self._rivals,
            kept_seconds=kept_seconds,
        )

    def _work(self) -> _Work:
        """Return what this run has begun, and which trials are open."""
        ledger = self._study.ledger
        running = {trial.record.config for trial in self._driver.lanes.running.values()}
        failed = ledger.to_retry(since=self._since)
        baseline = self._driver.baseline
        return _Work(
            running=running,
            spent=ledger.trials_spent(since=self._since) + len(running),
            lacks_baseline=baseline not in ledger and baseline not in running,
            to_retry=[config for config in failed if config not in running],
        )

    def _wants_baseline(self, work: _Work) -> bool:
        """Whether the baseline is to be measured next."""
        if not work.lacks_baseline or self._is_left_to_confirm:
            return False
        return not self._is_predicted_fastest()

    def _retries_on(self, lane: Lane, work: _Work) -> list[TrialConfig]:
        """Return what a lane may try again: what failed on it last is another's, where there is
        one."""
        if len(self._driver.lanes.working) == 1:
            return work.to_retry
        return [config for config in work.to_retry if self._failed_on.get(config) is not lane]

    def _has_room_beside(self, work: _Work) -> bool:
        """Whether another trial may run beside those that are to be tried again."""
        return work.spent + len(work.to_retry) < self._space.trials and not self._is_exhausted()

    def told(self, record: TrialRecord) -> None:
        """Learn what trials have to beat from now on."""
        self._tried.add(identity(record.config))
        self._rivals.learn([record])

    def ended(self, lane: Lane, config: TrialConfig, outcome: Outcome | None) -> None:
        """Note where a trial failed, and whether all do on that lane."""
        self._failed_on[config] = lane
        if outcome is not None:
            self._failures.setdefault(lane, ConsecutiveFailures()).count(outcome)

    def _reason_to_stop(self, work: _Work) -> StopReason | TrialConfig | None:
        """Return why no further trial should start; or a configuration that is to be tried before
        the search may end, or None for whatever is next."""
        driver = self._driver
        limits = driver.limits
        reason = driver.reason_to_stop()
        if reason is StopReason.INTERRUPTED:
            return reason
        if reason is not None and driver.has_launched:
            return reason
        # Where nothing is left to be tried, no time was needed.
        if work.to_retry:
            return None
        has_trials = work.spent < self._space.trials
        if work.lacks_baseline and not self._is_left_to_confirm and has_trials:
            return None
        records = self._study.ledger.records
        reason = limits.out_of_trials(work.spent, is_exhausted=self._is_exhausted, records=records)
        is_done = reason in (StopReason.GAIN_SPENT, StopReason.EXHAUSTED)
        if is_done and work.lacks_baseline and not _any_fits(records):
            # Nothing will be confirmed: whether the baseline fits is asked here.
            return driver.baseline
        may_be_owed = reason in (None, StopReason.GAIN_SPENT) and not driver.lanes.running
        if may_be_owed and limits.is_little_left(records):
            owed = limits.still_owed(ranking_of(self._study))
            if owed is not None:
                return owed
        return reason

    def _kept_seconds(self) -> float:
        """Return how much of the run's time is kept for confirming what is the winner now."""
        time = self._driver.time
        budget = self._space.confirm
        if not time.is_limited or budget is None:
            return 0.0
        ranking = ranking_of(self._study)
        if ranking.winner is None:
            return 0.0
        plan = ConfirmationPlan(ranking, budget, ranking.confirmations.newest + 1)
        return time.kept_seconds(
            least_seconds=plan.least_seconds, full_seconds=plan.expected_seconds
        )

    def _is_late(self, kept_seconds: float) -> bool:
        """Whether another trial would be cut short, as long as trials take in the median."""
        if not self._driver.time.is_limited:
            return False
        seconds = [record.run_seconds for record in self._study.records() if record.device_seconds]
        usual_seconds = 0.0
        if seconds:
            usual_seconds = statistics.median(seconds)
        return self._driver.time.left_seconds - kept_seconds <= usual_seconds

    @cached_property
    def _is_left_to_confirm(self) -> bool:
        """Whether the confirmation alone measures the baseline; what is refused costs nothing."""
        driver = self._driver
        space = self._space
        # Where money ends the search there is no confirmation.
        if space.confirm is None or space.max_dollars is not None:
            return False
        if driver.asks_for_loss or not self._is_guided:
            return False
        return not driver.forecaster.expect(driver.baseline).is_refused

    @property
    def _is_guided(self) -> bool:
        return self._space.sampler == "guided" and self._driver.forecaster.speed is not None

    def _is_exhausted(self) -> bool:
        return self._frontier.is_exhausted(self._tried)

    def _is_predicted_fastest(self) -> bool:
        """Whether the first trial is the fastest that is predicted, and a second may follow."""
        if self._driver.asks_for_loss or self._study.ledger.records or self._driver.lanes.running:
            # The baseline's speed says how much every trial is to learn from.
            return False
        return self._is_guided and self._space.trials > 1
