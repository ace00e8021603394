"""The loop of a study: ask a source, run, tell; on as many lanes as there are.

Whatever runs beside it, the study is asked and told by one thread alone.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Protocol

import optuna

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, GpuLost, words_of
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.space import SearchSpace, StepBudget
from qlora_sweep.storage.records import (
    INTERRUPTED,
    OUT_OF_TIME,
    SEARCH,
    Attempt,
    EpochRecord,
    Faithfulness,
    Lost,
    Measured,
    Outcome,
    OutOfMemory,
    PrunedSlow,
    RunKind,
    TrialRecord,
    moment_now,
)
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.sweep.predict.forecast import Forecaster
from qlora_sweep.sweep.running.runner import Ended, Lane, Lanes, Runner
from qlora_sweep.sweep.running.wire import Progress, QualityCommand, TrialRequest
from qlora_sweep.sweep.sampling.encoding import Encoding
from qlora_sweep.sweep.study.events import (
    Interruption,
    LaneLost,
    Listener,
    StopReason,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from qlora_sweep.sweep.study.run_time import RunTime
from qlora_sweep.sweep.study.stopping import (
    REMEASURED_AT_MOST,
    Rivals,
    Stopping,
    is_disturbed,
    is_hopeless,
    outcome_to_keep,
)

_WATCH_SECONDS = 0.1
"""Between two looks at the time that is left."""
QUALITY_SECONDS = 60.0
"""What a trial's training is to take by default, where no number of tokens was typed."""
TOKENS_MIN = 256


@dataclass(frozen=True)
class Wanted:
    """What a source wants run."""

    steps: StepBudget
    config: TrialConfig | None = None
    """None for the sampler's choice."""
    run_kind: RunKind = SEARCH
    quality: QualityCommand | None = None
    """What it is asked to learn; None for its speed and memory alone."""
    rivals: Rivals | None = None
    """What it has to beat; None where only its own end counts."""
    kept_seconds: float = 0.0
    """Of the run's time, what is kept for what follows."""


@dataclass(eq=False)
class RunningTrial:
    """A trial between ask and tell."""

    handle: optuna.trial.Trial
    begun: Attempt
    request: TrialRequest
    """Without the attempt where it comes before it is known on how many tokens all train for their
    loss: that is half of what is asked."""
    record: TrialRecord
    """What is known of it; its outcome is the one that spares the device the trial, or that it was
    interrupted."""
    rivals: Rivals | None
    started_seconds: float
    kept_seconds: float = 0.0
    """As its `Wanted` says."""
    device_seconds: float = 0.0
    progress: Progress | None = None
    """The newest of it."""

    @property
    def step_seconds(self) -> float:
        """Of a step that is being measured; 0 where none is, or none is known yet."""
        progress = self.progress
        if progress is None or progress.phase != "measure" or not progress.tokens_per_second:
            return 0.0
        return self.record.config.tokens_per_step / progress.tokens_per_second

    @property
    def is_refused(self) -> bool:
        """Whether its verdict is known without the device."""
        return not self.record.is_interrupted


class TrialSource(Protocol):
    """Says what is run next, and hears what came of it; in the thread that drives the study."""

    def next(self, lane: Lane) -> Wanted | StopReason | None:
        """Return what a lane runs next, why there is nothing more, or None to wait for others."""
        ...

    def told(self, record: TrialRecord) -> None:
        """Learn from what is stored."""
        return

    def ended(self, lane: Lane, config: TrialConfig, outcome: Outcome | None) -> None:
        """Note how a trial ended that ran; None where its lane was lost.

        Raises:
            EnvironmentFault: the lane is at fault rather than its trials.
        """
        return


