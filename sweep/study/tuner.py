"""A study from its first trial to its last: the search, then the confirmation of its winner."""

from __future__ import annotations

import statistics
from functools import cached_property

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import Outcome, TrialRecord, Verdict
from qlora_sweep.sweep.running.runner import Lane
from qlora_sweep.sweep.sampling.encoding import Frontier, identity
from qlora_sweep.sweep.study.confirmation import Confirmation, Plan, ranking_of
from qlora_sweep.sweep.study.driver import Driver, Source, Wanted, quality_command, tokens_of
from qlora_sweep.sweep.study.events import StopReason, StudyFinished
from qlora_sweep.sweep.study.stopping import (
    ConsecutiveFailures,
    Rivals,
    nothing_concluded,
    outlook_document,
)


def tune(driver: Driver, *, is_anew: bool = False) -> StopReason:
    """Run a study until its trials, time or money are spent, nothing is left, or somebody asks.

    Then its winner is confirmed, unless somebody asked to stop. That is a part of the time budget,
    and of the money, of which the search leaves as much as it may take, up to a third. `trials` of
    the study's space is the total over all runs; its time budget is for this run alone. What an
    earlier driver left open is closed first.

    Args:
        driver: of this run.
        is_anew: whether the winner is measured again, whatever was measured of it before, and
            nothing is searched. What was begun of that and not finished goes on.

    Raises:
        InputError: the time budget is too short for one trial; nothing was begun.
        EnvironmentFault: the device or the database is not to be had, trial after trial fails in
            the same way, or no trial that ran came to anything else. What was measured is stored.
    """
    study, interruption = driver.study, driver.interruption
    with driver.within_time():
        with interruption.interruptible():
            driver.recover()
            search = Search(driver)
        reason = StopReason.CONFIRMED if is_anew else driver.run(search)
        if reason is not StopReason.INTERRUPTED:
            if not is_anew:
                with interruption.interruptible():
                    limits = driver.limits
                    found = outlook_document(
                        reason, limits.outlook(None), limits.unmeasured_classes()
                    )
                    study.note(ended=found)
            reason = driver.run(Confirmation(driver, then=reason, is_anew=is_anew))
    driver.on_event(StudyFinished(reason))
    fault = None if is_anew else nothing_concluded(study.records())
    if fault is not None and reason is not StopReason.INTERRUPTED:
        raise fault
    return reason


