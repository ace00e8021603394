"""A recorded surface whose priors are wrong: speeds that are reversed, memory that is off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import TrialRecord
from qlora_sweep.storage.surfaces import Surface
from qlora_sweep.sweep.predict.speed.predictor import StepTimes
from qlora_sweep.sweep.sampling.surrogate import Array
from tests.bench.searching import Recorded, forecast_of


@dataclass(frozen=True)
class Reversed:
    """A speed model by which what is slow is fast: seconds become k / seconds."""

    right: StepTimes
    log_k: float

    @property
    def spread(self) -> Array:
        return self.right.spread

    @property
    def launch_shares(self) -> Array:
        return self.right.launch_shares

    def log_seconds(self, log_factors: Array, rows: Any) -> Array:
        return self.log_k - self.right.log_seconds(log_factors, rows)

    def slopes(self, log_factors: Array, rows: Any) -> Array:
        return -self.right.slopes(log_factors, rows)


class ReversedForecast:
    """Predicts each step by `Reversed`."""

    def __init__(self, surface: Surface) -> None:
        self._right = forecast_of(surface)

    def physics(self, configs: Sequence[TrialConfig]) -> Any:
        right = self._right.physics(configs)
        if right is None:
            return None
        seconds = right.log_seconds(np.zeros(len(right.spread)), slice(None))
        return Reversed(right, 2 * float(np.median(seconds)))

    def predict(self, config: TrialConfig) -> float | None:
        return None

    def learn(self, record: TrialRecord) -> None:
        self._right.learn(record)


def wrong(recorded: Recorded, *, is_reversed: bool, memory: float) -> Recorded:
    """Return the same surface, foreseen wrongly."""
    peaks = {key: int(peak * memory) for key, peak in recorded.peaks.items()}
    speed = ReversedForecast if is_reversed else forecast_of
    return replace(recorded, peaks=peaks, speed=speed)
