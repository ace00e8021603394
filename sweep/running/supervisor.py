"""The worker's supervisor: starts it, watches its progress, kills what hangs, replaces what ended,
and types every end."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from qlora_sweep.search_spaces.errors import EnvironmentFault, GpuLost
from qlora_sweep.search_spaces.gpus import match_product
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import MICRO_STEPS_TIMED, StepBudget
from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.directory import beside_log
from qlora_sweep.storage.records import INTERRUPTED, Crashed, Ineffective, Outcome, Phase, TimedOut
from qlora_sweep.sweep.data.epoch import STRATA_MAX
from qlora_sweep.sweep.nvml import FaultWatch
from qlora_sweep.sweep.processes import End, oom_kills
from qlora_sweep.sweep.running.child import (
    AttentiveClock,
    WorkerEnded,
    WorkerFault,
    WorkerMisbehaved,
    WorkerProcess,
    WorkerSilent,
    outcome_of,
    shown,
    storable,
)
from qlora_sweep.sweep.running.runner import Observer, Runner, keep_going
from qlora_sweep.sweep.running.starting import take
from qlora_sweep.sweep.running.wire import (
    Finished,
    Progress,
    Ready,
    RunCommand,
    StopCommand,
    TrialRequest,
    Unusable,
    WorkerSettings,
    to_line,
    worker_message_adapter,
)

_GRACE_SECONDS = 2.0
"""That a trial which was measured to its end gets to tell its result, once somebody asked to stop.
"""
_PHASES: tuple[Phase, ...] = get_args(Phase)
"""In the order in which a trial goes through them."""


@dataclass(frozen=True)
class Deadlines:
    """Longest silence allowed in each phase, in seconds.

    A hang shows as silence alone: a kernel that never ends keeps the worker from answering, and
    only a kill frees the GPU.
    """

    start: float = 300.0
    build: float = 1800.0
    attach: float = 120.0
    warmup: float = 300.0
    """The first step compiles kernels, or whole layers."""
    measure: float = 120.0
    compare: float = 300.0
    """Eager passes in 16 bits, of which each recomputes every layer."""
    detach: float = 120.0
    quality: float = 300.0
    """The first step of this training compiles anew, as that of the warm-up does."""
    quality_seconds_per_token: float = 1.0
    """Of all that is trained on for its quality, beside what begins and ends that."""
    silences_per_step: float = 8.0
    """So many times a phase's longest silence, with signs of life and no step done, is no progress:
    two micro-steps that are being queued, two that are waited for, an evaluation and a checkpoint
    come to six. A pass over the micro-batches that stand for texts has more of them."""
    closed: float = 5.0
    """From when the worker closed a pipe until it is ended: it may be about to end by itself, and
    its own exit status says more."""
    end: float = 60.0
    """After SIGKILL, until the worker is given up: one with much memory takes a while to end."""

    def of(self, phase: Phase) -> float:
        """Return the longest silence allowed in a phase."""
        return float(getattr(self, phase))

    def of_progress(self, phase: Phase, *, micro_steps: int = MICRO_STEPS_TIMED) -> float:
        """Return how long a phase may take without a step, which is timed over so many
        micro-steps."""
        return self.silences_per_step * micro_steps / MICRO_STEPS_TIMED * self.of(phase)

    def of_trial(self, steps: StepBudget, *, micro_steps: int = MICRO_STEPS_TIMED) -> float:
        """Return how long a trial may take as a whole, with every step as slow as is allowed.

        Seconds of the budget come on top of what begins the measured steps, so that a soak of hours
        has them.
        """
        step = micro_steps * self.measure
        # Its end is looked for after a step; a soak evaluates and saves once.
        measured = min(steps.seconds_max + step, steps.measured_max * step) + 2 * self.measure
        fewest = steps.measured_min * step
        warmup = self.warmup + steps.warmup_max * step
        return self.build + self.attach + warmup + max(measured, fewest) + self.detach

    def of_quality(self, tokens: int) -> float:
        """Return how long training for quality, and asking for it, may take on top."""
        return self.attach + 2 * self.quality + tokens * self.quality_seconds_per_token


@dataclass
class Patience:
    """With one trial: which of its limits ends it, and when.

    Attributes:
        micro_steps: over which what counts as a step is timed.
        quality_tokens: that are trained on, or looked at, for its quality; 0 for none.
    """

    deadlines: Deadlines
    clock: AttentiveClock
    steps: StepBudget
    micro_steps: int = MICRO_STEPS_TIMED
    quality_tokens: int = 0
    phase: Phase = "attach"
    _furthest: tuple[int, int] = (-1, -1)

    def __post_init__(self) -> None:
        self._begun_at = self._heard_at = self._progress_at = self.clock.look()

    def hear(self, progress: Progress) -> None:
        """Take in a sign of life; progress is a later phase, or a further step of one."""
        self.phase = progress.phase
        self._heard_at = self.clock.look()
        reached = (_PHASES.index(progress.phase), progress.step)
        if reached > self._furthest:
            self._furthest = reached
            self._progress_at = self._heard_at

    def exceeded(self) -> str | None:
        """Return which limit was passed, in words; None where none was."""
        quiet_seconds = self.deadlines.of(self.phase)
        progress = self.deadlines.of_progress(self.phase, micro_steps=self.micro_steps)
        whole = self.deadlines.of_trial(self.steps, micro_steps=self.micro_steps)
        if self.quality_tokens:
            whole += self.deadlines.of_quality(self.quality_tokens)
        back = self.clock.returned_at
        if self.clock.now >= max(self._heard_at, back) + quiet_seconds:
            return f"no sign of life for {quiet_seconds:g} s"
        if self.clock.now >= max(self._progress_at, back) + progress:
            return f"signs of life, but no step further for {progress:g} s"
        if self.clock.now >= self._begun_at + whole:
            return f"the trial as a whole took longer than {whole:g} s"
        return None


class SupervisedRunner(Runner):
    """Runs configurations in a child process that owns the device and keeps the base model
    resident.

    Args:
        model: what is trained.
        target: device and memory budget.
        log_path: where everything the worker's libraries print goes. Beside it the worker leaves
            the outcome of an attempt before it tells it.
        deadlines: what may take how long.
        module: the worker's module; tests put a misbehaving one here.
        process: what the worker is started as; tests put one here that nothing ends.
        fault: says what is wrong with a GPU after a trial that failed; by default, NVML's words of
            those in `settings`.
        settings: further ones of `WorkerSettings`: weights, seed, dataset, GPUs, concurrent_jobs.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        target: Target,
        log_path: Path,
        deadlines: Deadlines | None = None,
        module: str = "qlora_sweep.sweep.running",
        process: type[WorkerProcess] = WorkerProcess,
        fault: Callable[[], str | None] | None = None,
        **settings: Any,
    ) -> None:
        self._outcomes = beside_log(log_path)
        peak_flops = {}
        gpu = match_product(target.emulated_on or target.gpu)
        if gpu is not None and target.is_on_gpu:
            peak_flops = dict(gpu.peak_flops)
        self._settings = WorkerSettings(
            device=target.device,
            budget_bytes=target.budget_bytes,
            outcome_path=str(self._outcomes.path),
            model=model.to_json(),
            is_emulated=target.emulated_on is not None,
            peak_flops=peak_flops,
            **settings,
        )
        watches = [FaultWatch(gpu) for gpu in self._settings.gpus]
        self._fault = fault or (lambda: next(filter(None, (watch() for watch in watches)), None))
        self._log_path = log_path
        self._deadlines = deadlines or Deadlines()
        self._module = module
        self._process = process
        self._clock = AttentiveClock()
        self._worker: WorkerProcess | None = None
        self._is_ready = False
        self._phase: Phase = "start"
        self._cancelled_at: float | None = None
        """When somebody asked to stop, by the clock."""
        self._lost: GpuLost | None = None

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        """See `runner.Runner.run`.

        Raises:
            GpuLost: a worker could not be ended, so that the device is not to be had any more, or
                the trial failed and a GPU has a fault of its own.
            EnvironmentFault: no worker can be started, or none can use the device.
        """
        if self._cancelled_at is not None:
            return INTERRUPTED
        if self._lost is not None:
            raise self._lost
        # One attempt may take several runs, where another process disturbed the first.
        before = self._left_behind(request)
        # The start of a worker takes of the trial's time, too.
        stop_at = None
        if request.seconds_left is not None:
            stop_at = time.monotonic() + request.seconds_left
        command = RunCommand(request=request, run_id=uuid.uuid4().hex, stop_at=stop_at)
        self._phase = "start"
        try:
            outcome = self._follow(self._sound_worker(), command, observe)
        except WorkerFault as fault:
            outcome = self._concluded(fault, request, before)
        except BaseException:
            # The observer failed, or was interrupted: the rest of this trial is not read.
            self._discard()
            raise
        if isinstance(outcome, Crashed | TimedOut):
            fault_of_gpu = self._fault()
            if fault_of_gpu is not None:
                names = " and ".join(self._settings.gpus) or "the GPU"
                raise GpuLost(f"{names}: {fault_of_gpu}")
        return storable(outcome)

    def _sound_worker(self) -> WorkerProcess:
        """Return the resident worker, or another in the place of one that ended or misbehaved."""
        if self._worker is not None and self._is_ready and not self._worker.is_waiting():
            # Whatever befell it since its last trial is not the next configuration's doing.
            self._discard(patience=self._deadlines.closed)
            if self._lost is not None:
                raise self._lost
        worker = self._started_worker()
        if self._cancelled_at is not None:
            # Perhaps while it was being started, when there was no worker yet to kill.
            worker.kill()
        return worker

    def _follow(self, worker: WorkerProcess, command: RunCommand, observe: Observer) -> Outcome:
        """Have a worker run a trial as soon as it owns the device, and watch it to its end.

        Raises:
            EnvironmentFault: the device is not to be had.
        """
        request = command.request
        worker.send(to_line(command))
        self._phase = "start"
        if self._is_ready:
            self._phase = "attach"
        patience = self._patience(request)
        kills = oom_kills()
        is_stopping = False
        while True:
            message = worker.next_message(worker_message_adapter)
            match message:
                case None:
                    pass
                case Ready() if not self._is_ready:
                    self._is_ready = True
                    self._phase = "attach"
                    patience = self._patience(request)
                case Unusable(reason=reason) if not self._is_ready:
                    raise EnvironmentFault(f"the worker cannot use the device: {shown(reason)}")
                case Progress() if self._is_ready:
                    patience.hear(message)
                    self._phase = message.phase
                    if observe(message) and not is_stopping:
                        is_stopping = True
                        worker.send(to_line(StopCommand()))
                case Finished(run_id=command.run_id, config=request.config, outcome=outcome):
                    if message.retire is not None:
                        self._discard()
                    if kills is None or (oom_kills() or 0) <= kills:
                        return outcome
                    return _without_host_memory(outcome, self._phase)
                case _:
                    said = f"it said '{message.kind}' out of turn"
                    if isinstance(message, Unusable):
                        said += f": {message.reason}"
                    raise WorkerMisbehaved(said)
            asked = self._cancelled_at
            # Signs of life alone, however many, do not put it off.
            exceeded = patience.exceeded()
            if exceeded is not None:
                raise WorkerSilent(exceeded)
            if asked is not None and self._clock.now >= asked + _GRACE_SECONDS:
                raise WorkerSilent("its result was waited for")

    def start(self) -> None:
        """See `runner.Runner.start`: the worker imports its libraries and takes the device."""
        # What keeps it from being started does so at the first `run` too, which says it.
        with contextlib.suppress(EnvironmentFault):
            if self._cancelled_at is None and self._lost is None:
                self._started_worker()

    def cancel(self) -> None:
        """See `runner.Runner.cancel`."""
        # Before the kill, so that it is known why the worker ends.
        if self._cancelled_at is None:
            self._cancelled_at = self._clock.now
        if self._worker is not None and self._phase != "detach":
            self._worker.kill()

    def close(self) -> None:
        """See `runner.Runner.close`. A worker that nothing ends is not waited for twice."""
        take({})
        self._discard()

    def _started_worker(self) -> WorkerProcess:
        """Return the worker, which may not own the device yet."""
        if self._worker is None:
            self._worker = self._process(
                self._settings,
                log_path=self._log_path,
                module=self._module,
                clock=self._clock,
                patience=self._deadlines.closed,
            )
        return self._worker

    def _concluded(
        self, fault: WorkerFault, request: TrialRequest, before: Outcome | None
    ) -> Outcome:
        """End the worker that did not answer, and return what its trial came to.

        That is what it left on disk, where it came so far before whatever befell it.

        Raises:
            GpuLost: nothing ends it, and it left nothing.
        """
        if isinstance(fault, WorkerSilent) and self._worker and self._worker.is_stopped():
            fault = WorkerSilent(f"{fault}, as somebody stopped the worker's process (SIGSTOP)")
        # An end that was asked for looks like any other from here.
        patience = 0.0
        if isinstance(fault, WorkerEnded):
            patience = self._deadlines.closed
        end, words = self._discard(patience=patience)
        left = self._left_behind(request)
        if left is not None and left != before:
            return left
        if self._cancelled_at is not None:
            return INTERRUPTED
        if self._lost is not None:
            raise self._lost
        return outcome_of(fault, self._phase, end, words=words)

    def _left_behind(self, request: TrialRequest) -> Outcome | None:
        if request.attempt is None:
            return None
        return self._outcomes.take(request.attempt.id, request.config)

    def _patience(self, request: TrialRequest) -> Patience:
        patience = Patience(self._deadlines, self._clock, request.steps, phase=self._phase)
        if self._settings.dataset is not None:
            patience.micro_steps = max(STRATA_MAX, MICRO_STEPS_TIMED)
        if request.quality is not None:
            patience.quality_tokens = request.quality.tokens + request.quality.eval_tokens
        return patience

    def _discard(self, *, patience: float = 0.0) -> tuple[End, str]:
        """End the worker and return how that was, with the last that it printed."""
        self._is_ready = False
        worker = self._worker
        self._worker = None
        if worker is None:
            return End(0), ""
        end, words = worker.close(patience=patience, kill_seconds=self._deadlines.end)
        if end.status is None:
            held = "the GPU" if self._settings.is_on_gpu else "its memory"
            self._lost = GpuLost(
                f"the worker (process {worker.process.pid}) did not end within "
                f"{self._deadlines.end:g} s of SIGKILL: the kernel holds it, and it holds {held}. "
                "What was measured is stored. Restart the machine, or let its administrator reset "
                "the GPU; then run the same command again"
            )
        return end, words


def _without_host_memory(outcome: Outcome, phase: Phase) -> Outcome:
    """Return what a trial came to in which the kernel killed processes for want of memory.

    A compiler's process that was killed looks like a setting without effect, which would never be
    tried again.
    """
    if not isinstance(outcome, Crashed | Ineffective):
        return outcome
    reason = "the kernel killed a process here, as the host's memory ran out"
    detail = f"{reason}: {outcome.detail}"
    return Crashed(phase=phase, cause="host_out_of_memory", detail=detail)
