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
from pathlib import Path
from typing import IO, Protocol

import torch

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.errors import (
    MORE_DESCRIPTORS,
    EnvironmentFault,
    InputError,
    words_of,
)
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
from qlora_sweep.sweep.data.batches import Texts, import_readers
from qlora_sweep.sweep.data.texts import SUMMARY
from qlora_sweep.sweep.running.ranks import Ranks
from qlora_sweep.sweep.running.resident import DETAIL_LENGTH, Resident
from qlora_sweep.sweep.running.wire import (
    ChildSettings,
    Finished,
    Progress,
    QualityCommand,
    Ready,
    RunCommand,
    StopCommand,
    TextsSettings,
    TrialRequest,
    Unusable,
    WorkerMessage,
    WorkerSettings,
    command_adapter,
    to_line,
)
from qlora_sweep.sweep.training import team
from qlora_sweep.sweep.training.adapters import import_compiler, start_compiler_processes
from qlora_sweep.sweep.training.exceptions import is_card_out_of_memory, is_host_out_of_memory
from qlora_sweep.sweep.training.messages import Message
from qlora_sweep.sweep.training.quality import Quality

NO_ROOM_TO_EVALUATE = "no_room_to_evaluate"
"""Flag of what trained within the budget, and could not be asked what it learned."""


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
    one trains. When whoever started this is gone, what is trained is for nobody: it leaves.
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
        self._send, self._outcomes, self._leave = send, outcomes, leave
        self._rank = rank
        self._resident = Resident(settings)
        self._others = Ranks(
            settings,
            beat=lambda: self._send(Progress(phase=self.phase)),
            on_failure=self._fail,
        )
        self._meeting = ""
        """Of the process group that it is in."""
        self._speeds: dict[str, tuple[float | None, Measured]] = {}
        """What was measured on the way to a configuration's quality, with its learning rate."""
        self._stop = threading.Event()
        self._texts = None if settings.texts is None else _texts(settings.texts, settings.seed)
        self.phase: Phase = "start"
        """Where the newest command is."""
        self._lock = threading.Lock()
        self._open: RunCommand | None = None
        """What is not answered yet."""

    def prepare(self) -> None:
        """Take what libraries take once, then put the budget in force."""
        if self._texts is not None:
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
        """Keep the outcome of a command and tell it, unless somebody did."""
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
        if (command := self._open) is not None:
            retire, config = "another rank failed", command.request.config
            done = Finished(run_id=command.run_id, config=config, outcome=outcome, retire=retire)
            self._answer(command, done)
        self._leave()

    def run(self, command: RunCommand) -> Finished:
        """Run one trial on the right base and say whether this process can run another."""
        self._stop.clear()
        outcome: Outcome
        try:
            outcome, retire, is_apart = self._run(command)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is this trial's verdict
            traceback.print_exc()
            self._others.hear_out()
            outcome = crashed(self.phase, error)
            # After an unknown failure the device's state is unknown too.
            retire, is_apart = outcome.detail, True
        return Finished(
            run_id=command.run_id,
            config=command.request.config,
            outcome=outcome,
            retire=retire,
            is_apart=is_apart,
        )

    def _run(self, command: RunCommand) -> tuple[Outcome, str | None, bool]:
        """Return how a trial ended, why a fresh process should run the next one, and whether other
        ranks go on with it."""
        started, request = time.perf_counter(), command.request
        config, size = request.config, request.config.data_parallel
        self.phase = "build"
        cards = torch.cuda.device_count() if self._settings.is_on_gpu else size
        if size > cards:
            detail = f"data_parallel {size}, and {cards} can be seen here"
            return Invalid(rule="data-parallel-needs-cards", detail=detail), None, False
        if size > 1 or not self._resident.holds(config):
            self._send(Progress(phase="build"))
        if self._rank == 0:
            command = self._others.begin(command)
        is_new_group = command.meeting != self._meeting
        if is_new_group:
            # Whatever libraries look for other processes must not find the last trial's.
            team.leave()
            self._meeting = command.meeting
        if self._rank >= size:
            return INTERRUPTED, None, False
        failed = self._resident.hold(config)
        if failed is not None:
            began = "other ranks began a trial that this one cannot begin"
            return failed, began if size > 1 else None, size > 1
        if is_new_group and size > 1:
            device = self._resident.device.torch_device
            team.join(self._rank, size, meeting=Path(command.meeting), device=device)
            # Whoever reaches this GPU from another rank is no neighbour.
            self._resident.card.remember()
        self.phase = "attach"
        limit = team.TimeLimit(command.stop_at)
        before = self._resident.device.allocated_bytes()
        outcome: Outcome | None = team.gathered(self._known_speed(request))[0]
        is_apart = False
        if outcome is None:
            if request.faithfulness is not None:
                self._resident.compared[config] = request.faithfulness
            trial = self._resident.trial(
                config,
                request.steps,
                started=started,
                budget_bytes=self._settings.budget_bytes,
                texts=self._texts,
                is_soak=request.is_soak,
                limit=limit,
                report=self._report,
            )
            outcome, is_apart = trial.run(), trial.is_apart
        if request.quality is not None and not is_apart:
            outcome = team.gathered(outcome)[0]
            if isinstance(outcome, Measured):
                self._speeds[_speed_key(request)] = config.learning_rate, outcome
                outcome, is_apart = self._with_quality(outcome, config, request.quality, limit)
        retire = "other ranks go on in the step" if is_apart else self._others.end()
        return outcome, retire or self._resident.leak(config, before), is_apart

    def _known_speed(self, request: TrialRequest) -> Measured | None:
        """Return what was measured of a configuration that has another learning rate, and nothing
        else: neither speed nor memory depends on it, and what it learns is asked all the same.
        """
        rate, known = self._speeds.get(_speed_key(request), (None, None))
        if request.quality is None or known is None or rate == request.config.learning_rate:
            return None
        flags = {*known.measurement.flags, SPEED_REUSED}
        changes = {"quality": None, "flags": tuple(sorted(flags))}
        return Measured(measurement=known.measurement.model_copy(update=changes))

    def _with_quality(
        self,
        outcome: Measured,
        config: TrialConfig,
        asked: QualityCommand,
        limit: team.TimeLimit = team.NO_LIMIT,
    ) -> tuple[Outcome, bool]:
        """Train a configuration that fits once more, for what it learns of the texts; return its
        outcome, and whether other ranks go on with it."""
        if self._texts is None:
            return outcome, False
        # What is sharded served the trial alone; other ranks may hold theirs once more.
        if config.is_sharded and (failed := self._resident.hold(config)) is not None:
            return failed, True
        base = self._resident.base
        assert base is not None, "what was measured has a base"
        quality = Quality(
            base,
            config,
            self._texts,
            asked,
            self._resident.device,
            report=self._report,
            limit=limit,
        )
        flags = outcome.measurement.flags
        try:
            learned = quality.run()
        except InputError as error:
            return Invalid(rule="quality", detail=str(error)[:DETAIL_LENGTH]), False
        if isinstance(learned, Diverged | OutOfMemory | Lost):
            return learned, quality.is_apart
        if learned is None:
            # It trains well, and what it learned is not known.
            flags = (*flags, NO_ROOM_TO_EVALUATE)
        changes = {"quality": learned, "flags": flags}
        return Measured(measurement=outcome.measurement.model_copy(update=changes)), False

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
        cause, detail = "too_few_descriptors", f"{detail}; {MORE_DESCRIPTORS}"
    elif is_host_out_of_memory(error) and not is_card_out_of_memory(error):
        cause = "host_out_of_memory"
    return Crashed(phase=phase, cause=cause, detail=detail)


