"""The worker's supervisor: starts it, watches its progress, kills what hangs, replaces what ended,
and types every end."""

from __future__ import annotations

import contextlib
import uuid
from functools import partial
from pathlib import Path

from search_spaces.errors import CardLost, EnvironmentFault
from search_spaces.gpus import match_product
from search_spaces.knobs import ComputeDtype
from search_spaces.models import ModelSpec
from search_spaces.space import MICRO_STEPS_TIMED, Weights
from storage.definition import Target
from storage.outcome_file import beside_log
from storage.records import INTERRUPTED, Outcome, Phase
from sweep.data.strata import STRATA_MAX
from sweep.processes import End, oom_kills
from sweep.running import ends
from sweep.running.child import (
    WorkerEnded,
    WorkerMisbehaved,
    WorkerProcess,
    WorkerSilent,
)
from sweep.running.patience import AttentiveClock, Deadlines, Patience
from sweep.running.runner import Observer, Runner, keep_going
from sweep.running.wire import (
    Finished,
    Progress,
    Ready,
    RunCommand,
    StopCommand,
    TextsSettings,
    TrialRequest,
    Unusable,
    WorkerMessage,
    WorkerSettings,
    to_line,
)
from sweep.running.worker_log import WorkerLog

_GRACE_SECONDS = 2.0
"""That a trial which was measured to its end gets to tell its result, once somebody asked to stop.
"""
_LOOK_SECONDS = 0.5
"""Between two looks at whether somebody did."""


