"""What each of several cards needs, beside one alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import parse_config
from search_spaces.errors import InputError
from search_spaces.models import ModelSpec, load_model_spec
from sweep.predict.memory.prediction import MemoryPrediction
from sweep.predict.memory.predictor import TracingPredictor
from sweep.predict.memory.tracing_children import TracingChild
from tests.sweep.predict.memory.imagined_profile import MODEL, ImaginedTracer

TINYLLAMA = load_model_spec("tinyllama-1.1b")
LEAN = {"upcast_fp32": False, "optimizer": "adamw_torch_fused", "micro_batch_size": 2}
SHARED = {**LEAN, "sharding": "fsdp"}


@pytest.fixture(scope="module")
def predictor(tracing_child: TracingChild, profile_cache: Path) -> TracingPredictor:
    return TracingPredictor(TINYLLAMA, cache_dir=profile_cache, tracer=tracing_child)


def predict(predictor: TracingPredictor, **knobs: Any) -> MemoryPrediction:
    return predictor.predict(parse_config({**LEAN, **knobs}))


def test_gradients_are_there_once_in_buckets_and_once_more_where_cards_accumulate(
    predictor: TracingPredictor,
) -> None:
    batches = {"effective_batch_size": 16}
    alone, together = predict(predictor), predict(predictor, data_parallel=2)
    accumulated = predict(predictor, **batches)
    both = predict(predictor, data_parallel=2, **batches)
    adapters = alone.breakdown["adapters"]
    assert together.breakdown["gradients"] >= adapters
    assert together.peak_allocated_bytes == accumulated.peak_allocated_bytes
    assert both.peak_allocated_bytes == together.peak_allocated_bytes + adapters
    assert predict(predictor, data_parallel=4).breakdown == together.breakdown


def test_the_more_cards_share_a_model_the_less_each_of_them_holds(
    predictor: TracingPredictor,
) -> None:
    whole = predict(predictor).breakdown
    two, four = (predict(predictor, **SHARED, data_parallel=n).breakdown for n in (2, 4))
    for part in ("weights", "adapters", "optimizer"):
        assert four[part] < two[part] < whole[part], part
    assert two["adapters"] == pytest.approx(whole["adapters"] / 2, rel=0.01)
    # Half of what can be shared, all constants, and what is gathered at a time.
    assert two["weights"] > whole["weights"] / 2


def test_a_shared_model_is_predicted_less_surely(predictor: TracingPredictor) -> None:
    shared = predict(predictor, **SHARED, data_parallel=2)
    assert shared.uncertainty > predict(predictor, data_parallel=2).uncertainty


def test_what_nobody_knows_the_layers_of_has_no_prediction_for_its_shares(tmp_path: Path) -> None:
    unknown = ModelSpec(MODEL.name, MODEL.source, {**MODEL.config, "model_type": "brand_new"})
    predictor = TracingPredictor(unknown, cache_dir=tmp_path, tracer=ImaginedTracer())
    with pytest.raises(InputError, match="what each card holds of them is not predicted"):
        predict(predictor, **SHARED, data_parallel=2)
