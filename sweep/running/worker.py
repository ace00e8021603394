"""The worker in its own process: commands in on stdin, messages out, each outcome on disk before it
is told. The device and the base model stay between trials."""

from __future__ import annotations

import errno
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Protocol

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.errors import (
    MORE_DESCRIPTORS,
    EnvironmentFault,
    InputError,
    words_of,
)
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.storage.directory import OutcomeFile
from qlora_sweep.storage.records import (
    INTERRUPTED,
    SPEED_REUSED,
    CrashCause,
    Crashed,
    Diverged,
    Invalid,
    Lost,
    Measured,
    Outcome,
    OutOfMemory,
    Phase,
)
from qlora_sweep.sweep.data.batches import TokenizedDataset, import_readers
from qlora_sweep.sweep.data.prepared_dataset import SUMMARY
from qlora_sweep.sweep.running.ranks import Ranks
from qlora_sweep.sweep.running.resident import DETAIL_LENGTH, Resident
from qlora_sweep.sweep.running.wire import (
    ChildSettings,
    DatasetSettings,
    Finished,
    Progress,
    QualityCommand,
    Ready,
    RunCommand,
    StopCommand,
    TrialRequest,
    Unusable,
    WorkerMessage,
    WorkerSettings,
    command_adapter,
    to_line,
)
from qlora_sweep.sweep.training import process_group
from qlora_sweep.sweep.training.adapters import import_compiler, start_compiler_processes
from qlora_sweep.sweep.training.device import DEVICE_TYPES
from qlora_sweep.sweep.training.exceptions import is_gpu_out_of_memory, is_host_out_of_memory
from qlora_sweep.sweep.training.messages import Message
from qlora_sweep.sweep.training.quality import Quality
from qlora_sweep.sweep.training.trial import Trial, TrialTask

NO_ROOM_TO_EVALUATE = "no_room_to_evaluate"
"""Flag of what trained within the budget, and could not be asked what it learned."""


@dataclass(frozen=True)
class TrialEnd:
    """How a trial ended."""

    outcome: Outcome
    retire: str | None = None
    """Why a fresh process should run the next one; None where this one can."""
    is_apart: bool = False
    """Whether other ranks continue it."""


class Serving(Protocol):
    """What a child does once it has its settings."""

    def prepare(self) -> None:
        """Take the device."""

    def serve(self, commands: IO[bytes]) -> None:
        """Do what is asked, to the end."""


def leave_process() -> None:
    """End this process at once."""
    sys.stderr.flush()
    # Shutdown with a CUDA context and daemon threads can hang or abort; nothing is left to save.
    os._exit(0)


def listen(
    commands: IO[bytes],
    hear: Callable[[RunCommand | StopCommand], object],
    *,
    leave: Callable[[], None] = leave_process,
) -> None:
    """Hear commands from now on, in a thread of their own: a stop must get through while another
    one trains. It leaves when the process that started this one is gone.
    """

    def read() -> None:
        try:
            for line in commands:
                hear(command_adapter.validate_json(line))
        finally:
            leave()

    threading.Thread(target=read, daemon=True).start()