@dataclass
class Driver:
    """One run of a study.

    Args:
        study: open, under its lease.
        runner: runs configurations, one at a time, or as many as it has lanes. A lane that is lost
            retires, and its trial is tried again on another; the study ends with the last one.
        forecaster: spares the device what cannot be valid or cannot fit.
        stopping: says when the search ends, and what an hour costs; by default its trials end it.
        spent_seconds: of the time budget, what the command took before, and what it takes after.
        least_seconds: that the run takes from its first launch to a first result.
        clock: seconds; only differences count.
        on_event: hears of everything that happens.
        interruption: whether somebody asked to stop. What runs then is ended by whoever asks; what
            is being chosen or checked is cut short, and what was begun is closed.
    """

    study: OpenStudy
    runner: InitVar[Runner | Lanes]
    forecaster: Forecaster
    stopping: InitVar[Stopping | None] = None
    spent_seconds: InitVar[float] = 0.0
    least_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic
    on_event: Listener = lambda _: None
    interruption: Interruption = field(default_factory=Interruption)

    def __post_init__(
        self, runner: Runner | Lanes, stopping: Stopping | None, spent_seconds: float
    ) -> None:
        self.lanes = Lanes.of(runner)
        self.space = self.study.definition.space
        self.limits = stopping or Stopping(self.space)
        self.baseline = self.space.baseline_config()
        self.encoding = Encoding(self.space)
        self.asks_for_loss = "eval_loss" in self.space.objectives
        self._counted_seconds = self.clock()
        self.has_launched = False
        """Whether anything ran, or runs, in this run."""
        self.time = RunTime.of(
            self.space,
            self.clock,
            spent_seconds=spent_seconds,
            paid_seconds=self._paid_seconds(),
        )

    def _paid_seconds(self) -> float:
        """Return for how long the study's money lasts; infinite without a limit."""
        dollars = self.space.max_dollars
        price = self.limits.usd_per_hour
        if dollars is None or price is None:
            return math.inf
        seconds = dollars / price * 3600.0 - self.study.known.gpu_seconds
        return seconds / self.study.gpus

    @contextmanager
    def within_time(self) -> Iterator[None]:
        """End what runs inside the ``with`` once the run's time is over; nothing is launched then.

        What measures steps stops by itself then (`TrialRequest.seconds_left`), and gets a step to
        do so; anything else, a compiler say, is ended at once.
        """
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(_WATCH_SECONDS):
                running: list[RunningTrial] = list(self.lanes.running.values())
                step_seconds = max((trial.step_seconds for trial in running), default=0.0)
                if self.time.left_seconds <= -step_seconds:
                    self.lanes.cancel()
                    return

        if self.time.is_limited:
            threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def reason_to_stop(self) -> StopReason | None:
        """Return why nothing more is run, whatever is left to do; None where it may be."""
        if self.interruption.is_requested():
            return StopReason.INTERRUPTED
        if self.time.is_over:
            return self.time.reason
        return None

    def recover(self) -> None:
        """Close what an earlier driver left open, and learn from what it found out."""
        self.study.recover()
        self.forecaster.learn_all(self.study.records())
        confirmed = self.study.confirmations()
        self.forecaster.learn_all(r for r in confirmed if isinstance(r.outcome, OutOfMemory))

    def run(self, source: TrialSource) -> StopReason:
        """Run what a source wants, trial after trial, and return why that stopped.

        Raises:
            EnvironmentFault: the database or the last lane is not to be had. What was measured is
                stored, or in the spool.
        """
        running = self.lanes.running
        try:
            try:
                while True:
                    reason = self._fill(source)
                    if not running:
                        assert reason is not None, "what has nothing to run says why"
                        return reason
                    self._conclude(self.lanes.next_end(), source)
            except KeyboardInterrupt:
                # Somebody asked for what runs to be ended; what is cut short here once more is in
                # the spool.
                while running:
                    with suppress(KeyboardInterrupt):
                        self._conclude(self.lanes.next_end(), source)
                return StopReason.INTERRUPTED
        except EnvironmentFault:
            # The database, or the last lane, is not to be had: what runs is kept on disk.
            if running:
                self.lanes.cancel()
            while running:
                ended = self.lanes.next_end()
                if not isinstance(ended.result, EnvironmentFault):
                    with suppress(EnvironmentFault):
                        self.study.spool.append(self._record(ended.trial, ended.result))
            raise

    def _fill(self, source: TrialSource) -> StopReason | None:
        """Give every idle lane a trial; return why no more are begun, None where all are busy."""
        for lane in self.lanes.idle:
            while lane not in self.lanes.running:
                with self._closing_what_never_ran():
                    with self.interruption.interruptible():
                        wanted = source.next(lane)
                        if wanted is None:
                            break
                        has_no_time = wanted is StopReason.TIME_SPENT
                        if not self.has_launched and (has_no_time or isinstance(wanted, Wanted)):
                            self.time.refuse_too_short(self.least_seconds, self.space)
                        if isinstance(wanted, StopReason):
                            return wanted
                        trial = self._begin(wanted, lane)
                    if not trial.is_refused:
                        self.has_launched = True
                        self.lanes.launch(lane, trial, partial(self._measure, trial, lane))
                if trial.is_refused:
                    with self.interruption.settling():
                        self._tell(trial, trial.record.outcome, source)
        return None

    @contextmanager
    def _closing_what_never_ran(self) -> Iterator[None]:
        """Close what is begun inside the ``with`` and left without an outcome: somebody asked to
        stop, or device or database are not to be had. That was no attempt of a configuration.
        """
        try:
            yield
        except (KeyboardInterrupt, EnvironmentFault):
            with suppress(EnvironmentFault):
                self._abandon()
            raise

    def _abandon(self) -> None:
        self.study.abandon(besides={t.record.number for t in self.lanes.running.values()})

    def _begin(self, wanted: Wanted, lane: Lane) -> RunningTrial:
        """Ask storage for a trial, mark it begun, and say what is expected of it."""
        started_seconds = self.clock()
        study = self.study
        run_kind = wanted.run_kind
        handle, config = self._ask(wanted)
        started_at = moment_now()
        begun = study.begin(handle, config, started_at, run_kind=run_kind)
        failed = study.ledger.attempts(config, run_kind)
        record = TrialRecord(
            number=begun.number,
            config=config,
            outcome=INTERRUPTED,
            is_baseline=config == self.baseline,
            attempt=failed + 1,
            attempt_id=begun.id,
            started_at=started_at,
            ran_on=lane.name or None,
            **run_kind.model_dump(),
        )
        self.on_event(
            TrialStarted(begun.number, config, record.is_baseline, record.attempt, run_kind)
        )
        if run_kind == SEARCH:
            # Now, while it may take long, and before the trial teaches anything.
            expected = self.forecaster.expect(config)
            record = replaced(record, prediction=expected.record)
            if expected.refusal is not None:
                record = replaced(record, outcome=expected.refusal, ran_on=None)
        is_half = self.asks_for_loss and run_kind == SEARCH and wanted.quality is None
        request = TrialRequest(
            config=config,
            steps=wanted.steps,
            is_soak=run_kind.purpose == "soak",
            attempt=None if is_half else begun,
            quality=wanted.quality,
            faithfulness=None if run_kind == SEARCH else self._compared(config),
        )
        return RunningTrial(
            handle,
            begun,
            request,
            record,
            wanted.rivals,
            started_seconds,
            kept_seconds=wanted.kept_seconds,
        )

    def _ask(self, wanted: Wanted) -> tuple[optuna.trial.Trial, TrialConfig]:
        """Ask storage for a trial of what is wanted; return it with its configuration."""
        config = wanted.config
        if config is None:
            handle = self.study.ask(self.encoding.distributions)
            return handle, self.space.config(self.encoding.decode(handle.params))
        if wanted.run_kind != SEARCH:
            return self.study.ask_again(), config
        params = self.encoding.params_of(config)
        distributions = {}
        if params is not None:
            distributions = self.encoding.distributions
        return self.study.ask(distributions, params=params), config

    def _compared(self, config: TrialConfig) -> Faithfulness | None:
        """Return what an earlier trial found of a configuration's 8-bit compute."""
        for record in itertools.chain(self.study.records(), self.study.confirmations()):
            measured = record.measurement
            if record.config == config and measured and measured.faithfulness is not None:
                return measured.faithfulness
        return None

    def _measure(self, trial: RunningTrial, lane: Lane) -> Outcome:
        """Run a trial, again where another process disturbed it, and return the outcome to keep.

        Raises:
            EnvironmentFault: the device is not to be had, and nothing was measured on it before.
        """
        started = self.clock()
        outcomes: list[Outcome] = []
        try:
            while True:
                try:
                    request = self._timed(trial)
                    outcome = lane.runner.run(request, observe=partial(self._observe, trial))
                    outcomes.append(self.study.soundness.counted(trial.record.config, outcome))
                except KeyboardInterrupt:
                    # Asked so often that the runner, which is to cancel it, is not waited for.
                    outcomes.append(INTERRUPTED)
                except EnvironmentFault:
                    # A neighbour that took the whole GPU: what was measured beside it is not lost.
                    if not any(isinstance(each, Measured | PrunedSlow) for each in outcomes):
                        raise
                    break
                is_last = len(outcomes) > REMEASURED_AT_MOST or self.reason_to_stop() is not None
                if is_last or not is_disturbed(outcomes[-1]):
                    break
        finally:
            trial.device_seconds += self.clock() - started
        kept = outcome_to_keep(outcomes)
        if kept == INTERRUPTED and self.reason_to_stop() is self.time.reason:
            return OUT_OF_TIME
        return kept

    def _timed(self, trial: RunningTrial) -> TrialRequest:
        """Return what is asked of a trial now, with the time that it has."""
        if not self.time.is_limited:
            return trial.request
        seconds_left = max(0.0, self.time.left_seconds - trial.kept_seconds)
        return replaced(trial.request, seconds_left=seconds_left)

    def _observe(self, trial: RunningTrial, progress: Progress) -> bool:
        """Return whether a trial is to be stopped, as it cannot matter any more."""
        trial.progress = progress
        event = TrialProgress(number=trial.record.number, progress=progress)
        self.lanes.say(partial(self.on_event, event))
        config = trial.record.config
        rivals = trial.rivals
        if rivals is None or trial.record.is_baseline:
            return False
        return is_hopeless(
            rivals.as_decided(progress, config),
            config=config,
            rivals=rivals.of(config),
            objectives=self.space.objectives,
        )

    def _conclude(self, ended: Ended, source: TrialSource) -> None:
        """Store what a trial came to that ran to its end, or that its lane was lost under."""
        trial: RunningTrial = ended.trial
        lane = ended.lane
        result = ended.result
        config = trial.record.config
        if isinstance(result, EnvironmentFault):
            # The database matters less now, and the spool has it.
            with suppress(EnvironmentFault):
                if self.lanes.working or isinstance(result, GpuLost):
                    # None of its own doing, as far as anybody knows: it is tried again.
                    lost = Lost(detail=f"the GPU was lost: {result}", is_interrupted=True)
                    self._tell(trial, lost, source)
                else:
                    self._abandon()
            self._retire(lane, result)
            source.ended(lane, config, None)
            return
        if trial.request.attempt is None and isinstance(result, Measured):
            # The first that fits: its own speed says on how many tokens all are to train.
            with self._closing_what_never_ran():
                epoch = self.forecaster.epoch_of(config)
                tokens = default_tokens(result.measurement.tokens_per_second, epoch)
                self.study.note(quality_tokens=tokens)
            quality = quality_command(self.space, tokens=tokens)
            trial.request = replaced(trial.request, quality=quality, attempt=trial.begun)
            self.lanes.launch(lane, trial, partial(self._measure, trial, lane))
            return
        with self.interruption.settling():
            self._tell(trial, result, source)
        try:
            source.ended(lane, config, result)
        except EnvironmentFault as fault:
            lane.lost = fault
            self._retire(lane, fault)

    def _retire(self, lane: Lane, fault: EnvironmentFault) -> None:
        """Close a lane that is lost; the others continue.

        Raises:
            EnvironmentFault: it was the last one.
        """
        left = len(self.lanes.working)
        if not left:
            raise fault
        # Nothing of it is to be beside what others measure.
        lane.runner.close()
        self.on_event(LaneLost(lane.name, words_of(fault), left=left))

    def _tell(self, trial: RunningTrial, outcome: Outcome, source: TrialSource) -> None:
        """Store how a trial ended, before anything else happens, and learn from it."""
        record = self._record(trial, outcome)
        now = self.clock()
        stored = self.study.tell(trial.handle, record, spent_seconds=now - self._counted_seconds)
        self._counted_seconds = now
        if record.purpose == "search" or isinstance(outcome, OutOfMemory):
            self.forecaster.learn(record)
        source.told(stored)
        self.on_event(TrialFinished(record=stored))

    def _record(self, trial: RunningTrial, outcome: Outcome) -> TrialRecord:
        return replaced(
            trial.record,
            outcome=outcome,
            wall_seconds=self.clock() - trial.started_seconds,
            device_seconds=trial.device_seconds,
            epoch=self.forecaster.epoch_of(trial.record.config),
        )


