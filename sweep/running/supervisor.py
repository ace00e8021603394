"""Owns the worker's life: starts it, watches its beats, kills what hangs, replaces what ended, and
types every end.

Satisfies `runner.Runner`. Knows nothing of torch, studies or samplers.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault
from search_spaces.gpus import match_product
from search_spaces.knobs import ComputeDtype
from search_spaces.models import ModelSpec
from search_spaces.space import StepBudget, Weights
from storage.definition import Target
from storage.records import Crashed, Lost, Outcome, Phase, TimedOut
from sweep.running.child import WorkerEnded, WorkerProcess, WorkerSilent
from sweep.running.runner import Observer, Progress, keep_going
from sweep.running.wire import (
    Alive,
    Finished,
    Ready,
    RunCommand,
    StopCommand,
    Unusable,
    WorkerSettings,
)

_PATIENCE = 5.0
"""Seconds that a worker whose pipe closed gets to end by itself, so that its own exit status is
seen."""


@dataclass(frozen=True)
class Deadlines:
    """Longest silence allowed in each phase, in seconds.

    A hang shows as silence alone: a kernel that never ends keeps the worker from answering, and
    only a kill frees the card.
    """

    start: float = 300.0
    build: float = 1800.0
    attach: float = 120.0
    warmup: float = 300.0
    """The first step compiles kernels, or whole layers."""
    measure: float = 120.0
    detach: float = 120.0

    def of(self, phase: Phase) -> float:
        """Return the deadline of a phase."""
        return float(getattr(self, phase))


class SupervisedRunner:
    """Runs configurations in a child process that owns the device and keeps the base model
    resident.

    Args:
        model: what is trained.
        target: device and memory budget.
        weights: random, or loaded with transformers.
        log_path: where everything the worker's libraries print goes.
        seed: of weights, adapters and tokens.
        deadlines: longest silence in each phase.
        module: the worker's module; tests put a misbehaving one here.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        target: Target,
        weights: Weights = "random",
        log_path: Path,
        seed: int = 0,
        deadlines: Deadlines | None = None,
        module: str = "sweep.running",
    ) -> None:
        self._settings = WorkerSettings(
            device=target.device,
            budget_bytes=target.budget_bytes,
            model=model.to_json(),
            weights=weights,
            seed=seed,
            is_emulated=target.emulated_on is not None,
            peak_flops=_peak_flops(target),
        )
        self._log_path = log_path
        self._deadlines = deadlines or Deadlines()
        self._module = module
        self._has_run = False
        self._worker: WorkerProcess | None = None
        self._is_ready = False
        self._phase: Phase = "start"
        self._is_cancelled = False

    def run(
        self,
        config: TrialConfig,
        *,
        steps: StepBudget,
        observe: Observer = keep_going,
        is_soak: bool = False,
        attempt: str | None = None,
    ) -> Outcome:
        """See `runner.Runner.run`."""
        self._phase = "start"
        try:
            worker = self._ready_worker()
            command = RunCommand(config=config, steps=steps, is_soak=is_soak)
            worker.send(command.model_dump_json())
            self._has_run = True
            self._phase = "attach"
            return self._follow(worker, observe)
        except WorkerSilent:
            self._discard()
            silence = self._deadlines.of(self._phase)
            return TimedOut(phase=self._phase, detail=f"no sign of life for {silence:g} s")
        except WorkerEnded:
            # An end that was asked for looks like any other from here.
            status = self._discard(patience=_PATIENCE)
            if self._is_cancelled:
                return Lost(detail="interrupted", is_interrupted=True)
            return Crashed(phase=self._phase, detail=self._describe_end(status))

    def _follow(self, worker: WorkerProcess, observe: Observer) -> Outcome:
        """Watch the running trial to its end."""
        is_stopping = False
        while True:
            match worker.next_message(timeout=self._deadlines.of(self._phase)):
                case Alive() as alive:
                    self._phase = alive.phase
                    if observe(_progress(alive)) and not is_stopping:
                        is_stopping = True
                        worker.send(StopCommand().model_dump_json())
                case Finished() as finished:
                    if finished.retire is not None:
                        self._discard()
                    return finished.outcome
                case Ready() | Unusable():
                    raise WorkerEnded

    def start(self) -> None:
        """See `runner.Runner.start`: the worker imports its libraries and takes the device."""
        # What keeps it from being started does so at the first `run` too, which says it.
        with contextlib.suppress(OSError, WorkerEnded):
            self._started_worker()

    def cancel(self) -> None:
        """See `runner.Runner.cancel`."""
        # Before the kill, so that whoever sees the worker end knows why.
        self._is_cancelled = True
        if self._worker is not None:
            self._worker.kill()

    def renew(self) -> None:
        """See `runner.Runner.renew`: a worker that ran nothing yet is as fresh as another."""
        if self._has_run:
            self._discard()

    def close(self) -> None:
        """See `runner.Runner.close`."""
        self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready_worker(self) -> WorkerProcess:
        """Return the worker that owns the device: the resident one, or one that is waited for.

        Raises:
            EnvironmentFault: the device is not to be had.
        """
        worker = self._worker if self._is_cancelled else self._started_worker()
        if self._is_cancelled:
            # Perhaps while it was being started, when there was no worker yet to kill.
            if worker is not None:
                worker.kill()
            raise WorkerEnded
        assert worker is not None
        if self._is_ready:
            return worker
        match worker.next_message(timeout=self._deadlines.start):
            case Ready():
                self._is_ready = True
                return worker
            case Unusable(reason=reason):
                self._discard()
                raise EnvironmentFault(f"the worker cannot use the device: {reason}")
            case _:
                raise WorkerEnded

    def _started_worker(self) -> WorkerProcess:
        """Return the worker, which may not own the device yet."""
        if self._worker is None:
            self._worker = WorkerProcess(
                self._settings, log_path=self._log_path, module=self._module
            )
        return self._worker

    def _discard(self, *, patience: float = 0.0) -> int:
        self._has_run = False
        self._is_ready = False
        worker, self._worker = self._worker, None
        return 0 if worker is None else worker.close(patience=patience)

    def _describe_end(self, status: int) -> str:
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return f"the worker ended with {how}; the end of {self._log_path.name}: {self._log_tail()}"

    def _log_tail(self) -> str:
        try:
            lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "(unreadable)"
        return " | ".join(line.strip() for line in lines[-3:])[-600:]


def _progress(alive: Alive) -> Progress:
    return Progress(
        phase=alive.phase,
        step=alive.step,
        tokens_per_second=alive.tokens_per_second,
        tokens_per_second_high=alive.tokens_per_second_high,
        allocated_bytes=alive.allocated_bytes,
    )


def _peak_flops(target: Target) -> dict[ComputeDtype, float]:
    """Return the peak FLOP/s of the card that really runs."""
    if target.device == "cpu":
        return {}
    spec = match_product(target.emulated_on or target.gpu)
    return {} if spec is None else dict(spec.peak_flops)