class Worker:
    """The device, the resident base, and the trials run on it.

    Args:
        settings: the first thing that the process is told.
        send: tells the supervisor, or the first rank.
        rank: of several processes that train together.
        outcomes: where an attempt's outcome is left before it is told; None for where the settings
            say, if they do.
        leave: ends the process.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        send: Callable[[WorkerMessage], None],
        rank: int = 0,
        outcomes: OutcomeFile | None = None,
        leave: Callable[[], None] = leave_process,
    ) -> None:
        self._settings = settings
        if outcomes is None and settings.outcome_path is not None and rank == 0:
            outcomes = OutcomeFile(Path(settings.outcome_path))
        self._send = send
        self._outcomes = outcomes
        self._leave = leave
        self._rank = rank
        self._resident = Resident(settings)
        self._others = Ranks(
            settings,
            beat=lambda: self._send(Progress(phase=self.phase)),
            on_failure=self._fail,
        )
        self._rendezvous = ""
        """Of the process group that it is in."""
        self._speeds: dict[str, tuple[float | None, Measured]] = {}
        """What was measured on the way to a configuration's quality, with its learning rate."""
        self._stop = threading.Event()
        self._dataset: TokenizedDataset | None = None
        if settings.dataset is not None:
            self._dataset = _opened(settings.dataset, settings.seed)
        self.phase: Phase = "start"
        """Where the newest command is."""
        self._lock = threading.Lock()
        self._open: RunCommand | None = None
        """What is not answered yet."""

    def prepare(self) -> None:
        """Take what libraries take once, then put the budget in force."""
        if self._dataset is not None:
            import_readers()
        self._resident.prepare()

    def serve(self, commands: IO[bytes]) -> None:
        """Run what is told until a fresh process should run the next trial."""
        runs: queue.SimpleQueue[RunCommand] = queue.SimpleQueue()

        def hear(command: RunCommand | StopCommand) -> None:
            match command:
                case RunCommand():
                    runs.put(command)
                case StopCommand():
                    self._stop.set()

        listen(commands, hear, leave=self._leave)
        is_fit = True
        while is_fit:
            command = runs.get()
            with self._lock:
                self._open = command
            done = self.run(command)
            self._answer(command, done)
            is_fit = done.retire is None

    def _answer(self, command: RunCommand, done: Finished) -> None:
        """Keep the outcome of a command and tell it, unless that was done."""
        with self._lock:
            if self._open is not command:
                return
            self._open = None
            attempt = command.request.attempt
            if attempt is not None and self._outcomes is not None:
                try:
                    self._outcomes.write(attempt, done.config, done.outcome)
                except EnvironmentFault as fault:
                    # It is about to be told, which is what counts.
                    print(fault, file=sys.stderr)  # noqa: T201 - into the worker's log
            self._send(done)

    def _fail(self, outcome: Outcome) -> None:
        """Answer the open command with what befell another rank, and be gone: the thread that
        trains may be waiting for that rank, where nothing wakes it. With no command open that is
        nobody's verdict, and the next is for a fresh worker."""
        command = self._open
        if command is not None:
            done = Finished(
                run_id=command.run_id,
                config=command.request.config,
                outcome=outcome,
                retire="another rank failed",
            )
            self._answer(command, done)
        self._leave()

    def run(self, command: RunCommand) -> Finished:
        """Run one trial on the right base and say whether this process can run another."""
        self._stop.clear()
        try:
            ended = self._run(command)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is this trial's verdict
            traceback.print_exc()
            self._others.hear_out()
            outcome = crashed(self.phase, error)
            # After an unknown failure the device's state is unknown too.
            ended = TrialEnd(outcome, retire=outcome.detail, is_apart=True)
        return Finished(
            run_id=command.run_id,
            config=command.request.config,
            outcome=ended.outcome,
            retire=ended.retire,
            is_apart=ended.is_apart,
        )

    def _run(self, command: RunCommand) -> TrialEnd:
        """Run one trial, on the ranks that it takes."""
        started = time.perf_counter()
        config = command.request.config
        ranks = config.data_parallel
        self.phase = "build"
        refused = self._too_few_gpus(ranks)
        if refused is not None:
            return TrialEnd(refused)
        if ranks > 1 or not self._resident.holds(config):
            self._send(Progress(phase="build"))
        if self._rank == 0:
            command = self._others.begin(command)
        is_new_group = command.rendezvous != self._rendezvous
        if is_new_group:
            # Whatever libraries look for other processes must not find the last trial's.
            process_group.leave()
            self._rendezvous = command.rendezvous
        if self._rank >= ranks:
            return TrialEnd(INTERRUPTED)
        failed = self._resident.hold(config)
        if failed is not None and ranks > 1:
            reason = "other ranks began a trial that this one cannot begin"
            return TrialEnd(failed, retire=reason, is_apart=True)
        if failed is not None:
            return TrialEnd(failed)
        if is_new_group and ranks > 1:
            device = self._resident.device.torch_device
            process_group.join(
                self._rank, ranks, rendezvous=Path(command.rendezvous), device=device
            )
            # Another rank that reaches this GPU is no neighbour.
            self._resident.gpu.remember()
        before = self._resident.device.allocated_bytes()
        ended = self._measured(command, started=started)
        if ended.is_apart:
            return replace(ended, retire="other ranks go on in the step")
        retire = self._others.end() or self._resident.leak(config, before)
        return replace(ended, retire=retire)

    def _too_few_gpus(self, ranks: int) -> Invalid | None:
        """Return why a trial on so many GPUs cannot be run here; None where it can."""
        visible = self._resident.device.count()
        if visible is None or ranks <= visible:
            return None
        detail = f"data_parallel {ranks}, and {visible} can be seen here"
        return Invalid(rule="data-parallel-needs-gpus", detail=detail)

    def _measured(self, command: RunCommand, *, started: float) -> TrialEnd:
        """Train on the base that is there, once for speed and memory and once for what it learns.

        Args:
            command: with what is asked.
            started: when the trial began, its build included.
        """
        request = command.request
        config = request.config
        self.phase = "attach"
        limit = process_group.TimeLimit(command.stop_at)
        earlier = process_group.all_gathered(self._known_speed(request))[0]
        if earlier is not None:
            ended = TrialEnd(earlier)
        else:
            ended = self._trained(request, started=started, limit=limit)
        if request.quality is None or ended.is_apart:
            return ended
        outcome = process_group.all_gathered(ended.outcome)[0]
        if not isinstance(outcome, Measured):
            return TrialEnd(outcome)
        self._speeds[_speed_key(request)] = config.learning_rate, outcome
        return self._with_quality(outcome, config, request.quality, limit)

    def _trained(
        self, request: TrialRequest, *, started: float, limit: process_group.TimeLimit
    ) -> TrialEnd:
        """Train for speed and memory."""
        base = self._resident.base
        assert base is not None, "a trial has a base"
        trial_device = self._resident.trial_device
        if request.faithfulness is not None:
            trial_device.compared[request.config] = request.faithfulness
        task = TrialTask(
            request.config,
            request.steps,
            dataset=self._dataset,
            is_soak=request.is_soak,
            limit=limit,
        )
        trial = Trial(base, trial_device, task, report=self._report, started=started)
        outcome = trial.run()
        return TrialEnd(outcome, is_apart=trial.is_apart)

    def _known_speed(self, request: TrialRequest) -> Measured | None:
        """Return what was measured of a configuration that has another learning rate, and nothing
        else: neither speed nor memory depends on it, and what it learns is asked all the same.
        """
        measured = self._speeds.get(_speed_key(request))
        if request.quality is None or measured is None:
            return None
        rate, earlier = measured
        if rate == request.config.learning_rate:
            return None
        flags = set(earlier.measurement.flags) | {SPEED_REUSED}
        measurement = replaced(earlier.measurement, quality=None, flags=tuple(sorted(flags)))
        return Measured(measurement=measurement)

    def _with_quality(
        self,
        outcome: Measured,
        config: TrialConfig,
        asked: QualityCommand,
        limit: process_group.TimeLimit = process_group.NO_LIMIT,
    ) -> TrialEnd:
        """Train a configuration that fits once more, for what it learns of the texts."""
        if self._dataset is None:
            return TrialEnd(outcome)
        # What is sharded served the trial alone; other ranks may hold theirs once more.
        if config.is_sharded:
            failed = self._resident.hold(config)
            if failed is not None:
                return TrialEnd(failed, is_apart=True)
        base = self._resident.base
        assert base is not None, "what was measured has a base"
        quality = Quality(
            base,
            config,
            self._dataset,
            asked,
            self._resident.device,
            report=self._report,
            limit=limit,
        )
        flags = outcome.measurement.flags
        try:
            learned = quality.run()
        except InputError as error:
            return TrialEnd(Invalid(rule="quality", detail=str(error)[:DETAIL_LENGTH]))
        if isinstance(learned, Diverged | OutOfMemory | Lost):
            return TrialEnd(learned, is_apart=quality.is_apart)
        if learned is None:
            # It trains well, and what it learned is not known.
            flags += (NO_ROOM_TO_EVALUATE,)
        measurement = replaced(outcome.measurement, quality=learned, flags=flags)
        return TrialEnd(Measured(measurement=measurement))

    def _report(self, progress: Progress) -> bool:
        """Tell how far the trial is; return whether it is to stop."""
        self.phase = progress.phase
        self._send(progress)
        return self._stop.is_set()


