"""What the worker does with a trial's outcome before anything else can befall it."""

from __future__ import annotations

import errno
import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.config import TrialConfig
from search_spaces.models import load_model_spec
from search_spaces.space import StepBudget
from storage.directory import OutcomeFile
from storage.records import Attempt, Crashed, Diverged, Outcome
from sweep.running.wire import (
    RunCommand,
    TrialRequest,
    WorkerMessage,
    WorkerSettings,
    to_line,
)
from sweep.running.worker import Worker

CONFIG = TrialConfig(lora_rank=8)
OUTCOME = Diverged(step=3)


CPU = WorkerSettings(
    device="cpu",
    budget_bytes=2**30,
    model=load_model_spec("demo").to_json(),
    weights="random",
    seed=0,
    is_emulated=False,
)


class Trained(Worker):
    """A worker whose trials end as they are told to."""

    def __init__(self, end: Outcome | BaseException, **options: Any) -> None:
        super().__init__(CPU, **options)
        self.end = end

    def _run(self, command: RunCommand) -> tuple[Outcome, str | None, bool]:
        self.phase = "warmup"
        if isinstance(self.end, BaseException):
            raise self.end
        return self.end, "so that it ends", False


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
    worker = Trained(end, send=send, outcomes=outcomes, leave=left.set)
    worker.serve(io.BytesIO(to_line(command)))
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
