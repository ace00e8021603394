"""A study from its first trial to its last: the search, then the confirmation of its winner."""

from __future__ import annotations

from search_spaces.config import TrialConfig
from storage.records import Outcome, TrialRecord
from sweep.running.lanes import Lane
from sweep.sampling.encoding import Frontier, identity
from sweep.study.confirmation import Confirmation, ranking_of
from sweep.study.driver import Driver, Running, Source, Wanted
from sweep.study.events import StopReason, StudyFinished
from sweep.study.machine_faults import ConsecutiveFailures, nothing_concluded
from sweep.study.pruning import Rivals
from sweep.study.quality import Quality
from sweep.study.stopping import Spent, outlook_document


def tune(driver: Driver, *, is_anew: bool = False) -> StopReason:
    """Run a study until its trials, time or money are spent, nothing is left, or somebody asks.

    Then its winner is confirmed, unless somebody asked to stop; that is no part of the time budget.
    `trials` of the study's space is the total over all runs; its time budget is for this run alone.
    What an earlier driver left open is closed first.

    Args:
        driver: of this run.
        is_anew: whether the winner is measured again, whatever was measured of it before, and
            nothing is searched. What was begun of that and not finished goes on.

    Raises:
        EnvironmentFault: the device or the database is not to be had, trial after trial fails in
            the same way, or no trial that ran came to anything else. What was measured is stored.
    """
    study, interruption = driver.study, driver.interruption
    with driver.within_money():
        with interruption.interruptible():
            driver.recover()
            search = Search(driver)
        reason = StopReason.CONFIRMED if is_anew else driver.run(search)
        if reason is not StopReason.INTERRUPTED:
            if not is_anew:
                with interruption.interruptible():
                    study.note_end(outlook_document(reason, driver.limits.outlook(None)))
            reason = driver.run(Confirmation(driver, then=reason, is_anew=is_anew))
    driver.on_event(StudyFinished(reason))
    fault = None if is_anew else nothing_concluded(study.records())
    if fault is not None and reason is not StopReason.INTERRUPTED:
        raise fault
    return reason