def crashed(phase: Phase, error: Exception | SystemExit) -> Crashed:
    """Return the outcome of a training that raised what is no verdict of its own."""
    if isinstance(error, SystemExit):
        return Crashed(phase=phase, cause="exit", detail=f"a library called exit({error.code})")
    cause: CrashCause = "exception"
    detail = words_of(error)[:DETAIL_LENGTH]
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        cause = "too_few_descriptors"
        detail += f"; {MORE_DESCRIPTORS}"
    elif is_host_out_of_memory(error) and not is_gpu_out_of_memory(error):
        cause = "host_out_of_memory"
    return Crashed(phase=phase, cause=cause, detail=detail)


def _speed_key(request: TrialRequest) -> str:
    """Return what a speed is the speed of."""
    config = canonical(request.config).changed(learning_rate=None)
    return f"{config.key()} {request.steps.model_dump_json()} {request.is_soak}"


def _opened(settings: DatasetSettings, seed: int) -> TokenizedDataset:
    """Return the texts to train on.

    Raises:
        EnvironmentFault: they are gone, or others are in their place.
    """
    directory = Path(settings.directory)
    try:
        fingerprint = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EnvironmentFault(
            f"the prepared texts in {directory} cannot be read: {words_of(error)}"
        ) from error
    if fingerprint != settings.fingerprint:
        raise EnvironmentFault(f"the prepared texts in {directory} are others than the study's")
    return TokenizedDataset(directory, settings.eval_fraction, seed)


