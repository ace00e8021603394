"""What tests of workers on the CPU share: a runner, and what it measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from search_spaces.gpus import GIB
from search_spaces.models import ModelSpec, load_model_spec
from storage.definition import Target
from storage.records import Measured, Measurement, Outcome
from sweep.running.supervisor import SupervisedRunner


def a_cpu_runner(
    log: Path, *, model: ModelSpec | None = None, budget_bytes: int = GIB // 2, **options: Any
) -> SupervisedRunner:
    options.setdefault("target", Target(gpu="cpu", device="cpu", budget_bytes=budget_bytes))
    model = model or load_model_spec("demo")
    return SupervisedRunner(model, log_path=log, **options)


def measured(outcome: Outcome) -> Measurement:
    assert isinstance(outcome, Measured), outcome
    return outcome.measurement
