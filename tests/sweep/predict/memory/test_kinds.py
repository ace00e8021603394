"""One configuration of each set of tensors that a space has."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.loading import load_space
from search_spaces.space import SearchSpace
from sweep.predict.memory.predictor import TracingPredictor, one_of_each_kind
from tests.sweep.predict.memory.imagined_profile import MODEL, ImaginedTracer


def a_space(**dimensions: Any) -> SearchSpace:
    values = {"lora_rank": {"choices": (4, 8)}, **dimensions}
    return SearchSpace(name="mine", gpu="a10", dimensions=values)


@pytest.mark.parametrize(
    ("dimensions", "kinds"),
    [
        ({}, 1),
        ({"seq_len": {"choices": (64, 512)}, "micro_batch_size": {"choices": (1, 2, 3)}}, 1),
        ({"kernels": {"choices": ("hf", "liger")}, "upcast_fp32": {"choices": (True, False)}}, 4),
        ({"quantization": {"choices": ("nf4", "fp4", "none")}}, 2),
        ({"lora_dropout": {"low": 0.0, "high": 0.1}}, 2),
        ({"lora_dropout": {"low": 0.05, "high": 0.1}}, 1),
        ({"checkpoint_fraction": {"low": 0.0, "high": 1.0, "step": 0.05}}, 3),
        ({"checkpoint_fraction": {"low": 0.0, "high": 1.0}}, 3),
        ({"checkpoint_fraction": {"choices": (0.25, 0.5)}}, 1),
    ],
)
def test_values_that_only_scale_tensors_make_no_kind(
    dimensions: dict[str, Any], kinds: int
) -> None:
    space = a_space(**dimensions)
    baseline, *configs = one_of_each_kind(space)
    assert baseline == space.baseline_config()
    assert len(configs) == len(set(configs)) == kinds
    assert all(space.params_of(config) is not None for config in configs)
    # Each is as long as the space goes.
    assert {config.seq_len for config in configs} == {max(space.values_of("seq_len"))}


def test_they_need_the_structures_that_the_whole_preset_needs(tmp_path: Any) -> None:
    space = load_space("a10")
    tracers = [ImaginedTracer(window=1500, is_same_in_fp16=False) for _ in range(2)]
    every = [space.baseline_config(), *map(space.config, space.combinations())]
    for number, configs in enumerate((list(one_of_each_kind(space)), every)):
        cache = tmp_path / str(number)
        TracingPredictor(MODEL, cache_dir=cache, tracer=tracers[number]).predict_all(configs)
    assert set(tracers[0].asked) == set(tracers[1].asked)