def _speed_key(request: TrialRequest) -> str:
    """Return what a speed is the speed of."""
    config = canonical(request.config).changed(learning_rate=None)
    return f"{config.key()} {request.steps.model_dump_json()} {request.is_soak}"


def _texts(settings: TextsSettings, seed: int) -> Texts:
    """Return the texts to train on.

    Raises:
        EnvironmentFault: they are gone, or others are in their place.
    """
    directory = Path(settings.directory)
    try:
        found = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EnvironmentFault(
            f"the prepared texts in {directory} cannot be read: {words_of(error)}"
        ) from error
    if found != settings.fingerprint:
        raise EnvironmentFault(f"the prepared texts in {directory} are others than the study's")
    return Texts(directory, settings.eval_fraction, seed)


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
    name = "CPU"
    try:
        if settings.is_on_gpu:
            if not torch.cuda.is_available():
                send(Unusable(reason="torch finds no CUDA device; `sweep doctor` says more"))
                return
            if settings.may_compile:
                # They need longer than what is prepared here.
                start_compiler_processes()
            torch.cuda.set_device(rank)
            name = torch.cuda.get_device_name()
        serving = worker(settings, send=send, rank=rank)
        serving.prepare()
    except Exception as error:  # noqa: BLE001 - the tuner raises it
        traceback.print_exc()
        send(Unusable(reason=words_of(error)[:DETAIL_LENGTH]))
        return
    send(Ready(device_name=name))
    serving.serve(sys.stdin.buffer)
    leave_process()
