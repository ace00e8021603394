"""Profiles of models part of whose layers are in 4 bits, put together from two that are traced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from search_spaces.models import load_model_spec
from sweep.predict.memory.prediction import WholeMemory
from sweep.predict.memory.predictor import TracingPredictor
from sweep.predict.memory.profile_store import TracingChildren
from sweep.predict.memory.profiles import Profile, Structure
from tests.sweep.predict.memory.test_trace import model
from tests.sweep.shared_tracing import trace

LAYERS = 6
SHAPES: list[dict[str, Any]] = [
    {"micro_batch_size": 1, "seq_len": 96},
    {"micro_batch_size": 3, "seq_len": 200, "lora_rank": 64, "effective_batch_size": 9},
]


@pytest.fixture
def predictor(tracing_child: TracingChildren, profile_cache: Path) -> TracingPredictor:
    return TracingPredictor(model("llama"), cache_dir=profile_cache, tracer=tracing_child)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"upcast_fp32": False, "checkpoint_fraction": 0.0},
        {"kernels": "liger", "checkpoint_fraction": 0.0, "target_modules": "all-linear"},
        {"compile": True, "upcast_fp32": False, "checkpoint_fraction": 0.0},
        {"adapter_dtype": "bf16", "upcast_fp32": False, "checkpoint_fraction": 0.0},
        {"expandable_segments": True, "upcast_fp32": False, "checkpoint_fraction": 0.0},
    ],
    ids=str,
)
def test_what_is_put_together_takes_what_is_traced_as_a_whole(
    predictor: TracingPredictor,
    tracing_child: TracingChildren,
    knobs: dict[str, Any],
    shape: dict[str, Any],
) -> None:
    config = TrialConfig(quantized_fraction=0.5, **knobs, **shape)
    put_together = predictor.predict(config)
    is_checkpointed = config.checkpoint_fraction > 0
    whole = model("llama", every_layer_is_its_own=list(range(LAYERS)))
    structure = Structure.of(config, is_checkpointed=is_checkpointed)
    traced = Profile.from_json(trace(tracing_child, whole, structure))
    assert put_together.step is not None
    step = replace(put_together.step, profiles={is_checkpointed: traced})
    expected = WholeMemory([config], [step]).prediction(0)
    # The base of equal layers has other remainders, of less than a MiB each, than one of both.
    slack = 2**20 * LAYERS
    parts = put_together.breakdown
    assert parts["weights"] == pytest.approx(expected.breakdown["weights"], abs=slack)
    for part in ("adapters", "gradients", "optimizer", "loss"):
        assert parts[part] == expected.breakdown[part]
    activations = expected.breakdown["activations"]
    assert parts["activations"] == pytest.approx(activations, rel=0.01)
    assert put_together.moment == expected.moment
    reserved = expected.peak_reserved_bytes
    assert put_together.peak_reserved_bytes == pytest.approx(reserved, rel=0.05)


def test_memory_goes_from_that_of_all_layers_in_4_bits_to_that_of_none(
    tracing_child: TracingChildren, profile_cache: Path
) -> None:
    spec = load_model_spec("tinyllama-1.1b")
    tiny = TracingPredictor(spec, cache_dir=profile_cache, tracer=tracing_child)
    lean: dict[str, Any] = {"upcast_fp32": False, "kernels": "liger"}

    def weights(**knobs: Any) -> int:
        return tiny.predict(TrialConfig(**lean, **knobs)).breakdown["weights"]

    layers = spec.hidden_layers
    packed, wide = weights(), weights(quantization="none")
    for count in (1, layers // 2, layers - 1):
        expected = wide + (packed - wide) * count / layers
        assert weights(quantized_fraction=count / layers) == pytest.approx(expected, abs=1)
    assert weights(quantized_fraction=0.999) == packed


def test_a_share_of_16_bit_layers_asks_for_no_more_tracing_than_the_two_ends() -> None:
    config = TrialConfig(quantized_fraction=0.25, double_quant=False)
    packed, wide = Structure.of(config, is_checkpointed=True).parts()
    assert packed == Structure.of(TrialConfig(double_quant=False), is_checkpointed=True)
    assert wide == Structure.of(TrialConfig(quantization="none"), is_checkpointed=True)
    assert packed.parts() == (packed,)
    assert not packed.is_mixed
