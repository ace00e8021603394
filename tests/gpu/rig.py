"""What the tests on a GPU share: a small model with real proportions, and a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.records import Measured, Measurement, Outcome
from qlora_sweep.sweep.running.wire import (
    DatasetSettings,
    QualityCommand,
    RunCommand,
    TrialRequest,
    WorkerMessage,
    WorkerSettings,
)
from qlora_sweep.sweep.running.worker import Worker
from qlora_sweep.sweep.training.device import CudaDevice

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


class Rig:
    """The worker's own code in this process, where its insides can be looked at."""

    _last: ClassVar[Rig | None] = None

    def __init__(self, budget_bytes: int, dataset: DatasetSettings | None = None) -> None:
        if Rig._last is not None:
            # Liger patches the modelling module that all bases of a process share.
            Rig._last.worker._resident.drop()
        Rig._last = self
        self.events: list[WorkerMessage] = []
        settings = WorkerSettings(
            device="cuda",
            budget_bytes=budget_bytes,
            model=SMALL.to_json(),
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

    def run(self, config: TrialConfig, quality: QualityCommand | None = None) -> Outcome:
        return self.worker.run(
            RunCommand(request=TrialRequest(config=config, steps=QUICK, quality=quality))
        ).outcome

    def measure(self, config: TrialConfig, quality: QualityCommand | None = None) -> Measurement:
        outcome = self.run(config, quality)
        assert isinstance(outcome, Measured), outcome
        return outcome.measurement