def tokens_of(study: OpenStudy) -> int | None:
    """Return on how many tokens a study's trials train for their held-out loss, as typed or as
    chosen; None before that is known, and where no loss is asked for.

    Every trial that fits and is not far behind trains on the same tokens in the same order, so that
    losses compare.
    """
    space = study.definition.space
    if "eval_loss" not in space.objectives:
        return None
    return (space.data.quality_tokens if space.data else None) or study.known.quality_tokens


def eval_seq_len(space: SearchSpace) -> int:
    """Return the tokens to which held-out texts are cut: the longest that any configuration trains
    at.

    One for all, so that a configuration that trains on short rows answers for long ones too.
    """
    longest = max(space.values_of("seq_len"), default=TrialConfig().seq_len)
    return max(2, longest, space.baseline_config().seq_len)


def default_tokens(tokens_per_second: float, epoch: EpochRecord | None) -> int:
    """Return the tokens of about a minute at a speed, in two digits; no more than an epoch has.

    Args:
        tokens_per_second: of the first configuration that fits, as a rule the baseline.
        epoch: of the texts as that trains on them; None where that is not known.
    """
    tokens = max(TOKENS_MIN, tokens_per_second * QUALITY_SECONDS)
    if epoch is not None:
        tokens = min(tokens, max(TOKENS_MIN, epoch.loss_tokens))
    unit = 10 ** max(0, math.floor(math.log10(tokens)) - 1)
    return int(tokens // unit * unit)


def quality_command(
    space: SearchSpace, *, tokens: int | None, seed: int | None = None
) -> QualityCommand | None:
    """Return what a trial is asked to learn with the seed of its adapters and order, by default
    the search's; None before the tokens are known, and where nothing is asked."""
    if tokens is None:
        return None
    if seed is None:
        seed = space.seed
    return QualityCommand(tokens=tokens, seed=seed, eval_seq_len=eval_seq_len(space))
