"""A GPU that answers at once: memory and speed as functions, shaped like a real one's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from optuna.samplers import BaseSampler, RandomSampler

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.definition import StudyDefinition, Target
from qlora_sweep.storage.records import Measured, Measurement, Outcome, OutOfMemory, TrialRecord
from qlora_sweep.storage.study import OpenStudy, open_study
from qlora_sweep.sweep.predict.memory.prediction import MemoryPrediction, WholeMemory
from qlora_sweep.sweep.predict.memory.predictor import MemoryPredictor
from qlora_sweep.sweep.sampling.surrogate import Array
from qlora_sweep.sweep.study.events import Interruption
from tests.sweep.imagined_memory import imagined, one_by_one

BUDGET = int(21.5 * GIB)
MODEL = ModelSpec(
    name="seven-billion",
    source="shipped",
    config={
        "model_type": "mistral",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
    },
)
_KIB = 1024
_TARGETS = {"qv": 0.4, "attention": 1.0, "all-linear": 3.0}

SPACE: dict[str, Any] = {
    "name": "simulated",
    "model": MODEL.name,
    "gpu": "a10",
    "trials": 40,
    "confirm": False,
    "dimensions": {
        "micro_batch_size": {"choices": [1, 2, 4, 8, 10, 12, 16, 24, 32]},
        "checkpoint_fraction": {"choices": [0.0, 0.25, 0.5, 0.75, 1.0]},
        "upcast_fp32": {"choices": [True, False]},
        "kernels": {"choices": ["hf", "fused-loss", "liger"]},
        "optimizer": {"choices": ["adamw_8bit", "paged_adamw_8bit", "adamw_torch_fused"]},
        "seq_len": {"choices": [512, 1024]},
    },
    "fixed": {"lora_rank": 16, "target_modules": "attention"},
    "baseline": {"micro_batch_size": 8},
}


class StopsWhen(Interruption):
    """Somebody asks to stop as soon as something holds, and ends nothing that runs."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        super().__init__()
        self._is_asked = is_asked

    def is_requested(self) -> bool:
        return self._is_asked()


def a_space(**changes: Any) -> SearchSpace:
    return SearchSpace.model_validate(SPACE | changes)


def peak_bytes(config: TrialConfig) -> int:
    """Linear in tokens for a fixed structure, as it is on a GPU."""
    fused = config.kernels != "hf"
    per_token = (420 if fused else 900) * _KIB
    kept = (3300 if fused else 4000) * (2 if config.upcast_fp32 else 1) * _KIB
    per_token += int((1 - config.checkpoint_fraction) * kept)
    base = (4.7 if config.upcast_fp32 else 4.0) * GIB
    wide = _TARGETS.get(str(config.target_modules), 1.0)
    return int(
        base + config.lora_rank * wide * 12 * 1024**2 + config.tokens_per_micro_batch * per_token
    )


def tokens_per_second(config: TrialConfig) -> float:
    """Rises to a roof with the tokens of a micro-batch; recomputing and the upcast cost."""
    roof = 9_400.0 / (1.0 - 0.28 * (1.0 - config.checkpoint_fraction))
    roof *= {"hf": 1.0, "fused-loss": 1.15, "liger": 1.3}[config.kernels]
    roof *= 1.0 if config.upcast_fp32 else 1.15
    return roof * config.tokens_per_micro_batch / (config.tokens_per_micro_batch + 700)


class Exact(MemoryPredictor):
    """Predicts the memory that the simulated GPU will say was taken."""

    def predict(self, config: TrialConfig) -> MemoryPrediction:
        return imagined(peak_bytes(config), uncertainty=0.01)

    def predict_all(self, configs: Sequence[TrialConfig], **_: Any) -> WholeMemory:
        return WholeMemory(configs, one_by_one(self.predict, configs))


