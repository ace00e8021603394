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
    # Half of what can be shared, and all constants.
    assert two["weights"] > whole["weights"] / 2


def test_what_is_gathered_is_there_when_it_is_needed_and_not_throughout(
    predictor: TracingPredictor,
) -> None:
    head = TINYLLAMA.vocab_size * TINYLLAMA.hidden_size * 2
    one, eight, long = (
        predict(predictor, **{**SHARED, "micro_batch_size": n, "seq_len": s}, data_parallel=2)
        for n, s in ((1, 128), (8, 512), (8, 2048))
    )
    # A small step's peak is the head that arrives, beside what it arrived in.
    assert one.moment == "loss"
    assert one.breakdown["activations"] > 2 * head
    grown = [
        b.peak_allocated_bytes - a.peak_allocated_bytes for a, b in ((one, eight), (eight, long))
    ]
    assert 0 < grown[0] < grown[1]


def test_a_loss_that_reads_the_head_gives_it_up_before_the_backward_pass(
    predictor: TracingPredictor,
) -> None:
    small = {**SHARED, "micro_batch_size": 1, "seq_len": 128}
    called = predict(predictor, **small, data_parallel=2)
    fused = predict(predictor, **small, data_parallel=2, kernels="fused-loss")
    assert fused.moment == called.moment == "loss"
    assert fused.peak_allocated_bytes < called.peak_allocated_bytes


def test_a_head_that_is_the_embedding_is_there_throughout(tmp_path: Path) -> None:
    peaks = []
    for is_tied in (False, True):
        # The dimensions of a model whose layers are known, and a profile by hand.
        config = {**TINYLLAMA.config, **MODEL.config, "model_type": "llama", "vocab_size": 2**16}
        model = ModelSpec(MODEL.name, MODEL.source, {**config, "tie_word_embeddings": is_tied})
        predictor = TracingPredictor(model, cache_dir=tmp_path, tracer=ImaginedTracer(loss_bytes=1))
        many = {**SHARED, "micro_batch_size": 256}
        peaks.append(predict(predictor, **many, data_parallel=2).breakdown["activations"])
    assert peaks[1] - peaks[0] == 2**16 * MODEL.config["hidden_size"] * 2


def test_a_shared_model_is_predicted_less_surely(predictor: TracingPredictor) -> None:
    shared = predict(predictor, **SHARED, data_parallel=2)
    assert shared.uncertainty > predict(predictor, data_parallel=2).uncertainty


def test_what_nobody_knows_the_layers_of_has_no_prediction_for_its_shares(tmp_path: Path) -> None:
    unknown = ModelSpec(MODEL.name, MODEL.source, {**MODEL.config, "model_type": "brand_new"})
    predictor = TracingPredictor(unknown, cache_dir=tmp_path, tracer=ImaginedTracer())
    with pytest.raises(InputError, match="what each card holds of them is not predicted"):
        predict(predictor, **SHARED, data_parallel=2)