class Search(Source):
    """Wants the baseline, what failed, and what the sampler chooses, until the stop rule ends it.

    A sampler that knows what is fastest before anything ran goes before the baseline: the answer
    comes the sooner.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._study, self._space = driver.study, driver.space
        self._started_seconds = driver.clock()
        self._since = driver.study.ledger.next_number
        self._frontier = Frontier(driver.encoding)
        self._quality = Quality(driver.study)
        records = driver.study.records()
        self._rivals = Rivals(
            driver.study.definition, records, confirmations=driver.study.confirmations()
        )
        self._tried = {identity(record.config) for record in records}
        """What was begun, by identity: told or running."""
        self._failures: dict[Lane, ConsecutiveFailures] = {}
        self._failed_on: dict[TrialConfig, Lane] = {}
        """Where what is tried again failed last: another lane may know better."""
        self._owed: TrialConfig | None = None
        """What is tried next, as the search would end without it."""

    def next(self, lane: Lane) -> Wanted | StopReason | None:
        """Return the next trial of the search, or why it ends."""
        reason = self._reason_to_stop()
        if reason is not None:
            return reason
        if self._is_to_wait(lane):
            return None
        quality = self._quality.command()
        # Without the tokens it is but half of what is asked.
        is_whole = quality is not None or not self._quality.is_asked
        config = self._known_next(lane)
        return Wanted(self._space.steps, config, quality=quality, leaves_result=is_whole)

    def check(self, trial: Running) -> None:
        """Say what is expected of a trial."""
        self._tried.add(identity(trial.config))
        # Now, while it may take long, and before the trial teaches anything.
        expected = self._driver.forecaster.expect(trial.config)
        trial.prediction, trial.refused = expected.record, expected.refusal
        self._set_rivals(trial)

    def _set_rivals(self, trial: Running) -> None:
        """Say what a trial has to beat; nothing where only its own end counts."""
        if trial.refused is None and not trial.is_baseline:
            trial.rivals = self._rivals.of(trial.config)

    def again(self, trial: Running, outcome: Outcome) -> Wanted | None:
        """Return the same trial where its own speed said on how many tokens all are to train."""
        epoch = self._driver.forecaster.epoch_of(trial.config)
        if not self._quality.choose(outcome, epoch):
            return None
        return Wanted(self._space.steps, trial.config, quality=self._quality.command())

    def told(self, record: TrialRecord) -> None:
        """Learn what trials have to beat from now on."""
        self._rivals.learn(record)
        for running in self._driver.running.values():
            self._set_rivals(running)

    def ended(self, lane: Lane, config: TrialConfig, outcome: Outcome | None) -> None:
        """Note where a trial failed, and whether all do on that lane."""
        self._failed_on[config] = lane
        if outcome is not None:
            self._failures.setdefault(lane, ConsecutiveFailures()).count(outcome)

    def _reason_to_stop(self) -> StopReason | None:
        """Return why no further trial should start; None where one should."""
        spent, limits = self._spent(), self._driver.limits
        reason = self._driver.reason_to_stop() or limits.out_of_time(spent)
        if reason is not None or self._to_retry():
            return reason
        if not self._has_begun(self._driver.baseline) and spent.trials < self._space.trials:
            return None
        reason = limits.out_of_trials(
            spent, is_exhausted=self._is_exhausted, records=self._study.ledger.records
        )
        if reason is StopReason.GAIN_SPENT and not self._driver.running:
            self._owed = limits.still_owed(ranking_of(self._study))
        return reason if self._owed is None else None

    def _spent(self) -> Spent:
        """Return what the search has used up, with the trials that run."""
        seconds = self._driver.clock() - self._started_seconds
        trials = self._study.ledger.trials_spent(since=self._since) + len(self._driver.running)
        return Spent(trials=trials, seconds=seconds)

    def _is_exhausted(self) -> bool:
        return self._frontier.is_exhausted(self._tried)

    def _has_begun(self, config: TrialConfig) -> bool:
        return config in self._study.ledger or config in self._running_configs()

    def _running_configs(self) -> set[TrialConfig]:
        return {trial.config for trial in self._driver.running.values()}

    def _to_retry(self) -> list[TrialConfig]:
        """Return what failed, is to be tried again, and is not at the moment."""
        running = self._running_configs()
        return [c for c in self._study.ledger.to_retry(since=self._since) if c not in running]

    def _retries(self, lane: Lane) -> list[TrialConfig]:
        """Return what a lane is to try again: what failed on it last is another's, where there is
        one.
        """
        is_alone = len(self._driver.lanes.working) == 1
        return [c for c in self._to_retry() if is_alone or self._failed_on.get(c) is not lane]

    def _is_to_wait(self, lane: Lane) -> bool:
        """Whether what a lane is to run is known only once another trial has ended."""
        if self._driver.running and self._quality.is_asked and self._quality.tokens is None:
            # The first speed says how much every trial is to learn from.
            return True
        if not self._to_retry() or self._retries(lane):
            return False
        # What is left is for another lane to try again.
        return not self._has_room() or self._is_exhausted()

    def _has_room(self) -> bool:
        """Whether trials are left beside those that are tried again."""
        return self._spent().trials + len(self._to_retry()) < self._space.trials

    def _known_next(self, lane: Lane) -> TrialConfig | None:
        """Return what is tried next; None for the sampler's choice.

        After a failure the sampler goes first, so that a fault of the machine shows as different
        configurations failing alike.
        """
        if not self._has_begun(self._driver.baseline) and not self._is_foreseen():
            return self._driver.baseline
        if retries := self._retries(lane):
            has_failed = bool(self._failures.get(lane))
            if not (has_failed and self._has_room() and not self._is_exhausted()):
                return retries[0]
        owed, self._owed = self._owed, None
        return owed

    def _is_foreseen(self) -> bool:
        """Whether the first trial is the fastest that is foreseen, and a second may follow."""
        if self._quality.is_asked or self._study.ledger.records or self._driver.running:
            # The baseline's speed says how much every trial is to learn from.
            return False
        is_guided = self._space.sampler == "guided" and self._driver.forecaster.predicts_speed
        return is_guided and self._space.trials > 1
