"""Running a training: its process is started, followed to its end, and ended whatever happens.

Satisfied by any module that speaks as `wire` says. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from search_spaces.errors import EnvironmentFault, InputError, Interrupted, NothingFits
from storage import files
from sweep.finetuning import checkpoints
from sweep.finetuning.wire import (
    STOP,
    Alive,
    End,
    Event,
    Message,
    NotFinite,
    Promise,
    RanOut,
    Refused,
    Saved,
    Stopped,
    TrainingJob,
    TrainingResult,
    Unable,
    message_adapter,
)
from sweep.running.child import (
    AttentiveClock,
    WorkerFault,
    WorkerMisbehaved,
    WorkerProcess,
    WorkerSilent,
    outcome_of,
)
from sweep.running.wire import UnreadableError, read_line

__all__ = ["Promise", "TrainingJob", "TrainingResult", "follow_job", "run_job"]

LOG = "training.log"
"""What the libraries of a training print, in its output directory."""

Observer = Callable[[Event], None]


@dataclass(frozen=True)
class Patience:
    """How long a training may be silent, in seconds."""

    start: float = 300.0
    """Imports; a cold disk takes minutes."""
    working: float = 1800.0
    """Weights are loaded and layers compiled without a word, and a micro-batch may take long."""
    stop: float = 300.0
    """From when it was asked to stop: the step under way ends, and a checkpoint is written."""
    closed: float = 5.0


def ignore(_: Event) -> None:
    """Observe nothing."""


def run_job(job: TrainingJob, *, observe: Observer = ignore) -> TrainingResult:
    """Train and return what it came to.

    Args:
        job: the training.
        observe: told what happens on the way.

    Raises:
        NothingFits: memory ran out, or the loss was no number any more.
        InputError: something of the job cannot be trained.
        EnvironmentFault: the machine is at fault; `Interrupted` where somebody asked to stop.
    """
    match follow_job(job, observe=observe):
        case TrainingResult() as result:
            return result
        case RanOut() as end:
            raise NothingFits(f"out of memory in {end.doing}, step {end.step}: {end.detail}")
        case NotFinite() as end:
            raise NothingFits(f"the training is no training any more: {end.what}, step {end.step}")
        case Refused() as end:
            raise InputError(end.reason)
        case Stopped() as end:
            raise Interrupted(f"stopped at step {end.step}")
        case Unable() as end:
            raise EnvironmentFault(end.reason)


def follow_job(
    job: TrainingJob,
    *,
    observe: Observer = ignore,
    patience: Patience | None = None,
    module: str = "sweep.finetuning",
) -> End:
    """Train and return how it ended, whatever that is.

    A `KeyboardInterrupt` asks the training to write a checkpoint and to stop; a second one ends it.

    Raises:
        EnvironmentFault: no process can be started, or the log not be written.
        KeyboardInterrupt: the second.
    """
    limits = patience or Patience()
    files.make_directory(Path(job.output))
    clock = AttentiveClock()
    process = WorkerProcess(
        job,
        log_path=Path(job.output).absolute() / LOG,
        module=module,
        clock=clock,
        patience=limits.closed,
    )
    return _Followed(job, process, clock, limits, observe).to_the_end()


class _Followed:
    """A training that runs, and what was heard of it."""

    def __init__(
        self,
        job: TrainingJob,
        process: WorkerProcess,
        clock: AttentiveClock,
        patience: Patience,
        observe: Observer,
    ) -> None:
        self._job = job
        self._process = process
        self._clock = clock
        self._patience = patience
        self._observe = observe
        self._doing = "starting"
        self._saved: int | None = None
        self._is_stopping = False

    def to_the_end(self) -> End:
        """Follow it until it ends, and leave no process behind."""
        try:
            while True:
                try:
                    return self._end()
                except KeyboardInterrupt:
                    if self._is_stopping:
                        raise
                    self._is_stopping = True
                    self._process.send(STOP)
        finally:
            self._process.close()

    def _end(self) -> End:
        try:
            return next(message for message in self._messages() if isinstance(message, End))
        except WorkerFault as fault:
            end, words = self._process.close(patience=self._patience.closed)
            outcome = outcome_of(fault, "warmup", end, words=words)
            return self._unable(outcome.detail)

    def _messages(self) -> Iterator[Message]:
        """Yield what it says; the observer has heard it by then."""
        heard_at = self._clock.look()
        while True:
            line = self._process.next_line()
            if line is None:
                # Asked anew each time: somebody may have asked it to stop.
                if self._clock.now >= heard_at + self._limit():
                    raise WorkerSilent(f"no sign of life for {self._limit():g} s, in {self._doing}")
                continue
            heard_at = self._clock.now
            try:
                message = read_line(line, message_adapter)
            except UnreadableError as error:
                raise WorkerMisbehaved(f"it said {error}") from None
            match message:
                case Alive(doing=doing):
                    self._doing = doing
                case Saved(step=step):
                    self._saved = step
            if not isinstance(message, End):
                self._observe(message)
            yield message

    def _limit(self) -> float:
        if self._is_stopping:
            return self._patience.stop
        is_starting = self._doing == "starting"
        return self._patience.start if is_starting else self._patience.working

    def _unable(self, reason: str) -> Unable:
        saved = self._saved
        if saved is None and self._job.keeps_checkpoints:
            saved = next(iter(checkpoints.steps_of(Path(self._job.output))), None)
        return Unable(reason=reason, checkpoint_step=saved)
