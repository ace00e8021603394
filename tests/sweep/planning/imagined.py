"""What answers for a GPU by a formula, and offers made up for the purpose."""

from __future__ import annotations

from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.sweep.predict.forecast import Forecaster
from qlora_sweep.sweep.predict.memory.profiles import Untraceable
from tests.sweep.imagined_memory import ImaginedMemory, ImaginedPredictor
from tests.sweep.imagined_study import MISTRAL
from tests.sweep.predict.forecasters import forecaster_on


def a_forecaster(
    *,
    gpu: str = "a10",
    model: ModelSpec = MISTRAL,
    budget_gib: float | None = None,
    **changes: Any,
) -> Forecaster:
    values = {"predictor": ImaginedPredictor()} | changes
    if budget_gib is not None:
        values["budget_bytes"] = int(budget_gib * GIB)
    return forecaster_on(gpu, model, **values)


class Picky(ImaginedPredictor):
    """Cannot predict what has these kernels, nor rows of 2048 tokens and more if so told."""

    def __init__(self, *, length: int = 10**9, **refused: Exception) -> None:
        super().__init__()
        self._length, self._refused = length, refused

    def predict(self, config: TrialConfig) -> ImaginedMemory:
        if config.seq_len >= self._length:
            raise Untraceable("the mask decides")
        if config.kernels in self._refused:
            raise self._refused[config.kernels]
        return super().predict(config)


def an_offer(**terms: Any) -> Offer:
    values = {
        "gpu": "a10",
        "provider": "Someone",
        "usd_per_hour": 3.6,
        "date": "2026-11-21",
        "source": "a test",
    }
    return Offer.model_validate(values | terms)
