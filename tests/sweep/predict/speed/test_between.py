"""What GPUs that train together wait for each other: physics that must hold."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.config import parse_config
from search_spaces.gpus import GpuSpec, Interconnect, find_gpu, gpu_catalogue
from search_spaces.models import load_model_spec
from sweep.predict.speed.predictor import SpeedPrediction
from tests.sweep.predict.predicted_steps import predict_step
from tests.sweep.predict.rows import SEVERAL_CARDS, config_of, describe, model_of

MISTRAL = load_model_spec("mistral-7b-v0.3")
LEAN = {
    "micro_batch_size": 8,
    "upcast_fp32": False,
    "kernels": "liger",
    "optimizer": "adamw_torch_fused",
}
SHARDED = {**LEAN, "sharding": "fsdp"}


def step(gpu: GpuSpec, **knobs: Any) -> SpeedPrediction:
    return predict_step(parse_config({**LEAN, **knobs}), model=MISTRAL, gpu=gpu)


def linked(gpu: GpuSpec, bytes_per_second: float) -> GpuSpec:
    link = Interconnect(kind="pcie", bytes_per_second=bytes_per_second)
    return gpu.model_copy(update={"interconnect": link})


@pytest.mark.parametrize(("name", "cards"), [("a10", 2), ("h200", 4)])
def test_cards_that_hold_the_model_each_are_nearly_as_many_times_as_fast(
    name: str, cards: int
) -> None:
    alone, together = step(find_gpu(name)), step(find_gpu(name), data_parallel=cards)
    ratio = together.tokens_per_second / alone.tokens_per_second
    assert 0.9 * cards < ratio < cards
    assert together.uncertainty > alone.uncertainty


def test_a_slower_link_never_makes_a_step_shorter() -> None:
    for knobs in ({}, SHARDED):
        rates = (1e8, 1e9, 1e10, 1e11)
        times = [
            step(linked(find_gpu("a10"), rate), **knobs, data_parallel=2).step_seconds
            for rate in rates
        ]
        assert times == sorted(times, reverse=True)
        assert times[0] > times[-1]


def test_gathering_layers_takes_time_that_holding_them_does_not() -> None:
    gpu = linked(find_gpu("h200"), 1e10)
    whole, shared = (step(gpu, **knobs, data_parallel=2) for knobs in ({}, SHARDED))
    assert shared.step_seconds > whole.step_seconds
    assert shared.uncertainty > whole.uncertainty


def test_the_terms_still_add_up_to_the_step() -> None:
    for knobs in ({"data_parallel": 2}, {**SHARDED, "data_parallel": 2}):
        found = step(find_gpu("a10"), **knobs)
        assert sum(found.terms.values()) == pytest.approx(found.step_seconds)


def test_what_two_cards_took_is_within_what_is_stated_of_them() -> None:
    for row in (row for row in SEVERAL_CARDS if row["cards"] > 1):
        config, gpu = config_of(row), find_gpu("h200")
        found = predict_step(config, model=model_of(row), gpu=gpu)
        off = row["step_seconds"] / found.step_seconds - 1
        assert abs(off) < found.uncertainty, describe(row)


def test_the_host_is_busy_with_what_it_gathers_and_one_gpu_waits_for_none() -> None:
    # Measured on two H200: 0.65 s a step, of which the GPU computes a tenth.
    small = {**SHARDED, "micro_batch_size": 1, "data_parallel": 2}
    assert step(find_gpu("h200"), **small).bottleneck == "launch"
    gpu = find_gpu("a10")
    assert step(gpu).step_seconds == step(linked(gpu, 1.0)).step_seconds
    assert all(spec.interconnect is not None for spec in gpu_catalogue().values())