class Search(Source):
    """Wants what the sampler chooses, what failed, and the baseline, until the stop rule ends it.

    The baseline is no part of a guided search that is followed by a confirmation, which measures it
    beside the winner. Any other search begins with it, or has it second, where the sampler knows
    what is fastest before anything ran.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._study, self._space = driver.study, driver.space
        self._since = driver.study.ledger.next_number
        # The guided sampler alone never asks for what a rule forbids.
        rules = driver.forecaster.is_valid if self._space.sampler == "guided" else None
        self._frontier = Frontier(driver.encoding, is_asked_for=rules)
        self._tokens: int | None = None
        records = driver.study.records()
        self._rivals = Rivals(
            driver.study.definition, records, confirmations=driver.study.confirmations()
        )
        self._tried = {identity(record.config) for record in records}
        """What was begun, by identity: told or running."""
        self._failures: dict[Lane, ConsecutiveFailures] = {}
        self._failed_on: dict[TrialConfig, Lane] = {}
        """Where what is tried again failed last: another lane may know better."""

    def next(self, lane: Lane) -> Wanted | StopReason | None:
        """Return the next trial of the search, or why it ends.

        After a failure the sampler goes first, so that a fault of the machine shows as different
        configurations failing alike.
        """
        driver, space, ledger = self._driver, self._space, self._study.ledger
        running = {trial.record.config for trial in driver.lanes.running.values()}
        self._tried |= {identity(config) for config in running}
        self._tokens = self._tokens or tokens_of(self._study)
        lacks_baseline = driver.baseline not in ledger and driver.baseline not in running
        to_retry = [c for c in ledger.to_retry(since=self._since) if c not in running]
        spent = ledger.trials_spent(since=self._since) + len(running)
        kept_seconds = self._kept_seconds()
        reason, config = self._reason_to_stop(spent, lacks_baseline, to_retry)
        if reason is None and self._is_late(kept_seconds):
            reason = driver.time.reason
        if reason is not None:
            return reason
        if running and driver.asks_for_loss and self._tokens is None:
            # The first speed says how much every trial is to learn from.
            return None
        # What failed on a lane last is another's to try again, where there is one.
        is_alone = len(driver.lanes.working) == 1
        retries = [c for c in to_retry if is_alone or self._failed_on.get(c) is not lane]
        if to_retry and (not retries or self._failures.get(lane)):
            has_room = spent + len(to_retry) < space.trials and not self._is_exhausted()
            if not has_room and not retries:
                return None
            retries = [] if has_room else retries
        if lacks_baseline and not self._is_left_to_confirm and not self._is_foreseen():
            config = driver.baseline
        elif retries:
            config = retries[0]
        quality = quality_command(space, tokens=self._tokens)
        return Wanted(
            space.steps, config, quality=quality, rivals=self._rivals, kept_seconds=kept_seconds
        )

    def told(self, record: TrialRecord) -> None:
        """Learn what trials have to beat from now on."""
        self._tried.add(identity(record.config))
        self._rivals.learn([record])

    def ended(self, lane: Lane, config: TrialConfig, outcome: Outcome | None) -> None:
        """Note where a trial failed, and whether all do on that lane."""
        self._failed_on[config] = lane
        if outcome is not None:
            self._failures.setdefault(lane, ConsecutiveFailures()).count(outcome)

    def _reason_to_stop(
        self, spent: int, lacks_baseline: bool, to_retry: list[TrialConfig]
    ) -> tuple[StopReason | None, TrialConfig | None]:
        """Return why no further trial should start, None where one should; and what is owed one, as
        the search would end without it."""
        driver, limits = self._driver, self._driver.limits
        reason = driver.reason_to_stop()
        if reason is not StopReason.INTERRUPTED and not driver.has_launched:
            # Where nothing is left to be tried, no time was needed.
            reason = None
        if reason is not None or to_retry:
            return reason, None
        if lacks_baseline and not self._is_left_to_confirm and spent < self._space.trials:
            return None, None
        records = self._study.ledger.records
        reason = limits.out_of_trials(spent, is_exhausted=self._is_exhausted, records=records)
        is_done = reason in (StopReason.GAIN_SPENT, StopReason.EXHAUSTED)
        if is_done and lacks_baseline and all(r.verdict is not Verdict.FITS for r in records):
            # Nothing will be confirmed: whether the baseline fits is asked here.
            return None, driver.baseline
        may_be_owed = reason in (None, StopReason.GAIN_SPENT) and not driver.lanes.running
        if may_be_owed and limits.is_little_left(records):
            owed = limits.still_owed(ranking_of(self._study))
            return reason if owed is None else None, owed
        return reason, None

    def _kept_seconds(self) -> float:
        """Return how much of the run's time is kept for confirming what is the winner now."""
        time, budget = self._driver.time, self._space.confirm
        if not time.is_limited or budget is None:
            return 0.0
        ranking = ranking_of(self._study)
        if ranking.winner is None:
            return 0.0
        plan = Plan(ranking, budget, ranking.confirmations.newest + 1)
        return time.kept_seconds(
            least_seconds=plan.least_seconds, full_seconds=plan.expected_seconds
        )

    def _is_late(self, kept_seconds: float) -> bool:
        """Whether another trial would be cut short, as long as trials take in the median."""
        if not self._driver.time.is_limited:
            return False
        ran = [record.run_seconds for record in self._study.records() if record.device_seconds]
        usual_seconds = statistics.median(ran) if ran else 0.0
        return self._driver.time.left_seconds - kept_seconds <= usual_seconds

    @cached_property
    def _is_left_to_confirm(self) -> bool:
        """Whether the confirmation alone measures the baseline; what is refused costs nothing."""
        driver = self._driver
        space = self._space
        # Where money ends the search there is no confirmation.
        is_needed = space.confirm is None or space.max_dollars is not None or driver.asks_for_loss
        is_needed |= not self._is_guided
        return not is_needed and not driver.forecaster.expect(driver.baseline).is_refused

    @property
    def _is_guided(self) -> bool:
        return self._space.sampler == "guided" and self._driver.forecaster.speed is not None

    def _is_exhausted(self) -> bool:
        return self._frontier.is_exhausted(self._tried)

    def _is_foreseen(self) -> bool:
        """Whether the first trial is the fastest that is foreseen, and a second may follow."""
        if self._driver.asks_for_loss or self._study.ledger.records or self._driver.lanes.running:
            # The baseline's speed says how much every trial is to learn from.
            return False
        return self._is_guided and self._space.trials > 1
