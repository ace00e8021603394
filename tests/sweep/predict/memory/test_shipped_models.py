"""What is predicted of every shipped architecture before anything runs, or why it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from search_spaces.config import TrialConfig
from search_spaces.linears import parameters, resolve_targets, target_sets, unquantized
from search_spaces.models import ModelSpec, load_model_spec, shipped_models
from search_spaces.rules import WITHOUT_SDPA, violation
from sweep.predict.memory.predictor import MemoryPrediction, TracingPredictor
from sweep.predict.memory.profile_store import TracingChildren
from sweep.predict.memory.profiles import Untraceable

NAMES = [model.name for model in shipped_models()]
MIXTURES = [model.name for model in shipped_models() if unquantized(model) is not None]
HOPPER = (9, 0)

Predict = Callable[[ModelSpec, TrialConfig], MemoryPrediction]


def refused(spec: ModelSpec, config: TrialConfig) -> str | None:
    found = violation(config, model=spec, compute_capability=HOPPER, device="cuda")
    return None if found is None else f"{found.rule}: {found.reason}"


@pytest.fixture
def predict(tracing_child: TracingChildren, profile_cache: Path) -> Predict:
    def predicted(spec: ModelSpec, config: TrialConfig) -> MemoryPrediction:
        tracing = TracingPredictor(spec, cache_dir=profile_cache, tracer=tracing_child)
        return tracing.predict(config)

    return predicted


def recipe(spec: ModelSpec) -> TrialConfig:
    """The standard recipe, with what the model cannot have replaced as the rules say."""
    changes = {"quantization": "none"} if spec.name in MIXTURES else {}
    eager = {"attention": "eager"} if spec.model_type in WITHOUT_SDPA else {}
    return TrialConfig.model_validate({"micro_batch_size": 2, **changes, **eager})


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_of_every_shipped_model_is_predicted(predict: Predict, name: str) -> None:
    spec = load_model_spec(name)
    config, size = recipe(spec), parameters(spec)
    assert refused(spec, config) is None
    prediction = predict(spec, config)
    weights = prediction.breakdown["weights"]
    # Half a byte for a weight in 4 bits, two in 16, four for an embedding that the upcast widens.
    least, most = (2.0, 3.0) if name in MIXTURES else (0.5, 4.0)
    assert least * size < weights < most * size
    assert prediction.breakdown["adapters"] > 0
    assert prediction.quantized_share == (None if name in MIXTURES else 1.0)
    # Without written logits it takes less.
    for kernels in ("fused-loss", "liger"):
        fused = config.model_copy(update={"kernels": kernels})
        if kernels == "liger" and name in MIXTURES:
            assert "experts" in str(refused(spec, fused))
            continue
        assert refused(spec, fused) is None
        assert predict(spec, fused).peak_allocated_bytes < prediction.peak_allocated_bytes


def test_a_mixture_of_experts_in_4_bits_is_refused_with_the_way_out(predict: Predict) -> None:
    assert MIXTURES == ["gpt-oss-20b", "qwen3-30b-a3b"]
    for spec in map(load_model_spec, MIXTURES):
        config = recipe(spec).model_copy(update={"quantization": "nf4"})
        assert "Use quantization none" in str(refused(spec, config))
        with pytest.raises(Untraceable, match="use quantization none"):
            predict(spec, config)


@pytest.mark.parametrize("name", NAMES)
def test_adapters_find_their_layers_in_every_shipped_model(name: str) -> None:
    spec = load_model_spec(name)
    for wanted in ("qv", "attention", "all-linear"):
        config = recipe(spec).model_copy(update={"target_modules": wanted})
        if wanted in target_sets(spec):
            assert refused(spec, config) is None
            assert resolve_targets(config, spec)
        else:
            # One matrix holds queries, keys and values.
            assert spec.model_type == "phi3"
            assert "unknown-target-module" in str(refused(spec, config))
