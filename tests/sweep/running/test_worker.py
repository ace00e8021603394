"""What the worker does with a trial's outcome before anything else can befall it."""

from __future__ import annotations

import dataclasses
import errno
import io
import threading
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from search_spaces.models import load_model_spec
from search_spaces.space import StepBudget
from storage.directory import OutcomeFile
from storage.records import RETRYABLE, Attempt, Crashed, Diverged, Outcome
from sweep.running.wire import RunCommand, TrialRequest, WorkerMessage, WorkerSettings, to_line

CONFIG = TrialConfig(lora_rank=8)
OUTCOME = Diverged(step=3)
DEMO = load_model_spec("demo")
CPU = WorkerSettings(
    device="cpu",
    budget_bytes=2**30,
    model=DEMO.to_json(),
    weights="random",
    seed=0,
    is_emulated=False,
)
ATTEMPT = Attempt(id="a1", study="s1", number=0, started_at="2025-01-01T00:00:00+00:00")


def served(
    end: Outcome | BaseException, path: Path, *, attempt: Attempt | None = ATTEMPT
) -> tuple[Any, Outcome | None]:
    """Return what was sent of a trial with that end, and what was on disk at that moment."""
    from sweep.running.worker import Worker

    class Trained(Worker):
        def _run(self, command: RunCommand) -> tuple[Outcome, str | None, bool]:
            self.phase = "warmup"
            if isinstance(end, BaseException):
                raise end
            return end, "so that it ends", False

    request = TrialRequest(config=CONFIG, steps=StepBudget(), attempt=attempt)
    outcomes, sent, left = OutcomeFile(path), [], threading.Event()

    def send(message: WorkerMessage) -> None:
        sent.append((message, outcomes.take("a1", CONFIG)))

    worker = Trained(CPU, send=send, outcomes=outcomes, leave=left.set)
    worker.serve(io.BytesIO(to_line(RunCommand(request=request, run_id="r1"))))
    assert left.wait(5), "whoever closed the pipe is gone, and the worker with them"
    ((message, on_disk),) = sent
    return message, on_disk


def test_an_outcome_is_on_disk_before_it_is_told(tmp_path: Path) -> None:
    message, left = served(OUTCOME, tmp_path / "outcome.json")
    assert left == message.outcome == OUTCOME
    assert (message.run_id, message.config) == ("r1", CONFIG)


def test_a_disk_that_takes_nothing_fails_no_trial(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message, left = served(OUTCOME, tmp_path / "file" / "outcome.json")
    assert (message.outcome, left) == (OUTCOME, None)


def test_nothing_is_left_of_what_no_study_attempted(tmp_path: Path) -> None:
    served(OUTCOME, tmp_path / "outcome.json", attempt=None)
    assert list(tmp_path.iterdir()) == []


def cuda_out_of_memory() -> Exception:
    import torch

    return torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("error", "cause", "words"),
    [
        (RuntimeError("no such kernel"), "exception", "no such kernel"),
        (MemoryError(), "host_out_of_memory", "memory error"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "host_out_of_memory", ""),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host_out_of_memory", ""),
        (OSError(errno.EMFILE, "Too many open files"), "too_few_descriptors", "ulimit -n"),
        (cuda_out_of_memory, "exception", ""),
        (SystemExit(4), "exit", "a library called exit(4)"),
    ],
)
def test_what_a_training_raised_has_a_typed_cause(
    tmp_path: Path, error: Any, cause: str, words: str
) -> None:
    error = error() if callable(error) else error
    message, left = served(error, tmp_path / "outcome.json")
    outcome = message.outcome
    assert isinstance(outcome, Crashed)
    assert (outcome.cause, outcome.phase, left) == (cause, "warmup", outcome)
    assert words in outcome.detail
    assert message.retire


@pytest.mark.parametrize("change", [{"model_type": "unheard-of"}, {"hidden_act": "snap"}])
def test_a_model_that_cannot_be_built_crashed_while_building_and_may_be_tried_again(
    change: dict[str, str],
) -> None:
    from sweep.running.worker import Worker

    broken = dataclasses.replace(DEMO, config={**DEMO.config, **change})
    settings = CPU.model_copy(update={"model": broken.to_json(), "budget_bytes": 2**40})
    request = TrialRequest(config=CONFIG, steps=StepBudget())
    outcome = Worker(settings, send=lambda _: None).run(RunCommand(request=request)).outcome
    assert isinstance(outcome, Crashed), outcome
    assert (outcome.phase, outcome.verdict in RETRYABLE) == ("build", True)
    assert next(iter(change.values())) in outcome.detail
