"""Owns the worker's life: starts it, watches its beats, kills what hangs, replaces what ended,
types every end.

Satisfies `runner.Runner`. Knows nothing of torch, studies or samplers.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault
from search_spaces.gpus import match_product
from search_spaces.knobs import ComputeDtype
from search_spaces.models import ModelSpec
from search_spaces.space import StepBudget, Weights
from storage.definition import Target
from storage.records import Crashed, Lost, Outcome, Phase, TimedOut
from sweep.running.runner import Observer, Progress, keep_going
from sweep.running.wire import (
    Alive,
    Event,
    Finished,
    Ready,
    RunCommand,
    StopCommand,
    Unusable,
    WorkerSettings,
    event_adapter,
)

_CPU_ENVIRONMENT = {
    # A study for the CPU never sees a card, whatever library looks for one.
    "CUDA_VISIBLE_DEVICES": "",
    # Fixed sizes and one arena make the budget repeatable: freed tensors go back at once.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    # bitsandbytes compiles its optimizers on the CPU, one C++ build for each shape, in the budget.
    "TORCHDYNAMO_DISABLE": "1",
}
_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONUNBUFFERED": "1",
}
_MEANT_FOR_OTHERS = ("ACCELERATE_", "LOCAL_RANK", "RANK", "WORLD_SIZE")
"""Starts of variables that tell accelerate how another training is to run, on which device too."""

_PATIENCE = 5.0
"""Seconds that a worker whose pipe closed gets to end by itself, so that its own exit status is
seen.
"""


@dataclass(frozen=True)
class Deadlines:
    """Longest silence allowed in each phase, in seconds."""

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


class WorkerEnded(Exception):  # noqa: N818 - an end is not always an error
    """The worker's pipe closed."""


class WorkerSilent(Exception):  # noqa: N818 - nor is silence
    """The worker gave no sign of life within its phase's deadline."""


class _Worker:
    """One child process and its two pipes."""

    def __init__(self, settings: WorkerSettings, *, log_path: Path, module: str) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, write_end = os.pipe()
        environment = _environment(settings.device)
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                # -P: a module of the user's directory must not shadow ours.
                [sys.executable, "-P", "-m", module, str(write_end)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write_end],
                start_new_session=True,
                env=environment,
            )
        os.close(write_end)
        self._events = read_end
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(read_end, selectors.EVENT_READ)
        self.send(settings.model_dump_json())

    def send(self, line: str) -> None:
        """Write one line to the worker.

        Raises:
            WorkerEnded: it does not read any more.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise WorkerEnded from error

    def next_event(self, *, timeout: float) -> Event:
        """Return the next event.

        Raises:
            WorkerSilent: none came in time.
            WorkerEnded: the pipe closed, or what came is not an event.
        """
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise WorkerSilent
            chunk = os.read(self._events, 65536)
            if not chunk:
                raise WorkerEnded
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return event_adapter.validate_json(line)
        except ValidationError as error:
            raise WorkerEnded from error

    def kill(self) -> None:
        """End the worker's whole process group and wait for it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()

    def close(self, *, patience: float = 0.0) -> int:
        """Free the pipes and return the exit status; after ``patience`` seconds, by force."""
        try:
            status = self.process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self.process.wait()
        self._selector.close()
        os.close(self._events)
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except OSError:
                # What was still to be flushed was for a process that is gone.
                self.process.stdin = None
        return status


def _environment(device: str) -> dict[str, str]:
    """Return the variables that a worker starts with."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_MEANT_FOR_OTHERS)}
    return inherited | _QUIET | (_CPU_ENVIRONMENT if device == "cpu" else {})


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
        module: str = "sweep.running.worker",
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
        self._worker: _Worker | None = None
        self._is_cancelled = False

    def run(
        self, config: TrialConfig, *, steps: StepBudget, observe: Observer = keep_going
    ) -> Outcome:
        """See `runner.Runner.run`."""
        self._is_cancelled = False
        phase: Phase = "start"
        try:
            worker = self._ready_worker()
            worker.send(RunCommand(config=config, steps=steps).model_dump_json())
            phase = "attach"
            is_stopping = False
            while True:
                match worker.next_event(timeout=self._deadlines.of(phase)):
                    case Alive() as alive:
                        phase = alive.phase
                        if observe(_progress(alive)) and not is_stopping:
                            is_stopping = True
                            worker.send(StopCommand().model_dump_json())
                    case Finished() as finished:
                        if finished.retire is not None:
                            self._discard()
                        return finished.outcome
                    case Ready() | Unusable():
                        raise WorkerEnded
        except WorkerSilent:
            self._discard()
            return TimedOut(
                phase=phase, detail=f"no sign of life for {self._deadlines.of(phase):g} s"
            )
        except WorkerEnded:
            status = self._discard(patience=_PATIENCE)
            if self._is_cancelled:
                return Lost(detail="interrupted")
            return Crashed(phase=phase, detail=self._describe_end(status))

    def cancel(self) -> None:
        """See `runner.Runner.cancel`."""
        self._is_cancelled = True
        if self._worker is not None:
            self._worker.kill()

    def close(self) -> None:
        """See `runner.Runner.close`."""
        self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ready_worker(self) -> _Worker:
        """Return the resident worker, or start one and wait until it owns the device.

        Raises:
            EnvironmentFault: the device is not to be had.
        """
        if self._worker is not None:
            return self._worker
        self._worker = _Worker(self._settings, log_path=self._log_path, module=self._module)
        if self._is_cancelled:
            # While it was being started, when there was no worker yet to kill.
            self._worker.kill()
            raise WorkerEnded
        match self._worker.next_event(timeout=self._deadlines.start):
            case Ready():
                return self._worker
            case Unusable(reason=reason):
                self._discard()
                raise EnvironmentFault(f"the worker cannot use the device: {reason}")
            case _:
                raise WorkerEnded

    def _discard(self, *, patience: float = 0.0) -> int:
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
