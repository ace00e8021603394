"""What the worker does with a trial's outcome before anything else can befall it."""

from __future__ import annotations

import dataclasses
import errno
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.directory import OutcomeFile
from qlora_sweep.storage.records import (
    OUT_OF_TIME,
    RETRYABLE,
    Attempt,
    Crashed,
    Diverged,
    Invalid,
    Measured,
    Measurement,
    Outcome,
)
from qlora_sweep.sweep.running.supervisor import SupervisedRunner
from qlora_sweep.sweep.running.wire import (
    DatasetSettings,
    Finished,
    Progress,
    QualityCommand,
    RunCommand,
    TrialRequest,
    UnreadableError,
    WorkerMessage,
    WorkerSettings,
    read_line,
    to_line,
    worker_message_adapter,
)
from tests.sweep.data.prepared import prepared_settings
from tests.sweep.running.teams import a_cpu_runner
from tests.sweep.simulated_device import a_measurement
from tests.sweep.training.tiny import measured

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


def served(end: Outcome | BaseException, path: Path) -> tuple[Any, Outcome | None]:
    """Return what was sent of a trial with that end, and what was on disk at that moment."""
    from qlora_sweep.sweep.running.worker import TrialEnd, Worker

    class Trained(Worker):
        def _run(self, command: RunCommand) -> TrialEnd:
            self.phase = "warmup"
            if isinstance(end, BaseException):
                raise end
            return TrialEnd(end, retire="so that it ends")

    request = TrialRequest(config=CONFIG, steps=StepBudget(), attempt=ATTEMPT)
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


def cuda_out_of_memory() -> Exception:
    import torch

    return torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("error", "cause", "words"),
    [
        (RuntimeError("no such kernel"), "exception", "no such kernel"),
        (MemoryError(), "host_out_of_memory", "memory error"),
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


def outcome_of(**changes: str) -> Outcome:
    """What a worker says of the demo's model with another config."""
    from qlora_sweep.sweep.running.worker import Worker

    broken = dataclasses.replace(DEMO, config={**DEMO.config, **changes})
    settings = CPU.model_copy(update={"model": broken.to_json(), "budget_bytes": 2**40})
    request = TrialRequest(config=CONFIG, steps=StepBudget())
    return Worker(settings, send=lambda _: None).run(RunCommand(request=request)).outcome


def test_a_model_that_cannot_be_built_crashed_while_building_and_may_be_tried_again() -> None:
    outcome = outcome_of(hidden_act="snap")
    assert isinstance(outcome, Crashed), outcome
    assert (outcome.phase, outcome.verdict in RETRYABLE) == ("build", True)
    assert "snap" in outcome.detail


def test_a_model_of_a_type_that_nothing_here_has_is_not_tried_again() -> None:
    outcome = outcome_of(model_type="unheard-of")
    assert isinstance(outcome, Invalid), outcome
    assert "unheard-of" in outcome.detail


# What is read from a worker is a message, or says why it is none.

MEASURED = a_measurement(CONFIG).model_copy(update={"peak_allocated_bytes": 10**400})
DONE = Finished(run_id="1", config=CONFIG, outcome=Measured(measurement=MEASURED), retire=None)
PROGRESS = b'{"kind":"progress","phase":"measure","step":'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (to_line(DONE), "peak_allocated_bytes"),
        (PROGRESS[:-7] + b'"tokens_per_second":1e999}', "finite"),
        (PROGRESS[:-7] + b'"tokens_per_second":"NaN"}', "tokens_per_second"),
        (PROGRESS + b"9" * 100_000 + b"}", "progress"),
        (PROGRESS + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}", "progress"),
        (b'{"kind":"progress","phase":"\xff\xfe"}', "utf-8"),
        (b"[1]", "a message"),
    ],
)
def test_what_is_no_message_is_told_in_a_few_printable_words(line: bytes, words: str) -> None:
    with pytest.raises(UnreadableError, match=words) as refused:
        read_line(line, worker_message_adapter)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


# A worker that was given texts: trials train on them, and are asked what they learned.

