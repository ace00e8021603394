"""What answers for a GPU by a formula, and offers made up for the purpose."""

from __future__ import annotations

from typing import Any

from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.sweep.predict.forecast import NO_EVIDENCE, Evidence, Forecaster
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.imagined_study import MISTRAL
from tests.sweep.predict.forecasters import forecaster_on


def a_forecaster(
    *,
    gpu: str = "a10",
    model: ModelSpec = MISTRAL,
    budget_gib: float | None = None,
    predictor: ImaginedPredictor | None = None,
    evidence: Evidence = NO_EVIDENCE,
) -> Forecaster:
    return forecaster_on(
        gpu,
        model,
        budget_bytes=None if budget_gib is None else int(budget_gib * GIB),
        predictor=predictor or ImaginedPredictor(),
        evidence=evidence,
    )


def an_offer(**terms: Any) -> Offer:
    values = {
        "gpu": "a10",
        "provider": "Someone",
        "usd_per_hour": 3.6,
        "date": "2026-11-21",
        "source": "a test",
    }
    return Offer.model_validate(values | terms)
