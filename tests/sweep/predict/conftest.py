"""The tracing child, started once for all tests that trace real models, and its cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sweep.paths import cache_directory
from sweep.predict.memory.predictor import MemoryPrediction, TracingPredictor
from sweep.predict.memory.profile_store import TracingChildren
from tests.sweep.predict.rows import Predict, Row, config_of, model_of


@pytest.fixture(scope="session")
def tracing_child() -> Iterator[TracingChildren]:
    child = TracingChildren(1, outlive=True)
    yield child
    child.close()


@pytest.fixture(scope="session")
def profile_cache() -> Path:
    """Where all tests keep what is traced, from run to run."""
    return cache_directory() / "memory"


@pytest.fixture(scope="session")
def predict_row(tracing_child: TracingChildren, profile_cache: Path) -> Predict:
    """Predict the memory of a committed row, once for all tests."""
    predictors: dict[str, TracingPredictor] = {}
    known: dict[tuple[str, str], MemoryPrediction] = {}

    def predicted(row: Row) -> MemoryPrediction:
        name, config = row["model"], config_of(row)
        if name not in predictors:
            predictors[name] = TracingPredictor(
                model_of(row), cache_dir=profile_cache, tracer=tracing_child
            )
        if (name, config.key()) not in known:
            known[name, config.key()] = predictors[name].predict(config)
        return known[name, config.key()]

    return predicted
