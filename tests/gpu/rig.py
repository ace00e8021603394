"""What the tests on a GPU share: a small model with real proportions, and a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.records import Measured, Measurement, Outcome
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from qlora_sweep.sweep.running.wire import (
    DatasetSettings,
    QualityCommand,
    RunCommand,
    TrialRequest,
    WorkerMessage,
    WorkerSettings,
)
from qlora_sweep.sweep.running.worker import Worker
from qlora_sweep.sweep.training.adapters import attached
from qlora_sweep.sweep.training.device import CudaDevice
from qlora_sweep.sweep.training.model import BaseModel
from qlora_sweep.sweep.training.step import TrainingLoop

SMALL = ModelSpec(
    name="small",
    source="shipped",
    config={
        "model_type": "mistral",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
)
"""Heads, groups and widths as in large models, so that the same kernels are chosen."""
QUICK = StepBudget(warmup_min=2, warmup_max=2, measured_min=2, measured_max=2)


def small_config(**settings: Any) -> TrialConfig:
    return TrialConfig(**{"micro_batch_size": 4, "seq_len": 512, **settings})


@contextmanager
def predicting(cache: Path, model: ModelSpec = SMALL) -> Iterator[TracingPredictor]:
    """What predicts memory on the GPU that is here, with a child that traces."""
    capability = torch.cuda.get_device_capability(0)
    with closing(TracingChildren(1, outlive=True)) as child:
        yield TracingPredictor(model, cache_dir=cache, compute_capability=capability, tracer=child)


class Rig:
    """The worker's own code in this process, where its insides can be looked at."""

    _last: ClassVar[Rig | None] = None

    def __init__(
        self,
        budget_bytes: int,
        dataset: DatasetSettings | None = None,
        model: ModelSpec = SMALL,
    ) -> None:
        if Rig._last is not None:
            # Liger patches the modelling module that all bases of a process share.
            Rig._last.worker._resident.drop()
        Rig._last = self
        self.events: list[WorkerMessage] = []
        settings = WorkerSettings(
            device="cuda",
            budget_bytes=budget_bytes,
            model=model.to_json(),
            weights="random",
            seed=0,
            is_emulated=True,
            dataset=dataset,
        )
        self.worker = Worker(settings, send=self.events.append)
        self.worker.prepare()
        self.device = CudaDevice()

    @contextmanager
    def held_to(self, budget_bytes: int) -> Iterator[None]:
        """Let no trial fit whose measured peak is above the budget."""
        resident = self.worker._resident
        before = resident.trial_device
        resident.trial_device = replace(before, budget_bytes=budget_bytes)
        try:
            yield
        finally:
            resident.trial_device = before

    def settle(self, config: TrialConfig) -> int:
        """Make the configuration's base the resident one and return the bytes allocated then."""
        assert self.worker._resident.hold(config) is None
        self.device.release()
        return self.allocated_bytes()

    def allocated_bytes(self) -> int:
        allocated = self.device.allocated_bytes()
        assert allocated is not None
        return allocated

    @property
    def base(self) -> BaseModel:
        """The resident one."""
        base = self.worker._resident.base
        assert base is not None
        return base

    @contextmanager
    def training(self, config: TrialConfig) -> Iterator[TrainingLoop]:
        """A training on the resident base."""
        with attached(self.base, config) as attachment:
            yield TrainingLoop(attachment, config, seed=0)

    def run(
        self, config: TrialConfig, quality: QualityCommand | None = None, **request: Any
    ) -> Outcome:
        asked = {"config": config, "steps": QUICK, "quality": quality, **request}
        return self.worker.run(RunCommand(request=TrialRequest(**asked))).outcome

    def measure(self, config: TrialConfig, quality: QualityCommand | None = None) -> Measurement:
        outcome = self.run(config, quality)
        assert isinstance(outcome, Measured), outcome
        return outcome.measurement