class SupervisedRunner(Runner):
    """Runs configurations in a child process that owns the device and keeps the base model
    resident.

    Args:
        model: what is trained.
        target: device and memory budget.
        weights: random, or loaded with transformers.
        log_path: where everything the worker's libraries print goes. Beside it the worker leaves
            the outcome of an attempt before it tells it.
        seed: of weights, adapters, tokens and what is held out of texts.
        texts: what trials train on; None for full-length random rows.
        cards: the worker's own, as CUDA names them; none for those of this process.
        neighbours: how many other workers share the machine's cores.
        deadlines: what may take how long.
        module: the worker's module; tests put a misbehaving one here.
        process: what the worker is started as; tests put one here that nothing ends.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        target: Target,
        weights: Weights = "random",
        log_path: Path,
        seed: int = 0,
        texts: TextsSettings | None = None,
        cards: tuple[str, ...] = (),
        neighbours: int = 0,
        deadlines: Deadlines | None = None,
        module: str = "sweep.running",
        process: type[WorkerProcess] = WorkerProcess,
    ) -> None:
        self._outcomes = beside_log(log_path)
        self._settings = WorkerSettings(
            device=target.device,
            budget_bytes=target.budget_bytes,
            outcome_path=str(self._outcomes.path),
            model=model.to_json(),
            weights=weights,
            seed=seed,
            is_emulated=target.emulated_on is not None,
            peak_flops=_peak_flops(target),
            texts=texts,
            cards=cards,
            neighbours=neighbours,
        )
        self._log_path = log_path
        self._deadlines = deadlines or Deadlines()
        self._module = module
        self._process = process
        self._clock = AttentiveClock()
        self._has_run = False
        self._worker: WorkerProcess | None = None
        self._log: WorkerLog | None = None
        self._is_ready = False
        self._phase: Phase = "start"
        self._cancelled_at: float | None = None
        """When somebody asked to stop, by the clock."""
        self._lost: CardLost | None = None

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        """See `runner.Runner.run`.

        Raises:
            CardLost: a worker could not be ended, so that the device is not to be had any more.
            EnvironmentFault: no worker can be started, or none can use the device.
        """
        if self._cancelled_at is not None:
            return INTERRUPTED
        if self._lost is not None:
            raise self._lost
        command = RunCommand(request=request, run_id=uuid.uuid4().hex)
        return ends.storable(self._run(command, self._patience(request), observe))

    def _run(self, command: RunCommand, patience: Patience, observe: Observer) -> Outcome:
        """Have a worker do what is told, and return how it ended, whatever became of the worker."""
        # One attempt may take several runs, where another process disturbed the first.
        before = self._left_behind(command)
        self._phase = "start"
        try:
            worker = self._ready_worker()
            worker.send(to_line(command))
            self._has_run = True
            return self._follow(worker, command, patience, observe)
        except WorkerSilent:
            return self._conclude(command, before, self._timed_out(patience))
        except WorkerMisbehaved as error:
            return self._conclude(command, before, partial(ends.nonsense, did=str(error)))
        except WorkerEnded:
            # An end that was asked for looks like any other from here.
            return self._conclude(command, before, ends.crash, patience=self._deadlines.closed)
        except BaseException:
            # Whoever watches failed, or was interrupted: nobody hears the rest of this trial.
            self._discard()
            raise

    def _follow(
        self, worker: WorkerProcess, command: RunCommand, patience: Patience, observe: Observer
    ) -> Outcome:
        """Watch the running trial to its end."""
        patience.begin()
        self._phase = patience.phase
        is_stopping = False
        kills = oom_kills()
        while True:
            try:
                until = min(patience.until(), self._clock.now + _LOOK_SECONDS)
                message = worker.next_message(until=until)
            except WorkerSilent:
                if not self._is_time_up(patience):
                    continue
                raise
            match message:
                case Progress() as progress:
                    patience.hear(progress)
                    self._phase = progress.phase
                    if self._is_time_up(patience):
                        # Signs of life alone, however many, do not put it off.
                        raise WorkerSilent
                    if observe(progress) and not is_stopping:
                        is_stopping = True
                        worker.send(to_line(StopCommand()))
                case Finished(run_id=command.run_id, config=command.request.config) as finished:
                    if finished.retire is not None:
                        self._discard()
                    has_killed = kills is not None and (oom_kills() or 0) > kills
                    return ends.reconsidered(finished.outcome, self._phase, has_killed=has_killed)
                case _:
                    raise WorkerMisbehaved(_unasked(message))

    def start(self) -> None:
        """See `runner.Runner.start`: the worker imports its libraries and takes the device."""
        # What keeps it from being started does so at the first `run` too, which says it.
        with contextlib.suppress(EnvironmentFault):
            if self._cancelled_at is None and self._lost is None:
                self._started_worker()

    def cancel(self) -> None:
        """See `runner.Runner.cancel`."""
        # Before the kill, so that whoever sees the worker end knows why.
        if self._cancelled_at is None:
            self._cancelled_at = self._clock.now
        if self._worker is not None and self._phase != "detach":
            self._worker.kill()

    def _is_time_up(self, patience: Patience) -> bool:
        asked = self._cancelled_at
        is_grace_over = asked is not None and self._clock.now >= asked + _GRACE_SECONDS
        return is_grace_over or patience.exceeded() is not None

    def renew(self) -> None:
        """See `runner.Runner.renew`: a worker that ran nothing yet is as fresh as another."""
        if self._has_run:
            self._discard()

    def close(self) -> None:
        """See `runner.Runner.close`. A worker that nothing ends is not waited for twice."""
        self._discard()

    def _ready_worker(self) -> WorkerProcess:
        """Return the worker that owns the device: the resident one, or one that is waited for.

        Raises:
            EnvironmentFault: the device is not to be had.
        """
        self._replace_unfit()
        if self._lost is not None:
            raise self._lost
        worker = self._started_worker()
        if self._cancelled_at is not None:
            # Perhaps while it was being started, when there was no worker yet to kill.
            worker.kill()
        if self._is_ready:
            return worker
        match worker.next_message(until=self._clock.look() + self._deadlines.start):
            case Ready():
                self._is_ready = True
                return worker
            case Unusable(reason=reason):
                self._discard()
                raise EnvironmentFault(f"the worker cannot use the device: {ends.shown(reason)}")
            case message:
                raise WorkerMisbehaved(_unasked(message))

    def _replace_unfit(self) -> None:
        """End a resident worker that something befell since its last trial: nothing of that is the
        next configuration's doing.
        """
        if self._worker is None or not self._is_ready or self._log is None:
            return
        fault = self._worker.fault()
        if fault is not None:
            self._log.note(f"the worker is replaced: {fault}")
            self._discard(patience=self._deadlines.closed)

    def _started_worker(self) -> WorkerProcess:
        """Return the worker, which may not own the device yet."""
        if self._worker is None:
            log = WorkerLog(self._log_path)
            try:
                self._worker = self._process(
                    self._settings,
                    log=log,
                    module=self._module,
                    clock=self._clock,
                    patience=self._deadlines.closed,
                )
            except BaseException:
                log.close()
                raise
            self._log = log
        return self._worker

    def _conclude(
        self,
        command: RunCommand,
        before: Outcome | None,
        failure: ends.Failure,
        *,
        patience: float = 0.0,
    ) -> Outcome:
        """End the worker that did not answer, and return what its trial came to.

        That is what it left on disk, where it came so far before whatever befell it.

        Raises:
            CardLost: nothing ends it, and it left nothing.
        """
        end, words = self._discard(patience=patience)
        left = self._left_behind(command)
        if left is not None and left != before:
            return left
        if self._cancelled_at is not None:
            return INTERRUPTED
        if self._lost is not None:
            raise self._lost
        return failure(self._phase, end, words=words)

    def _left_behind(self, command: RunCommand) -> Outcome | None:
        attempt, config = command.request.attempt, command.request.config
        return None if attempt is None else self._outcomes.take(attempt.id, config)

    def _patience(self, request: TrialRequest) -> Patience:
        has_texts, quality = self._settings.texts is not None, request.quality
        return Patience(
            self._deadlines,
            self._clock,
            request.steps,
            micro_steps=max(STRATA_MAX, MICRO_STEPS_TIMED) if has_texts else MICRO_STEPS_TIMED,
            quality_tokens=0 if quality is None else quality.tokens + quality.eval_tokens,
        )

    def _timed_out(self, patience: Patience) -> ends.Failure:
        silence = f"no sign of life for {self._deadlines.start:g} s"
        why = silence if self._phase == "start" else patience.exceeded() or silence
        if self._worker is not None and self._worker.is_stopped():
            why += ", as somebody stopped the worker's process (SIGSTOP)"
        return partial(ends.timed_out, why=why)

    def _discard(self, *, patience: float = 0.0) -> tuple[End, str]:
        """End the worker and return how that was, with the last that it printed."""
        self._has_run = False
        self._is_ready = False
        worker, self._worker = self._worker, None
        log, self._log = self._log, None
        if worker is None or log is None:
            return End(0), ""
        try:
            end = worker.close(patience=patience, kill_seconds=self._deadlines.end)
        except BaseException:
            # Interrupted while it was waited for: nobody comes back to end it.
            worker.kill()
            log.close()
            raise
        if end.status is None:
            self._lost = ends.card_lost(
                worker.process.pid, self._settings.device, seconds=self._deadlines.end
            )
        words = log.tail()
        log.close()
        return end, words


def _unasked(message: WorkerMessage) -> str:
    """Return what a worker did that said this now."""
    match message:
        case Finished():
            return "it answered what it was not asked"
        case Unusable(reason=reason):
            return f"it gave up the device in the middle of a trial: {reason}"
        case Ready() | Progress():
            return f"it said '{message.kind}' when nobody expected that"


def _peak_flops(target: Target) -> dict[ComputeDtype, float]:
    """Return the peak FLOP/s of the card that really runs."""
    if target.device == "cpu":
        return {}
    spec = match_product(target.emulated_on or target.gpu)
    return {} if spec is None else dict(spec.peak_flops)
