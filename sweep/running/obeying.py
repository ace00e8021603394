"""Owns what every process of a team but the first does: orders in on stdin, messages out on a pipe.

Keeps its base resident between trials, as the first does. Knows nothing of studies, of what the
first process measures, or of when to stop.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch

from search_spaces.errors import InputError, words_of
from storage.records import Crashed, Invalid, Outcome, Phase
from sweep.running.resident import DETAIL_LENGTH, Resident
from sweep.running.team_wire import (
    Begin,
    End,
    Ended,
    Evaluate,
    Failed,
    FollowerMessage,
    FollowerReady,
    Leave,
    Looked,
    LookUp,
    Order,
    Step,
    order_adapter,
)
from sweep.running.wire import WorkerSettings, to_line
from sweep.training.compiling import start_compiler_processes
from sweep.training.following import FollowedTrial
from sweep.training.team import Place, join, leave

Say = Callable[[FollowerMessage], None]


class _Over(Exception):  # noqa: N818 - what ends a trial may be an answer
    """A trial is over for all: another process of its team would wait for this one."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("over")
        self.outcome = outcome


class Obeying:
    """The device of this process, and the trials on it."""

    def __init__(self, settings: WorkerSettings, say: Say) -> None:
        self._seed, self._say = settings.seed, say
        self._resident = Resident(settings)
        self._resident.prepare()
        self._meeting = ""

    def run(self, command: Begin, orders: Iterator[Order]) -> None:
        """Train as one of several until the first process has enough.

        Raises:
            _Over: whatever happened is this trial's outcome.
        """
        phase: Phase = "build"
        trial: FollowedTrial | None = None
        try:
            trial = self._trial(command)
            phase = "measure"
            before = self._resident.device.allocated_bytes()
            with trial:
                _obey(trial, orders, self._say)
        except _Over:
            raise
        except InputError as error:
            raise _Over(Invalid(rule="target_modules", detail=str(error))) from None
        except Exception as error:  # noqa: BLE001 - it is this trial's verdict
            traceback.print_exc()
            known = None if trial is None else trial.verdict(error)
            raise _Over(_named(known or _crashed(error, phase), rank=command.rank)) from None
        self._resident.device.release()
        self._say(Ended(leak=self._resident.leak(command.config, before)))

    def leave(self) -> None:
        """Be alone again, until the next group."""
        leave()
        self._meeting = ""

    def _trial(self, command: Begin) -> FollowedTrial:
        """Build the base, meet the others, and return what is to be trained."""
        failed = self._resident.hold(command.config)
        if failed is not None:
            raise _Over(_named(failed, rank=command.rank))
        place, device = Place(command.rank, command.size), self._resident.device
        if command.meeting != self._meeting:
            join(place, meeting=Path(command.meeting), device=device.torch_device)
            self._meeting = command.meeting
        base = self._resident.base
        assert base is not None, "what is held is there"
        return FollowedTrial(
            base,
            command.config,
            device=device,
            place=place,
            seed=self._seed,
            micro_steps=command.micro_steps,
        )


def _obey(trial: FollowedTrial, orders: Iterator[Order], say: Say) -> None:
    """Do what is told until the trial's end."""
    for order in orders:
        match order:
            case Step():
                trial.step()
            case LookUp():
                say(Looked(look=trial.look()))
            case Evaluate(batches=batches):
                trial.evaluate(batches=batches)
            case End():
                return
            case Begin() | Leave():
                raise RuntimeError(f"'{order.kind}' within a trial")


def _named(outcome: Outcome, *, rank: int) -> Outcome:
    """Return an outcome that says on which card it came about."""
    detail = f"card {rank}: {outcome.detail}" if hasattr(outcome, "detail") else ""
    return outcome.model_copy(update={"detail": detail[:DETAIL_LENGTH]}) if detail else outcome


def _crashed(error: Exception, phase: Phase) -> Crashed:
    detail = words_of(error)[:DETAIL_LENGTH]
    return Crashed(phase=phase, cause="exception", detail=detail)


def _orders(lines: IO[bytes]) -> Iterator[Order]:
    for line in lines:
        yield order_adapter.validate_json(line)


def main(pipe: IO[bytes], *, rank: int) -> None:
    """Take the card, then train what the first process says, until that is gone."""
    lines = sys.stdin.buffer

    def say(message: FollowerMessage) -> None:
        pipe.write(to_line(message))

    settings = WorkerSettings.model_validate_json(lines.readline())
    try:
        if settings.device == "cuda":
            torch.cuda.set_device(rank)
            start_compiler_processes()
        obeying = Obeying(settings, say)
        say(FollowerReady())
        orders = _orders(lines)
        for order in orders:
            match order:
                case Begin() as command:
                    obeying.run(command, orders)
                case Leave():
                    obeying.leave()
                case _:
                    raise RuntimeError(f"'{order.kind}' outside of a trial")
    except _Over as over:
        say(Failed(outcome=over.outcome))
        # The first process ends, and this one with it; what it holds is needed by nobody.
        lines.read()
    except Exception as error:  # noqa: BLE001 - the first process says it
        traceback.print_exc()
        say(Failed(outcome=_named(_crashed(error, "start"), rank=rank)))
    sys.stderr.flush()
    os._exit(0)