def main(
    worker: Callable[..., Serving] = Worker, settings_type: type[ChildSettings] = WorkerSettings
) -> None:
    """Read the settings, prepare the device, serve until told to stop or done.

    Args:
        worker: what serves, made of its settings, `send` and its rank.
        settings_type: of the first line.
    """
    pipe = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
    rank = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    lock = threading.Lock()

    def send(message: Message) -> None:
        if rank > 0 and isinstance(message, Progress):
            # The first rank's is that of all.
            return
        line = to_line(message)
        # Beats come from the training's thread, and nothing may cut a line in two.
        with lock:
            while line:
                line = line[pipe.write(line) :]

    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        import_compiler()
    settings = settings_type.model_validate_json(sys.stdin.buffer.readline())
    if settings.log_path is not None:
        with open(settings.log_path, "ab") as log:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
    device = DEVICE_TYPES[settings.device]
    try:
        if not device.is_available():
            send(Unusable(reason="torch finds no CUDA device; `sweep doctor` says more"))
            return
        if settings.is_on_gpu and settings.may_compile:
            # They need longer than what is prepared here.
            start_compiler_processes()
        device.choose(rank)
        name = device.product()
        serving = worker(settings, send=send, rank=rank)
        serving.prepare()
    except Exception as error:  # noqa: BLE001 - the tuner raises it
        traceback.print_exc()
        send(Unusable(reason=words_of(error)[:DETAIL_LENGTH]))
        return
    send(Ready(device_name=name))
    serving.serve(sys.stdin.buffer)
    leave_process()