def a_measurement(config: TrialConfig, *, spread: float = 0.005, **changes: Any) -> Measurement:
    speed = tokens_per_second(config)
    step = config.tokens_per_step / speed
    peak = changes.get("peak_allocated_bytes", peak_bytes(config))
    values: dict[str, Any] = {
        "tokens_per_second": speed,
        "samples_per_second": speed / config.seq_len,
        "step_seconds": step,
        "step_seconds_ci95": (step * (1 - spread), step * (1 + spread)),
        "steps_measured": 12,
        "steps_warmup": 2,
        "peak_allocated_bytes": peak,
        "trainable_parameters": min(1_000_000 * config.lora_rank, peak // 16),
        "final_loss": 10.4,
        "setup_seconds": 1.0,
        "measured_seconds": 12 * step,
    }
    return Measurement.model_validate(values | changes)


def at_speed(
    config: TrialConfig, speed: float, *, spread: float = 0.005, **changes: Any
) -> Measured:
    """Answer as a GPU that runs a configuration at so many tokens per second."""
    step = config.tokens_per_step / speed
    ends = (step * (1 - spread), step * (1 + spread))
    values = {"tokens_per_second": speed, "step_seconds": step, "step_seconds_ci95": ends}
    return Measured(measurement=a_measurement(config, **(values | changes)))


def train(config: TrialConfig) -> Outcome:
    """Answer as the GPU would."""
    peak = peak_bytes(config)
    if peak > BUDGET:
        return OutOfMemory(stage="forward", peak_allocated_bytes=BUDGET, requested_bytes=GIB)
    return Measured(measurement=a_measurement(config))


@dataclass(frozen=True)
class Knowing:
    """A pre-flight that is two functions."""

    refuses: Callable[[TrialConfig], bool] = lambda _: False
    speed: Callable[[TrialConfig], float] | None = None

    def expect(self, config: TrialConfig) -> Any:
        return SimpleNamespace(is_refused=self.refuses(config))

    def is_valid(self, config: TrialConfig) -> bool:
        return True

    def forecast(self, configs: Sequence[TrialConfig]) -> Any:
        if self.speed is None:
            return forecasts(configs)
        seconds = [config.tokens_per_step / self.speed(config) for config in configs]
        return forecasts(configs, physics=OneFactor(np.log(seconds)))


def forecasts(configs: Sequence[TrialConfig], **columns: Any) -> Any:
    """What a forecaster predicts of many configurations: nothing but some columns."""
    nothing = dict.fromkeys(
        ("physics", "target", "peak_bytes", "uncertainty", "trainable_parameters")
    )
    tokens = np.array([float(config.tokens_per_step) for config in configs])
    others = {"budget_bytes": BUDGET, "is_cut_up": False, "tokens_per_step": tokens}
    return SimpleNamespace(**{**nothing, **others, **columns})


@dataclass(frozen=True)
class OneFactor:
    """A speed model that knows every step but for one factor common to all."""

    known: Array

    @property
    def spread(self) -> Array:
        return np.full((1, 1), 0.3**2)

    @property
    def launch_shares(self) -> Array:
        return np.zeros(len(self.known))

    def log_seconds(self, log_factors: Array, rows: Any) -> Array:
        return np.asarray(self.known[rows] + log_factors[0])

    def slopes(self, log_factors: Array, rows: Any) -> Array:
        return np.ones((len(self.known[rows]), 1))


def does_not_fit(config: TrialConfig) -> bool:
    return peak_bytes(config) > BUDGET


def a_record(config: TrialConfig, outcome: Outcome | None = None, **changes: Any) -> TrialRecord:
    values = {"number": 0, "config": config, "outcome": outcome or train(config)}
    return TrialRecord.model_validate(values | changes)


def best_speed(space: SearchSpace) -> float:
    """The fastest configuration of the space that fits, by looking at all of them."""
    configs = [space.config(values) for values in space.combinations()]
    return max((tokens_per_second(c) for c in configs if peak_bytes(c) <= BUDGET), default=math.nan)


def a_definition(*, emulated_on: str | None = None, **changes: Any) -> StudyDefinition:
    """A study of the simulated space for an A10, or for what ``gpu`` says."""
    gpu = changes.get("gpu", "a10")
    target = Target(gpu=gpu, device="cuda", budget_bytes=BUDGET, emulated_on=emulated_on)
    return StudyDefinition(
        space=a_space(**changes),
        model=MODEL.to_json(),
        model_fingerprint=MODEL.fingerprint,
        target=target,
    )


def a_study(home: Path, *, sampler: BaseSampler | None = None, **changes: Any) -> OpenStudy:
    """Open a study of the simulated space in a SQLite file under ``home``."""
    return open_study(
        "study",
        url=f"sqlite:///{home}/sweep.db",
        definition=a_definition(**changes),
        sampler=sampler or RandomSampler(seed=0),
        environment={},
        home=home,
    )
