"""A space, and a study of it on an A10, for tests of plans."""

from __future__ import annotations

import itertools
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB, find_gpu
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.definition import StudyDefinition, StudySnapshot, Target
from qlora_sweep.storage.records import Measured, Measurement, PredictionRecord, TrialRecord
from tests.sweep.predict.predicted_steps import predict_step

MISTRAL = load_model_spec("mistral-7b-v0.3")
BATCHES = (1, 2, 4, 6, 8, 10, 12, 16)
INTERFACE_KEYS = {
    "config",
    "fits",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "breakdown",
    "step_seconds",
    "tokens_per_second",
    "bottleneck",
    "cost",
}
"""What every answer about one configuration has."""


def a_space(**changes: Any) -> SearchSpace:
    dimensions: dict[str, Any] = {
        "micro_batch_size": {"choices": list(BATCHES)},
        "seq_len": {"choices": [512, 1024]},
        "lora_rank": {"choices": [8, 64]},
        "checkpoint_fraction": {"choices": [0.0, 1.0]},
    }
    return SearchSpace.model_validate({"name": "small", "dimensions": dimensions} | changes)


def a_record(
    number: int, config: TrialConfig, *, gpu: str = "a10", off: float = 1.2, **changes: Any
) -> TrialRecord:
    seconds = off * predict_step(config, model=MISTRAL, gpu=find_gpu(gpu)).step_seconds
    measurement = Measurement(
        tokens_per_second=config.tokens_per_step / seconds,
        samples_per_second=config.samples_per_step / seconds,
        step_seconds=seconds,
        step_seconds_ci95=(seconds, seconds),
        steps_measured=6,
        steps_warmup=2,
        peak_allocated_bytes=10 * GIB,
        trainable_parameters=1,
        final_loss=2.0,
        setup_seconds=1.0,
        measured_seconds=1.0,
    )
    values: dict[str, Any] = {
        "number": number,
        "config": config,
        "outcome": Measured(measurement=measurement),
        "prediction": PredictionRecord(peak_allocated_bytes=11 * GIB, peak_reserved_bytes=12 * GIB),
    }
    return TrialRecord.model_validate(values | changes)


def a_snapshot(*records: TrialRecord, **target: Any) -> StudySnapshot:
    values = {"gpu": "a10", "device": "cuda", "budget_bytes": 20 * GIB}
    return StudySnapshot(
        name="mine",
        definition=StudyDefinition(
            space=a_space(),
            model=MISTRAL.to_json(),
            model_fingerprint=MISTRAL.fingerprint,
            target=Target.model_validate(values | target),
        ),
        environment={},
        records=records,
    )


TRIALS = [
    a_record(number, TrialConfig(micro_batch_size=batch, seq_len=length))
    for number, (batch, length) in enumerate(itertools.product((1, 4, 8), (512, 1024)))
]
