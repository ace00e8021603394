"""Predictors that all tests of real models share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.sweep.predict.memory.predictor import MemoryPrediction, TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from tests.sweep.predict.rows import Predict, Row, config_of, model_of

Predictors = Callable[..., TracingPredictor]


@pytest.fixture(scope="session")
def predictor(tracing_child: TracingChildren, profile_cache: Path) -> Predictors:
    """Predict the memory of a model, on a GPU of some capability."""

    known: dict[Any, TracingPredictor] = {}

    def of(spec: ModelSpec, capability: tuple[int, int] | None = None) -> TracingPredictor:
        key = spec.name, spec.fingerprint, capability
        if key not in known:
            kept = {"cache_dir": profile_cache, "tracer": tracing_child}
            known[key] = TracingPredictor(spec, compute_capability=capability, **kept)
        return known[key]

    return of


@pytest.fixture(scope="session")
def predict_row(predictor: Predictors) -> Predict:
    """Predict the memory of a committed row, once for all tests."""
    known: dict[tuple[str, str], MemoryPrediction] = {}

    def predicted(row: Row) -> MemoryPrediction:
        key = row["model"], config_of(row).key()
        if key not in known:
            known[key] = predictor(model_of(row)).predict(config_of(row))
        return known[key]

    return predicted