STEPS = StepBudget(warmup_min=1, warmup_max=1, measured_min=2, measured_max=2)
ON_TEXTS = TrialConfig(micro_batch_size=2, seq_len=32)
QUALITY = QualityCommand(tokens=150, seed=1, eval_seq_len=32, eval_tokens=60)
SPEED_REUSED = "speed_reused"
pytestmark = pytest.mark.usefixtures("our_own_code")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetSettings:
    random = np.random.default_rng(1)
    lengths = np.concatenate([random.integers(3, 29, 60), random.integers(20, 190, 80)])
    return prepared_settings(tmp_path_factory.mktemp("texts"), lengths)


@pytest.fixture(scope="module")
def runner(
    dataset: DatasetSettings, tmp_path_factory: pytest.TempPathFactory, our_own_code: None
) -> Iterator[SupervisedRunner]:
    log = tmp_path_factory.mktemp("logs") / "worker.log"
    with a_cpu_runner(log, dataset=dataset) as runner:
        yield runner


def trained(
    runner: SupervisedRunner, config: TrialConfig, quality: QualityCommand | None = None
) -> tuple[Measurement, list[Progress]]:
    """Return what was measured, and the signs of life on the way."""
    seen: list[Progress] = []
    request = TrialRequest(config=config, steps=STEPS, quality=quality)
    return measured(runner.run(request, observe=lambda beat: bool(seen.append(beat)))), seen


def test_its_beats_and_its_record_are_of_the_tokens_that_carry_loss(
    runner: SupervisedRunner,
) -> None:
    measurement, seen = trained(runner, ON_TEXTS)
    assert 0 < (measurement.loss_tokens_per_step or 0) < ON_TEXTS.tokens_per_step
    rates = [beat.tokens_per_second for beat in seen if beat.tokens_per_second]
    assert rates[-1] == pytest.approx(measurement.tokens_per_second)
    assert measurement.quality is None
    assert "quality" not in {beat.phase for beat in seen}


def test_what_fits_is_asked_what_it_learned_and_no_speed_is_measured_twice_for_that(
    runner: SupervisedRunner,
) -> None:
    first, seen = trained(runner, ON_TEXTS, QUALITY)
    assert first.quality is not None
    assert first.quality.train_tokens >= QUALITY.tokens
    phases = list(dict.fromkeys(beat.phase for beat in seen))
    assert phases[-3:] == ["measure", "detach", "quality"]
    assert seen[-1].step == first.quality.steps
    faster = ON_TEXTS.model_copy(update={"learning_rate": 1e-2})
    other, seen = trained(runner, faster, QUALITY)
    assert {beat.phase for beat in seen} == {"quality"}
    assert SPEED_REUSED in other.flags
    assert other.tokens_per_second == first.tokens_per_second
    assert other.quality is not None
    assert other.quality.eval_loss != first.quality.eval_loss
    # The same configuration again is measured again: that is what it is run for.
    again, _ = trained(runner, faster, QUALITY)
    assert SPEED_REUSED not in again.flags
    assert again.quality is not None
    assert again.quality.eval_loss == pytest.approx(other.quality.eval_loss)


def test_what_is_cut_before_it_is_known_what_it_learned_is_no_verdict(
    runner: SupervisedRunner,
) -> None:
    trained(runner, ON_TEXTS, QUALITY)
    other = ON_TEXTS.model_copy(update={"learning_rate": 3e-3})
    request = TrialRequest(config=other, steps=STEPS, quality=QUALITY, seconds_left=0.0)
    assert runner.run(request) == OUT_OF_TIME
    assert trained(runner, other, QUALITY)[0].quality is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"fingerprint": "abd"}, "are others than"), ({"directory": "/gone"}, "cannot be read")],
)
def test_texts_that_are_not_those_of_the_study_are_refused(
    dataset: DatasetSettings, changes: dict[str, str], words: str
) -> None:
    from qlora_sweep.sweep.running.worker import Worker

    settings = CPU.model_copy(update={"dataset": dataset.model_copy(update=changes)})
    with pytest.raises(EnvironmentFault, match=words):
        Worker(settings, send=lambda _: None)


def test_kernels_for_every_width_of_texts_are_no_part_of_a_budget(runner: SupervisedRunner) -> None:
    config = TrialConfig(
        micro_batch_size=2,
        seq_len=192,
        target_modules="all-linear",
        upcast_fp32=False,
        packing="grouped",
    )
    found, _ = trained(runner, config)
    assert found.peak_allocated_bytes < 20 * 2**20
