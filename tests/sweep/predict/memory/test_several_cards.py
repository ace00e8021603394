"""What each of several GPUs needs, beside one alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import parse_config
from search_spaces.errors import InputError
from search_spaces.models import ModelSpec, load_model_spec
from sweep.predict.memory.prediction import Fit, MemoryPrediction
from sweep.predict.memory.predictor import TracingPredictor
from sweep.predict.memory.profile_store import TracingChildren
from sweep.predict.memory.profiles import ACTIVATIONS, Profile
from sweep.predict.memory.replay import runs_under
from tests.sweep.predict.memory.imagined_profile import MODEL, ImaginedTracer

TINYLLAMA = load_model_spec("tinyllama-1.1b")
LEAN = {"upcast_fp32": False, "optimizer": "adamw_torch_fused", "micro_batch_size": 2}
SHARED = {**LEAN, "sharding": "fsdp"}


@pytest.fixture(scope="module")
def predictor(tracing_child: TracingChildren, profile_cache: Path) -> TracingPredictor:
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
    first, second, third = (each.peak_allocated_bytes for each in (one, eight, long))
    assert 0 < second - first < third - second


def gathered(predictor: TracingPredictor, name: str, **knobs: Any) -> int:
    """Bytes by which what is highest in a segment is higher for being shared."""
    whole, shared = (
        predict(predictor, **knobs, data_parallel=2, sharding=way).step.profile
        for way in ("none", "fsdp")
    )

    def most(profile: Profile) -> int:
        _, peaks = profile.accounts[name]
        return int(peaks[0, ACTIVATIONS, 0, profile.monomials.index("")])

    return most(shared) - most(whole)


def test_a_loss_that_reads_the_head_gives_it_up_before_the_backward_pass(
    predictor: TracingPredictor,
) -> None:
    head = TINYLLAMA.vocab_size * TINYLLAMA.hidden_size * 2
    assert gathered(predictor, "head_backward") == head
    assert gathered(predictor, "head_backward", kernels="fused-loss") == 0
    assert gathered(predictor, "head", kernels="fused-loss") > head


TIED = ModelSpec(
    MODEL.name,
    MODEL.source,
    # The dimensions of a model whose layers are known, and a profile by hand.
    {**TINYLLAMA.config, **MODEL.config, "model_type": "llama", "tie_word_embeddings": True},
)


def test_a_head_that_is_the_embedding_is_there_throughout(tmp_path: Path) -> None:
    apart = ModelSpec(MODEL.name, MODEL.source, {**TIED.config, "tie_word_embeddings": False})
    weights = []
    for model in (apart, TIED):
        predictor = TracingPredictor(model, cache_dir=tmp_path, tracer=ImaginedTracer())
        shared = predict(predictor, **SHARED, data_parallel=2)
        weights.append(shared.breakdown["weights"])
    head = MODEL.config["vocab_size"] * MODEL.config["hidden_size"] * 2
    # It is whole beside its share. Of a base of one size, more is no parameter where one is less.
    assert weights[1] - weights[0] == head + head // 2


def test_what_was_never_measured_of_shared_models_is_stated_less_surely(
    predictor: TracingPredictor, tmp_path: Path
) -> None:
    measured = predict(predictor, **SHARED, data_parallel=2).uncertainty
    tied = TracingPredictor(TIED, cache_dir=tmp_path, tracer=ImaginedTracer())
    config = parse_config({**SHARED, "data_parallel": 2})
    assert tied.predict_all([config]).uncertainty[0] == tied.predict(config).uncertainty > measured
    assert predict(predictor, **SHARED, data_parallel=4).uncertainty > measured


@pytest.mark.parametrize(
    ("cards", "kernels", "batch"),
    [(2, "hf", 1), (2, "fused-loss", 16), (4, "hf", 16), (8, "hf", 1)],
)
def test_what_surely_fits_runs_in_the_replay_too(
    predictor: TracingPredictor, cards: int, kernels: str, batch: int
) -> None:
    knobs = {"data_parallel": cards, "kernels": kernels, "micro_batch_size": batch}
    shared = predict(predictor, **{**SHARED, **knobs})
    for times in (1.1, 1.2, 1.43, 1.6, 2.0):
        budget = int(times * shared.peak_allocated_bytes)
        if shared.fits(budget) is Fit.YES:
            assert runs_under(shared.step, limit_bytes=budget)


def test_what_nobody_knows_the_layers_of_has_no_prediction_for_its_shares(tmp_path: Path) -> None:
    unknown = ModelSpec(MODEL.name, MODEL.source, {**MODEL.config, "model_type": "brand_new"})
    predictor = TracingPredictor(unknown, cache_dir=tmp_path, tracer=ImaginedTracer())
    with pytest.raises(InputError, match="what each GPU holds of them is not predicted"):
        predict(predictor, **SHARED, data_parallel=2)
