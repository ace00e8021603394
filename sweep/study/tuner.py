"""Owns the loop of a study: ask, pre-flight, run, tell, stop; on as many lanes as there are.

Knows nothing of processes, databases, samplers or terminals: each is handed in. Whatever runs
beside it, the study is asked and told by one thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from optuna.trial import Trial

from search_spaces.config import TrialConfig
from search_spaces.errors import CardLost, EnvironmentFault, words_of
from storage.records import (
    Attempt,
    Outcome,
    OutOfMemory,
    PredictionRecord,
    TrialRecord,
    held_to_budget,
)
from storage.study import OpenStudy
from sweep.running.lanes import Ended, Lane, Lanes
from sweep.running.runner import Runner
from sweep.running.wire import Progress, TrialRequest
from sweep.sampling.encoding import Encoding, Frontier, identity
from sweep.study.confirmation import closing_what_never_ran, confirm, ranking_of
from sweep.study.events import (
    LaneLost,
    Listener,
    StopReason,
    StudyFinished,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from sweep.study.interruption import Interruption
from sweep.study.machine_faults import (
    ConsecutiveFailures,
    lost_with_the_card,
    nothing_concluded,
    run_undisturbed,
)
from sweep.study.preflight import Expected, Preflight
from sweep.study.pruning import Rival, Rivals, is_hopeless
from sweep.study.quality import Quality
from sweep.study.stopping import Spent, Stopping, outlook_document


def tune(
    study: OpenStudy,
    *,
    runner: Runner | Lanes,
    preflight: Preflight,
    stopping: Stopping | None = None,
    clock: Callable[[], float] = time.monotonic,
    on_event: Listener = lambda _: None,
    interruption: Interruption | None = None,
) -> StopReason:
    """Run a study until its trials, time or money are spent, nothing is left, or somebody asks.

    Then its winner is confirmed, unless somebody asked to stop; that is no part of the time budget.
    `trials` of the study's space is the total over all runs; its time budget is for this run alone.

    Args:
        study: open, under its lease; what an earlier driver left open is closed first.
        runner: runs configurations, one at a time, or as many as it has lanes. A lane that is lost
            retires, and its trial is tried again on another; the study ends with the last one.
        preflight: spares the device what cannot be valid or cannot fit.
        stopping: says when the search ends; by default its trials and its time do.
        clock: seconds; only differences count.
        on_event: hears of everything that happens.
        interruption: whether somebody asked to stop. What runs then is ended by whoever asks; what
            is being chosen or checked is cut short, and what was begun is closed.

    Raises:
        EnvironmentFault: the device or the database is not to be had, trial after trial fails in
            the same way, or no trial that ran came to anything else. What was measured is stored.
    """
    stopping = stopping or Stopping(study.definition.space)
    interruption = interruption or Interruption()
    driver = _Driver(study, Lanes.of(runner), preflight, stopping, clock, on_event, interruption)
    with interruption.interruptible():
        driver.recover()
    reason = driver.search()
    with interruption.interruptible():
        driver.end(reason)
    if reason is not StopReason.INTERRUPTED and not driver.confirm():
        reason = StopReason.INTERRUPTED
    on_event(StudyFinished(reason))
    fault = nothing_concluded(study.records())
    if fault is not None and reason is not StopReason.INTERRUPTED:
        raise fault
    return reason


def confirm_anew(
    study: OpenStudy,
    *,
    runner: Runner | Lanes,
    preflight: Preflight,
    stopping: Stopping | None = None,
    clock: Callable[[], float] = time.monotonic,
    on_event: Listener = lambda _: None,
    interruption: Interruption | None = None,
) -> StopReason:
    """Measure a study's winner again, whatever was measured of it before, and search no further.

    What was begun of that and not finished goes on. Arguments and errors are those of `tune`.
    """
    stopping = stopping or Stopping(study.definition.space)
    interruption = interruption or Interruption()
    driver = _Driver(study, Lanes.of(runner), preflight, stopping, clock, on_event, interruption)
    with interruption.interruptible():
        driver.recover()
    reason = StopReason.CONFIRMED if driver.confirm(is_anew=True) else StopReason.INTERRUPTED
    on_event(StudyFinished(reason))
    return reason


@dataclass
class _OpenTrial:
    """A trial between ask and tell, with what is expected of it."""

    handle: Trial
    expected: Expected
    is_baseline: bool
    attempt: int
    begun: Attempt
    started_seconds: float
    prediction: PredictionRecord | None = None
    refused: Outcome | None = None
    """The verdict that spares the device the trial; None where only running it tells."""
    rivals: tuple[Rival, ...] = ()
    """What it has to beat; more once another that ran beside it has ended."""
    device_seconds: float | None = None
    """None for a trial that was never launched."""
    lane: str = ""
    """Where it runs, where there are several places."""

    @property
    def config(self) -> TrialConfig:
        """What is tried."""
        return self.expected.config


@dataclass
class _Driver:
    """One run of a study."""

    study: OpenStudy
    lanes: Lanes
    preflight: Preflight
    stopping: Stopping
    clock: Callable[[], float]
    on_event: Listener
    interruption: Interruption
    _since: int = 0
    """Number of this run's first trial."""
    _running: dict[Lane, _OpenTrial] = field(default_factory=dict)
    _failures: dict[Lane, ConsecutiveFailures] = field(default_factory=dict)
    _failed_on: dict[TrialConfig, Lane] = field(default_factory=dict)
    """Where what is tried again failed last: another lane may know better."""
    _owed: TrialConfig | None = None
    """What is tried next, as the search would end without it."""

    def __post_init__(self) -> None:
        self._space = self.study.definition.space
        self._baseline = self._space.baseline_config()
        self._encoding = Encoding(self._space)
        self._frontier = Frontier(self._encoding)
        self._started_seconds = self._counted_seconds = self.clock()
        self._earlier_card_seconds = self.study.card_seconds()
        self._tried: set[str] = set()
        self._quality = Quality(self.study)

    def recover(self) -> None:
        """Close what an earlier driver left open, and learn from what it found out."""
        self.study.recover()
        records, confirmed = self.study.records(), self.study.confirmations()
        self._since = self.study.ledger.next_number
        self._rivals = Rivals(self.study.definition, records, confirmations=confirmed)
        self._tried = {identity(record.config) for record in records}
        self.preflight.learn_all(records)
        self.preflight.learn_all(r for r in confirmed if isinstance(r.outcome, OutOfMemory))

    def search(self) -> StopReason:
        """Run trial after trial, and return why that stopped."""
        try:
            try:
                return self._go_on()
            except KeyboardInterrupt:
                self._await_running()
                return StopReason.INTERRUPTED
        except EnvironmentFault:
            self._keep_running()
            raise

    def _go_on(self) -> StopReason:
        while True:
            reason = self.fill()
            if not self._running:
                assert reason is not None, "what has nothing to run says why"
                return reason
            self.conclude(self.lanes.next_end())

    def fill(self) -> StopReason | None:
        """Give every idle lane a trial; return why no more are begun, None where all are busy."""
        for lane in self.lanes.idle:
            while lane not in self._running:
                with closing_what_never_ran(self.study, besides=self._numbers):
                    with self.interruption.interruptible():
                        begun = self.begin_next(lane)
                    if begun is None:
                        break
                    if isinstance(begun, StopReason):
                        return begun
                    if begun.refused is None:
                        self.launch(begun, lane)
                if begun.refused is not None:
                    with self.interruption.settling():
                        self.tell(begun, begun.refused)
        return None

    def begin_next(self, lane: Lane) -> _OpenTrial | StopReason | None:
        """Choose, begin and check the next trial of a lane; or return why there is none.

        Returns:
            None where there may be one once another has ended.
        """
        reason = self.reason_to_stop()
        if reason is not None:
            return reason
        if self._is_to_wait(lane):
            return None
        trial = self.ask(lane)
        self.check(trial)
        return trial

    def reason_to_stop(self) -> StopReason | None:
        """Return why no further trial should start; None where one should."""
        if self.interruption.is_requested():
            return StopReason.INTERRUPTED
        spent = self._spent()
        reason = self.stopping.out_of_time(spent)
        if reason is not None or self._to_retry():
            return reason
        if not self._has_begun(self._baseline) and spent.trials < self._space.trials:
            return None
        reason = self.stopping.out_of_trials(
            spent, is_exhausted=self._is_exhausted, records=self.study.ledger.records
        )
        if reason is StopReason.GAIN_SPENT and not self._running:
            self._owed = self.stopping.still_owed(ranking_of(self.study))
        return reason if self._owed is None else None

    def _spent(self) -> Spent:
        """Return what the search has used up, with the trials that run."""
        ledger, now = self.study.ledger, self.clock()
        return Spent(
            trials=ledger.trials_spent(since=self._since) + len(self._running),
            seconds=now - self._started_seconds,
            card_seconds_of_study=self._earlier_card_seconds
            + self.study.cards * (now - self._started_seconds),
        )

    def _to_retry(self) -> list[TrialConfig]:
        """Return what failed, is to be tried again, and is not at the moment."""
        running = {trial.config for trial in self._running.values()}
        return [c for c in self.study.ledger.to_retry(since=self._since) if c not in running]

    def _retries(self, lane: Lane) -> list[TrialConfig]:
        """Return what a lane is to try again: what failed on it last is another's, where there is
        one.
        """
        is_alone = len(self.lanes.working) == 1
        return [c for c in self._to_retry() if is_alone or self._failed_on.get(c) is not lane]

    def _has_begun(self, config: TrialConfig) -> bool:
        running = (trial.config for trial in self._running.values())
        return config in self.study.ledger or config in running

    def _is_to_wait(self, lane: Lane) -> bool:
        """Whether what a lane is to run is known only once another trial has ended."""
        if self._running and self._quality.is_asked and self._quality.tokens is None:
            # The first speed says how much every trial is to learn from.
            return True
        if not self._to_retry() or self._retries(lane):
            return False
        # What is left is for another lane to try again.
        is_full = self._spent().trials + len(self._to_retry()) >= self._space.trials
        return is_full or self._is_exhausted()

    def end(self, reason: StopReason) -> None:
        """Store why the search ended, and what it was not able to rule out."""
        if reason is not StopReason.INTERRUPTED:
            self.study.note_end(outlook_document(reason, self.stopping.outlook(None)))

    def ask(self, lane: Lane) -> _OpenTrial:
        """Begin the next trial: the baseline, then what failed, then what the sampler asks.

        A sampler that knows what is fastest before anything ran goes before the baseline: the
        answer comes the sooner. After a failure the sampler goes first, so that a fault of the
        machine shows as different configurations failing alike.
        """
        retries = self._retries(lane)
        has_room = self._spent().trials + len(self._to_retry()) < self._space.trials
        is_first = not self.study.ledger.records and not self._running
        if not self._has_begun(self._baseline) and not self._is_foreseen(is_first=is_first):
            return self._begin(self._baseline)
        if retries and not (self._failures.get(lane) and has_room and not self._is_exhausted()):
            return self._begin(retries[0])
        owed, self._owed = self._owed, None
        return self._begin(owed)

    def check(self, trial: _OpenTrial) -> None:
        """Say what is expected of a trial: that it is refused, or what it has to beat."""
        # Now, while it may take long, and before the trial teaches anything.
        trial.prediction = trial.expected.record
        trial.refused = trial.expected.refusal
        trial.rivals = self._rivals_of(trial)

    def _rivals_of(self, trial: _OpenTrial) -> tuple[Rival, ...]:
        """Return what a trial has to beat; nothing where only its own end counts."""
        if trial.refused is not None or trial.is_baseline:
            return ()
        return self._rivals.of(trial.config)

    def launch(self, trial: _OpenTrial, lane: Lane) -> None:
        """Run a trial on a lane, and stop it early where it cannot matter any more."""
        asked = self._quality.command()
        # Without the tokens it is but half of what is asked: no result to be found on disk.
        attempt = None if self._quality.is_asked and asked is None else trial.begun
        budget_bytes = self.study.definition.target.budget_bytes
        trial.lane = lane.name

        def observe(progress: Progress) -> bool:
            event = TrialProgress(number=trial.handle.number, progress=progress)
            self.lanes.say(lambda: self.on_event(event))
            return is_hopeless(
                progress,
                config=trial.config,
                rivals=trial.rivals,
                objectives=self._space.objectives,
            )

        def measured() -> Outcome:
            outcome = lane.run(
                TrialRequest(
                    config=trial.config, steps=self._space.steps, attempt=attempt, quality=asked
                ),
                observe=observe,
            )
            return held_to_budget(outcome, budget_bytes=budget_bytes)

        def job() -> Outcome:
            started = self.clock()
            try:
                return run_undisturbed(measured, should_stop=self.interruption.is_requested)
            finally:
                trial.device_seconds = (trial.device_seconds or 0.0) + self.clock() - started

        self._running[lane] = trial
        self.lanes.launch(lane, job)

    def conclude(self, ended: Ended) -> None:
        """Store what a trial came to that ran to its end, or that its lane was lost under."""
        trial = self._running.pop(ended.lane)
        if isinstance(ended.result, EnvironmentFault):
            self._lose(trial, ended.lane, ended.result)
        elif self._is_asked_again(trial, ended.result):
            self.launch(trial, ended.lane)
        else:
            with self.interruption.settling():
                self.tell(trial, ended.result)
            self._count_failure(ended.lane, trial.config, ended.result)

    def _is_asked_again(self, trial: _OpenTrial, outcome: Outcome) -> bool:
        """Whether a trial's own speed said on how many tokens all are to train: now it does too."""
        with closing_what_never_ran(self.study, besides=self._numbers):
            return self._quality.choose(outcome, trial.expected.epoch)

    def _lose(self, trial: _OpenTrial, lane: Lane, fault: EnvironmentFault) -> None:
        """Go on without a lane.

        Raises:
            EnvironmentFault: it was the last one. What ran on a card that was lost is told; what
                no card was there for never ran.
        """
        is_last = not self.lanes.working
        # The database matters less now, and the spool has it.
        with suppress(EnvironmentFault):
            if is_last and not isinstance(fault, CardLost):
                self.study.abandon(besides=self._numbers())
            else:
                self.tell(trial, lost_with_the_card(fault))
        if is_last:
            raise fault
        self._failed_on[trial.config] = lane
        self._say_lost(lane, fault)

    def _say_lost(self, lane: Lane, fault: EnvironmentFault) -> None:
        # Nothing of it is to be beside what others measure.
        lane.close()
        self.on_event(LaneLost(lane.name, words_of(fault), left=len(self.lanes.working)))

    def _count_failure(self, lane: Lane, config: TrialConfig, outcome: Outcome) -> None:
        """Note on which lane a trial failed, and retire one on which all do.

        Raises:
            EnvironmentFault: it was the last one.
        """
        self._failed_on[config] = lane
        try:
            self._failures.setdefault(lane, ConsecutiveFailures()).count(outcome)
        except EnvironmentFault as fault:
            lane.lost = fault
            if not self.lanes.working:
                raise
            self._say_lost(lane, fault)

    def _numbers(self) -> set[int]:
        """Return the numbers of the trials that run."""
        return {trial.handle.number for trial in self._running.values()}

    def _await_running(self) -> None:
        """Store what runs beside what was interrupted: somebody asked for it to be ended."""
        while self._running:
            # What is cut short here once more is in the spool.
            with suppress(KeyboardInterrupt):
                self._forget_unlaunched()
                if self._running:
                    self.conclude(self.lanes.next_end())

    def _forget_unlaunched(self) -> None:
        """Forget what an interrupt came to between two lines: no lane runs it."""
        self._running = {
            lane: trial for lane, trial in self._running.items() if self.lanes.is_busy(lane)
        }

    def _keep_running(self) -> None:
        """Spool what still runs where the database, or the last lane, is not to be had."""
        self._forget_unlaunched()
        if self._running:
            self.lanes.cancel()
        while self._running:
            ended = self.lanes.next_end()
            trial = self._running.pop(ended.lane)
            if not isinstance(ended.result, EnvironmentFault):
                with suppress(EnvironmentFault):
                    self.study.spool(self._record(trial, ended.result))

    def tell(self, trial: _OpenTrial, outcome: Outcome) -> None:
        """Store how a trial ended, and learn from it."""
        record = self._record(trial, outcome)
        stored = self.study.tell(trial.handle, record)
        self._count_wall_seconds()
        self.preflight.learn(record)
        self._rivals.learn(stored)
        for running in self._running.values():
            running.rivals = self._rivals_of(running)
        self._tried.add(identity(stored.config))
        self.on_event(TrialFinished(record=stored))

    def _record(self, trial: _OpenTrial, outcome: Outcome) -> TrialRecord:
        return TrialRecord(
            number=trial.handle.number,
            config=trial.config,
            outcome=outcome,
            is_baseline=trial.is_baseline,
            attempt=trial.attempt,
            attempt_id=trial.begun.id,
            started_at=trial.begun.started_at,
            wall_seconds=self.clock() - trial.started_seconds,
            device_seconds=trial.device_seconds or 0.0,
            prediction=trial.prediction,
            epoch=trial.expected.epoch,
            ran_on=trial.lane or None,
        )

    def confirm(self, *, is_anew: bool = False) -> bool:
        """Measure the winner again; return False where somebody asked to stop.

        On one lane while nothing runs on the others, so that what is compared is measured on the
        same card and beside nobody.
        """
        while True:
            lane = self.lanes.working[0]
            try:
                return confirm(
                    self.study,
                    runner=lane,
                    place=lane.name,
                    preflight=self.preflight,
                    clock=self.clock,
                    on_event=self.on_event,
                    interruption=self.interruption,
                    is_anew=is_anew,
                )
            except EnvironmentFault as fault:
                if fault is not lane.raised:
                    raise
                lane.lost = fault
                if not self.lanes.working:
                    raise
                self._say_lost(lane, fault)

    def _begin(self, config: TrialConfig | None) -> _OpenTrial:
        """Ask storage for a trial, of ``config`` or of the sampler's choice, and mark it begun."""
        started_seconds = self.clock()
        if config is None:
            handle = self.study.ask(self._encoding.distributions)
            config = self._space.config(self._encoding.decode(handle.params))
        else:
            params = self._encoding.params_of(config)
            distributions = {} if params is None else self._encoding.distributions
            handle = self.study.ask(distributions, params=params)
        started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        begun = self.study.begin(handle, config, started_at)
        trial = _OpenTrial(
            handle=handle,
            expected=self.preflight.expect(config),
            is_baseline=config == self._baseline,
            attempt=self.study.ledger.attempts(config) + 1,
            begun=begun,
            started_seconds=started_seconds,
        )
        self.on_event(
            TrialStarted(
                number=handle.number,
                config=config,
                is_baseline=trial.is_baseline,
                attempt=trial.attempt,
            )
        )
        return trial

    def _is_foreseen(self, *, is_first: bool) -> bool:
        """Whether the first trial is the fastest that is foreseen, and a second may follow."""
        if self._quality.is_asked:
            # The recipe's speed says how much every trial is to learn from.
            return False
        is_guided = self._space.sampler == "guided" and self.preflight.predicts_speed
        return is_guided and is_first and self._space.trials > 1

    def _is_exhausted(self) -> bool:
        running = {identity(trial.config) for trial in self._running.values()}
        return self._frontier.is_exhausted(self._tried | running)

    def _count_wall_seconds(self) -> None:
        """Add up the driver's time trial by trial, so that a crash loses one trial's at most."""
        now = self.clock()
        self.study.add_wall_seconds(now - self._counted_seconds)
        self._counted_seconds = now
