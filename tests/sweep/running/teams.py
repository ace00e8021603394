"""What the tests of trials on several GPUs share: a runner on the CPU, and what it measured."""

from __future__ import annotations

from pathlib import Path

from search_spaces.gpus import GIB
from search_spaces.models import ModelSpec
from storage.definition import Target
from storage.records import Measured, Measurement, Outcome
from sweep.running.supervisor import SupervisedRunner


def a_cpu_runner(
    model: ModelSpec, log: Path, *, budget_bytes: int = GIB // 2, **options: str
) -> SupervisedRunner:
    target = Target(gpu="cpu", device="cpu", budget_bytes=budget_bytes)
    return SupervisedRunner(model, target=target, log_path=log, **options)


def measured(outcome: Outcome) -> Measurement:
    assert isinstance(outcome, Measured), outcome
    return outcome.measurement
