"""What the worker does with a trial's outcome before anything else can befall it."""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.config import TrialConfig
from search_spaces.space import StepBudget
from storage.outcome_file import OutcomeFile
from storage.records import Attempt, Crashed, Diverged, Outcome
from sweep.running.serving import _serve
from sweep.running.wire import Finished, RunCommand, TrialRequest, WorkerMessage, to_line

CONFIG = TrialConfig(lora_rank=8)
OUTCOME = Diverged(step=3)


class Trained:
    """What stands for the worker: its trials end as they are told to."""

    phase = "warmup"

    def __init__(self, end: Outcome | BaseException) -> None:
        self.end = end

    def stop_trial(self) -> None:
        """Nothing is running that could be stopped."""

    def tell_failures(self, told: Callable[[Outcome], None]) -> None:
        """Nobody trains with it who could fail."""

    def run(self, command: RunCommand) -> Finished:
        if isinstance(self.end, BaseException):
            raise self.end
        return Finished(
            run_id=command.run_id,
            config=command.request.config,
            outcome=self.end,
            retire="so that it ends",
        )


ATTEMPT = Attempt(id="a1", study="s1", number=0, started_at="2025-01-01T00:00:00+00:00")


def served(
    end: Outcome | BaseException, path: Path, *, attempt: Attempt | None = ATTEMPT
) -> list[Any]:
    """Return what was sent, each with what was on disk at that moment."""
    command = RunCommand(
        request=TrialRequest(config=CONFIG, steps=StepBudget(), attempt=attempt), run_id="r1"
    )
    outcomes, sent = OutcomeFile(path), []

    def send(message: WorkerMessage) -> None:
        sent.append((message, outcomes.take("a1", CONFIG)))

    left = threading.Event()
    _serve(Trained(end), io.BytesIO(to_line(command)), send, outcomes, leave=left.set)  # type: ignore[arg-type]
    assert left.wait(5), "whoever closed the pipe is gone, and the worker with them"
    return sent


def test_an_outcome_is_on_disk_before_it_is_told(tmp_path: Path) -> None:
    ((message, left),) = served(OUTCOME, tmp_path / "outcome.json")
    assert left == message.outcome == OUTCOME
    assert (message.run_id, message.config) == ("r1", CONFIG)


def test_a_crash_is_left_there_too(tmp_path: Path) -> None:
    ((message, left),) = served(RuntimeError("no such kernel"), tmp_path / "outcome.json")
    assert left == message.outcome
    assert message.retire


def test_a_disk_that_takes_nothing_fails_no_trial(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ((message, left),) = served(OUTCOME, tmp_path / "file" / "outcome.json")
    assert (message.outcome, left) == (OUTCOME, None)


def test_nothing_is_left_of_what_no_study_attempted(tmp_path: Path) -> None:
    served(OUTCOME, tmp_path / "outcome.json", attempt=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "cause", "words"),
    [
        (RuntimeError("no such kernel"), "exception", "no such kernel"),
        (MemoryError(), "host_out_of_memory", "memory error"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "host_out_of_memory", ""),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host_out_of_memory", ""),
        (OSError(errno.EMFILE, "Too many open files"), "too_few_descriptors", "ulimit -n"),
        (torch.OutOfMemoryError("CUDA out of memory"), "exception", ""),
        (SystemExit(4), "exit", "a library called exit(4)"),
    ],
)
def test_what_a_training_raised_has_a_typed_cause(
    tmp_path: Path, error: BaseException, cause: str, words: str
) -> None:
    ((message, _),) = served(error, tmp_path / "outcome.json")
    assert isinstance(message.outcome, Crashed)
    assert message.outcome.cause == cause
    assert message.outcome.phase == "warmup"
    assert words in message.outcome.detail
