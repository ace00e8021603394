"""A memory predictor that is a formula, for tests of what is made of predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.sweep.predict.memory.prediction import MemoryPrediction, WholeMemory
from qlora_sweep.sweep.predict.memory.predictor import MemoryPredictor

BASE_BYTES = 5 * GIB
BYTES_PER_TOKEN = 1024 * 1024
RESERVED_FACTOR = 1.1


@dataclass(frozen=True)
class ImaginedMemory(MemoryPrediction):
    """A prediction without a step behind it, nor an allocator that could be wrong about it."""

    @property
    def quantized_share(self) -> float | None:
        """All of it, as of most models."""
        return 1.0

    @property
    def peak_reserved_bytes(self) -> int:
        return int(self.peak_allocated_bytes * RESERVED_FACTOR)

    @property
    def _slack(self) -> float:
        return self.uncertainty

    def _runs_under(self, limit_bytes: int) -> bool:
        return self.peak_allocated_bytes <= limit_bytes


def imagined(peak_bytes: int, *, uncertainty: float) -> ImaginedMemory:
    """Return a prediction of nothing but a peak."""
    return ImaginedMemory(
        peak_allocated_bytes=peak_bytes,
        breakdown={},
        moment="backward",
        uncertainty=uncertainty,
        reserved_uncertainty=uncertainty,
        step=None,  # type: ignore[arg-type]
    )


def one_by_one(
    predict: Callable[[TrialConfig], MemoryPrediction], configs: Iterable[TrialConfig]
) -> list[MemoryPrediction | InputError]:
    """Return what is predicted of each, or why nothing is."""
    known: list[MemoryPrediction | InputError] = []
    for config in configs:
        try:
            known.append(predict(config))
        except InputError as error:
            known.append(error)
    return known


class ImaginedWhole(WholeMemory):
    """What is imagined of many configurations, with a note of the rows that were looked at."""

    def __init__(self, predictor: ImaginedPredictor, configs: Sequence[TrialConfig]) -> None:
        super().__init__(configs, one_by_one(predictor.predict, configs))
        self.shown = predictor.shown

    def prediction(self, row: int) -> MemoryPrediction:
        self.shown.append(row)
        return super().prediction(row)


class ImaginedPredictor(MemoryPredictor):
    """Five GiB, and a MiB a token; without recomputation two, and with each unit of rank 1 MiB."""

    def __init__(self, *, uncertainty: float = 0.02, fault: Exception | None = None) -> None:
        self.uncertainty = uncertainty
        self.fault = fault
        self.asked: list[TrialConfig] = []
        self.shown: list[int] = []
        """Of what was predicted together, the rows that were looked at one by one."""

    def predict_all(
        self,
        configs: Sequence[TrialConfig],
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ImaginedWhole:
        return ImaginedWhole(self, configs)

    def predict(self, config: TrialConfig) -> ImaginedMemory:
        self.asked.append(config)
        if self.fault is not None:
            raise self.fault
        activations = int(
            config.tokens_per_micro_batch * BYTES_PER_TOKEN * (2 - config.checkpoint_fraction)
        )
        adapters = config.lora_rank * BYTES_PER_TOKEN
        parts = {"weights": BASE_BYTES, "adapters": adapters, "gradients": 0, "optimizer": 0}
        breakdown = {**parts, "activations": activations, "loss": 0}
        return ImaginedMemory(
            peak_allocated_bytes=sum(breakdown.values()),
            breakdown=breakdown,
            moment="backward",
            uncertainty=self.uncertainty,
            reserved_uncertainty=self.uncertainty,
            step=None,  # type: ignore[arg-type]
        )
