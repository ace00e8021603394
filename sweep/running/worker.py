"""Owns the device of a child process: a configuration in, signs of life and an outcome out.

Keeps the base model resident between trials. Knows nothing of pipes (`serving`), studies, samplers
or storage.
"""

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
    Diverged,
    Invalid,
    Measured,
    Outcome,
    OutOfMemory,
    Phase,
)
from sweep.data.opening import import_readers
from sweep.data.request import SUMMARY
from sweep.running.followers import Followers
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
from sweep.training.model import BaseModel
from sweep.training.quality import NoRoomToEvaluateError, Quality, Question
from sweep.training.texts import Texts
from sweep.training.trial import Beat

SPEED_REUSED = "speed_reused"
"""Flag of a speed that was measured at another learning rate, on which it does not depend."""
NO_ROOM_TO_EVALUATE = "no_room_to_evaluate"
"""Flag of what trained within the budget, and could not be asked what it learned."""


class Worker:
    """The device, the resident base, and the trials run on it."""

    def __init__(self, settings: WorkerSettings, *, send: Callable[[WorkerMessage], None]) -> None:
        self._settings = settings
        self._send = send
        self._resident = Resident(settings)
        self._followers = Followers(settings, beat=lambda: self._send(Progress(phase=self.phase)))
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
        """Have it told what befell another process of the team that the running trial takes.

        From a thread of its own: this one may be waiting for that process, and not come back.
        """
        self._followers.on_failure = told

    def stop_trial(self) -> None:
        """Ask the running trial to stop as slow; it does at its next step."""
        self._stop.set()

    def run(self, command: RunCommand) -> Finished:
        """Run one trial on the right base and say whether this process can run another."""
        self._stop.clear()
        started = time.perf_counter()
        request, config = command.request, command.request.config
        self.phase = "build"
        team, failed = self._gathered(config)
        failed = failed or self._ensure_base(config)
        if failed is not None:
            return finished(command, failed, retire=None if team is None else _LEFT_ALONE)
        assert self._resident.base is not None
        if team is not None and team.join():
            # Whoever reaches this card from another one of the team is no neighbour.
            self._resident.card.remember()
        self.phase = "attach"
        before = self._resident.device.allocated_bytes()
        base = self._resident.base
        outcome = self._known_speed(request) or self._measured(request, base, started, team)
        if request.quality is not None and isinstance(outcome, Measured):
            self._speeds[_speed_key(request)] = config.learning_rate, outcome
            outcome = self._with_quality(outcome, config, request.quality)
        retire = None if team is None else team.reason_to_retire
        return finished(command, outcome, retire=retire or self._resident.leak(config, before))

    def _gathered(self, config: TrialConfig) -> tuple[Followers | None, Outcome | None]:
        """Return who trains it together with this process, and why that cannot be."""
        if config.data_parallel == 1:
            # Whatever libraries look for other processes must not find the last trial's.
            self._followers.dismiss()
            return None, None
        cards = self._cards()
        if cards is not None and config.data_parallel > cards:
            detail = f"data_parallel {config.data_parallel}, and {cards} can be seen here"
            return None, Invalid(rule="data-parallel-needs-cards", detail=detail)
        self._send(Progress(phase="build"))
        self._followers.gather(config)
        return self._followers, None

    def _cards(self) -> int | None:
        """Return how many cards this process sees; None on the CPU, which all share."""
        return torch.cuda.device_count() if self._settings.device == "cuda" else None

    def _measured(
        self, request: TrialRequest, base: BaseModel, started: float, team: Followers | None
    ) -> Outcome:
        config = request.config
        trial = self._resident.trial(
            base,
            config,
            request.steps,
            started=started,
            budget_bytes=self._settings.budget_bytes,
            texts=self._texts,
            is_soak=request.is_soak,
            team=team,
            report=lambda beat: self._report(beat, config),
        )
        return trial.run()

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


_LEFT_ALONE = "its team was gathered for a trial that it cannot begin"


def finished(command: RunCommand, outcome: Outcome, *, retire: str | None = None) -> Finished:
    """Return what is said of a run; `retire` is why this process runs no other."""
    return Finished(
        run_id=command.run_id, config=command.request.config, outcome=outcome, retire=retire
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
