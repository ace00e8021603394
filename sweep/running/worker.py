"""The device of a child process: a configuration in, progress and an outcome out. The base model
stays between trials."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from search_spaces.config import TrialConfig, canonical
from search_spaces.errors import EnvironmentFault, InputError, words_of
from storage.records import (
    INTERRUPTED,
    Diverged,
    Invalid,
    Measured,
    Outcome,
    OutOfMemory,
    Phase,
)
from sweep.data.opening import import_readers
from sweep.data.request import SUMMARY
from sweep.running.ranks import Ranks
from sweep.running.resident import DETAIL_LENGTH, Resident
from sweep.running.wire import (
    Finished,
    Progress,
    QualityCommand,
    RunCommand,
    TextsSettings,
    TrialRequest,
    WorkerMessage,
    WorkerSettings,
)
from sweep.training import team
from sweep.training.quality import NoRoomToEvaluateError, Quality, Question
from sweep.training.texts import Texts
from sweep.training.trial import Beat

SPEED_REUSED = "speed_reused"
"""Flag of a speed that was measured at another learning rate, on which it does not depend."""
NO_ROOM_TO_EVALUATE = "no_room_to_evaluate"
"""Flag of what trained within the budget, and could not be asked what it learned."""


class Worker:
    """The device, the resident base, and the trials run on it."""

    def __init__(
        self, settings: WorkerSettings, *, send: Callable[[WorkerMessage], None], rank: int = 0
    ) -> None:
        self._settings = settings
        self._send = send
        self._rank = rank
        self._resident = Resident(settings)
        self._others = Ranks(settings, beat=lambda: self._send(Progress(phase=self.phase)))
        self._meeting = ""
        """Of the process group that it is in."""
        self._speeds: dict[str, tuple[float, Measured]] = {}
        """What was measured on the way to a configuration's quality, with its learning rate."""
        self._stop = threading.Event()
        self._texts = None if settings.texts is None else _texts(settings.texts, settings.seed)
        self.phase: Phase = "start"
        """Where the newest command is."""

    def prepare(self) -> None:
        """Take what libraries take once, then put the budget in force."""
        if self._texts is not None:
            import_readers()
        self._resident.prepare()

    def tell_failures(self, told: Callable[[Outcome], None]) -> None:
        """Have it told what befell another rank of the running trial.

        From a thread of its own: this one may be waiting for that rank, and not come back.
        """
        self._others.on_failure = told

    def stop_trial(self) -> None:
        """Ask the running trial to stop as slow; it does at its next step."""
        self._stop.set()

    def run(self, command: RunCommand) -> Finished:
        """Run one trial on the right base and say whether this process can run another."""
        self._stop.clear()
        try:
            return self._run(command)
        except Exception:
            self._others.hear_out()
            raise

    def _run(self, command: RunCommand) -> Finished:
        started, config = time.perf_counter(), command.request.config
        self.phase = "build"
        is_alone = config.data_parallel == 1
        cards = torch.cuda.device_count() if self._settings.device == "cuda" else None
        if cards is not None and config.data_parallel > cards:
            detail = f"data_parallel {config.data_parallel}, and {cards} can be seen here"
            return finished(command, Invalid(rule="data-parallel-needs-cards", detail=detail))
        if self._rank == 0:
            if not is_alone:
                self._send(Progress(phase="build"))
            command = self._others.begin(command)
        is_new_group = command.meeting != self._meeting
        if is_new_group:
            # Whatever libraries look for other processes must not find the last trial's.
            team.leave()
            self._meeting = command.meeting
        if self._rank >= config.data_parallel:
            return finished(command, INTERRUPTED)
        failed = self._ensure_base(config)
        if failed is not None:
            retire = None if is_alone else "other ranks began a trial that this one cannot begin"
            return finished(command, failed, retire=retire, is_apart=not is_alone)
        if is_new_group and not is_alone:
            place = team.Place(self._rank, config.data_parallel)
            device = self._resident.device.torch_device
            team.join(place, meeting=Path(command.meeting), device=device)
            # Whoever reaches this GPU from another rank is no neighbour.
            self._resident.card.remember()
        return self._trained(command, started)

    def _trained(self, command: RunCommand, started: float) -> Finished:
        request, config, base = command.request, command.request.config, self._resident.base
        assert base is not None, "what is held is there"
        self.phase = "attach"
        before = self._resident.device.allocated_bytes()
        outcome: Outcome | None = self._known_speed(request)
        retire, is_apart = None, False
        if outcome is None:
            trial = self._resident.trial(
                base,
                config,
                request.steps,
                started=started,
                budget_bytes=self._settings.budget_bytes,
                texts=self._texts,
                is_soak=request.is_soak,
                report=lambda beat: self._report(beat, config),
            )
            outcome = trial.run()
            is_apart = trial.is_apart
            retire = _APART if is_apart else self._others.end()
        if request.quality is not None and isinstance(outcome, Measured):
            self._speeds[_speed_key(request)] = config.learning_rate, outcome
            outcome = self._with_quality(outcome, config, request.quality)
        retire = retire or self._resident.leak(config, before)
        return finished(command, outcome, retire=retire, is_apart=is_apart)

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
        self, outcome: Measured, config: TrialConfig, asked: QualityCommand
    ) -> Outcome:
        """Train a configuration that fits once more, for what it learns of the texts."""
        base = self._resident.base
        assert base is not None, "what was measured has a base"
        if self._texts is None:
            return outcome
        self._report(Beat(phase="quality", step=0), config)
        quality = Quality(
            base,
            config,
            self._texts,
            Question(asked.tokens, asked.seed, asked.eval_seq_len, asked.eval_tokens),
            self._resident.device,
            beat=lambda step: self._report(Beat(phase="quality", step=step), config),
        )
        try:
            learned = quality.run()
        except InputError as error:
            return Invalid(rule="quality", detail=str(error)[:DETAIL_LENGTH])
        except NoRoomToEvaluateError:
            # It trains well, and what it learned is not known.
            learned = None
        if isinstance(learned, Diverged | OutOfMemory):
            return learned
        flags = outcome.measurement.flags + ((NO_ROOM_TO_EVALUATE,) if learned is None else ())
        changes = {"quality": learned, "flags": flags}
        return Measured(measurement=outcome.measurement.model_copy(update=changes))

    def _report(self, beat: Beat, config: TrialConfig) -> bool:
        self.phase = beat.phase
        tokens = beat.tokens_per_step or config.tokens_per_step
        self._send(
            Progress(
                phase=beat.phase,
                step=beat.step,
                tokens_per_second=_rate(tokens, beat.median_seconds),
                tokens_per_second_high=_rate(tokens, beat.fastest_median_seconds),
                allocated_bytes=self._resident.device.peak_allocated_bytes(),
            )
        )
        return self._stop.is_set()

    def _ensure_base(self, config: TrialConfig) -> Outcome | None:
        """Make this configuration's base the resident one; return why it cannot be, or None."""
        if self._resident.holds(config):
            return None
        self._send(Progress(phase="build"))
        return self._resident.hold(config)


_APART = "other ranks were left in the middle of a step"


def finished(
    command: RunCommand, outcome: Outcome, *, retire: str | None = None, is_apart: bool = False
) -> Finished:
    """Return what is said of a run; see `Finished`."""
    config = command.request.config
    return Finished(
        run_id=command.run_id, config=config, outcome=outcome, retire=retire, is_apart=is_apart
    )


def _speed_key(request: TrialRequest) -> str:
    """Return what a speed is the speed of."""
    config = canonical(request.config).model_copy(update={"learning_rate": 1.0})
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


def _rate(tokens: float, seconds: float | None) -> float | None:
    return None if not seconds else tokens / seconds
