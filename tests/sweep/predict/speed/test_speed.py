"""Behaviour of the speed prediction: physics that must hold, accuracy against measured steps."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.config import TrialConfig, parse_config
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec, find_gpu
from search_spaces.models import ModelSpec, load_model_spec
from sweep.predict.speed.predictor import FACTORS, Calibration, Factor, calibrate
from tests.sweep.predict.predicted_steps import predict_step, predict_steps

MISTRAL = load_model_spec("mistral-7b-v0.3")
H200 = find_gpu("h200")

LIGER = {"kernels": "liger", "upcast_fp32": False}
COMPILED = {
    "kernels": "fused-loss",
    "upcast_fp32": False,
    "compile": True,
    "checkpoint_fraction": 0.0,
}
WIDE = {"lora_rank": 64, "target_modules": "all-linear"}


def make_config(**values: Any) -> TrialConfig:
    return parse_config(values)


def seconds(config: TrialConfig, *, gpu: GpuSpec = H200, model: ModelSpec = MISTRAL) -> float:
    return predict_step(config, model=model, gpu=gpu).step_seconds


CONFIGS = st.builds(
    make_config,
    micro_batch_size=st.integers(1, 40),
    seq_len=st.sampled_from([128, 512, 2048]),
    lora_rank=st.sampled_from([8, 64]),
    lora_dropout=st.sampled_from([0.0, 0.05]),
    target_modules=st.sampled_from(["qv", "attention", "all-linear"]),
    compute_dtype=st.sampled_from(["bf16", "fp16", "fp32", "fp8", "int8"]),
    quantization=st.sampled_from(["nf4", "fp4", "fp8", "int8", "none"]),
    double_quant=st.booleans(),
    quantized_fraction=st.sampled_from([0.25, 0.7, 1.0]),
    adapter_dtype=st.sampled_from(["fp32", "bf16"]),
    checkpoint_fraction=st.sampled_from([0.0, 0.3, 0.9]),
    upcast_fp32=st.booleans(),
    kernels=st.sampled_from(["hf", "fused-loss", "liger"]),
    attention=st.sampled_from(["sdpa", "flash_attention_2", "eager"]),
    optimizer=st.sampled_from(["adamw_8bit", "paged_adamw_8bit", "adamw_torch_fused"]),
    compile=st.booleans(),
)


@given(config=CONFIGS)
def test_the_terms_add_up_to_the_step_and_none_is_negative(config: TrialConfig) -> None:
    prediction = predict_step(config, model=MISTRAL, gpu=H200)
    assert sum(prediction.terms.values()) == pytest.approx(prediction.step_seconds)
    assert min(prediction.terms.values()) >= 0.0
    assert prediction.tokens_per_second == pytest.approx(
        config.tokens_per_step / prediction.step_seconds
    )
    assert 0.0 < prediction.flops_utilization < 1.0


@given(config=CONFIGS, more=st.integers(1, 8))
def test_more_tokens_in_a_micro_batch_never_make_a_step_shorter(
    config: TrialConfig, more: int
) -> None:
    larger = config.model_copy(update={"micro_batch_size": config.micro_batch_size + more})
    longer = config.model_copy(update={"seq_len": config.seq_len + more})
    assert seconds(larger) >= seconds(config)
    assert seconds(longer) >= seconds(config)


@given(config=CONFIGS, more=st.floats(0.01, 0.1))
def test_recomputing_more_layers_never_makes_a_step_shorter(
    config: TrialConfig, more: float
) -> None:
    fraction = config.checkpoint_fraction + more
    assert seconds(config.model_copy(update={"checkpoint_fraction": fraction})) >= seconds(config)


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ({"upcast_fp32": True}, {"upcast_fp32": False}),
        ({"kernels": "hf"}, {"kernels": "liger"}),
        ({"compile": False}, {"compile": True}),
        ({"attention": "eager"}, {"attention": "sdpa"}),
        ({"lora_dropout": 0.1}, {"lora_dropout": 0.0}),
        ({"target_modules": "all-linear"}, {"target_modules": "qv"}),
        ({"lora_rank": 256}, {"lora_rank": 8}),
        ({"compute_dtype": "fp32"}, {"compute_dtype": "bf16"}),
        ({"compute_dtype": "fp16"}, {"compute_dtype": "bf16"}),
        ({"double_quant": True}, {"double_quant": False}),
        ({}, {"quantized_fraction": 0.75, "upcast_fp32": False}),
        ({"quantized_fraction": 0.75}, {"quantized_fraction": 0.5}),
        ({"adapter_dtype": "fp32"}, {"adapter_dtype": "bf16"}),
        ({"quantization": "nf4"}, {"quantization": "none", "upcast_fp32": True}),
    ],
)
def test_a_knob_that_asks_for_more_work_costs_time(
    slower: dict[str, Any], faster: dict[str, Any]
) -> None:
    assert seconds(make_config(**slower)) > seconds(make_config(**faster))


def test_the_time_of_dequantizing_goes_with_the_layers_that_are_quantized() -> None:
    whole, half, none = (
        predict_step(make_config(**knobs), model=MISTRAL, gpu=H200).terms["dequant"]
        for knobs in ({}, {"quantized_fraction": 0.5}, {"quantization": "none"})
    )
    assert half == pytest.approx(whole / 2, rel=0.02)
    assert none == 0.0


def test_accumulation_repeats_the_micro_batch_but_not_the_update() -> None:
    one = predict_step(make_config(micro_batch_size=8), model=MISTRAL, gpu=H200)
    four = predict_step(
        make_config(micro_batch_size=8, effective_batch_size=32), model=MISTRAL, gpu=H200
    )
    assert four.terms["matmul"] == pytest.approx(4 * one.terms["matmul"])
    assert four.terms["optimizer"] == pytest.approx(one.terms["optimizer"])
    assert 3.5 * one.step_seconds < four.step_seconds < 4 * one.step_seconds


@pytest.mark.parametrize(
    ("config", "bottleneck"),
    [
        ({"micro_batch_size": 1}, "launch"),
        ({"micro_batch_size": 64, **LIGER}, "compute"),
        ({"micro_batch_size": 64, **WIDE}, "bandwidth"),
    ],
)
def test_the_bottleneck_is_what_most_of_the_step_waits_for(
    config: dict[str, Any], bottleneck: str
) -> None:
    assert predict_step(make_config(**config), model=MISTRAL, gpu=H200).bottleneck == bottleneck


def test_what_has_no_rate_or_no_known_layers_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="t4 has no matrix rate for bf16"):
        predict_step(make_config(), model=MISTRAL, gpu=find_gpu("t4"))
    strange = replace(MISTRAL, name="mine", config=dict(MISTRAL.config, model_type="brand_new"))
    with pytest.raises(InputError, match=r"model 'mine'.*'brand_new'.*not known"):
        predict_step(make_config(), model=strange, gpu=H200)


def test_longer_rows_do_not_turn_an_a10_to_a_tenth_of_its_peak() -> None:
    # Published: 45-50 % at 512 falling below 10 % at 4096. The same tokens in longer rows only add
    # attention, a tenth of the work here.
    short, long = (
        predict_step(make_config(**shape), model=MISTRAL, gpu=find_gpu("a10"))
        for shape in ({"micro_batch_size": 8}, {"micro_batch_size": 1, "seq_len": 4096})
    )
    assert short.tokens_per_second * 0.85 < long.tokens_per_second < short.tokens_per_second
    assert long.flops_utilization > 0.9 * short.flops_utilization


ELSEWHERE: dict[Factor, float] = {
    **dict.fromkeys(FACTORS, 1.0),
    "matmul": 1.5,
    "lora": 1.2,
    "attention": 1.6,
    "elementwise": 1.25,
    "launch": 0.4,
}
"""A made-up GPU: power-limited, a little slow in memory, in a machine with a quick host."""


def measured_elsewhere() -> list[tuple[TrialConfig, float]]:
    truth = Calibration("h200", 1, ELSEWHERE, 0.0)
    predictions = predict_steps(grid(), model=MISTRAL, gpu=H200, calibration=truth)
    return [(c, one.step_seconds) for c, one in zip(grid(), predictions, strict=True)]


def grid() -> list[TrialConfig]:
    recipes: list[dict[str, Any]] = [{}, LIGER, WIDE, COMPILED, {"checkpoint_fraction": 0.0}]
    sizes = [(1, 512), (4, 512), (8, 512), (4, 2048), (16, 1024), (32, 512)]
    return [
        make_config(micro_batch_size=batch, seq_len=length, **recipe)
        for recipe in recipes
        for batch, length in sizes
    ]


def test_five_noisy_trials_bring_the_rest_of_an_unknown_card_within_five_percent() -> None:
    chance = random.Random(7)
    medians = []
    measured = measured_elsewhere()
    for _ in range(8):
        chosen = chance.sample(measured, k=len(measured))
        trials = [(c, seconds * chance.gauss(1.0, 0.01)) for c, seconds in chosen[:5]]
        calibration = calibrate(trials, model=MISTRAL, gpu=H200)
        assert min(calibration.factors.values()) >= 0.0
        assert calibration.trials == 5
        medians.append(statistics.median(relative_errors(chosen[5:], calibration)))
    assert statistics.median(medians) <= 0.03
    assert max(medians) <= 0.06


def test_trials_that_agree_with_the_prediction_change_nothing() -> None:
    trials = [(config, seconds(config)) for config in grid()[:5]]
    calibration = calibrate(trials, model=MISTRAL, gpu=H200)
    assert calibration.factors == pytest.approx(dict.fromkeys(FACTORS, 1.0), abs=1e-3)
    assert calibration.relative_error < 1e-3
    prediction = predict_step(grid()[6], model=MISTRAL, gpu=H200, calibration=calibration)
    assert (prediction.basis, prediction.trials) == ("calibrated", 5)


@settings(max_examples=25)
@given(config=CONFIGS, factor=st.floats(0.5, 2.0))
def test_one_trial_moves_its_own_prediction_most_of_the_way(
    config: TrialConfig, factor: float
) -> None:
    measured = seconds(config) * factor
    calibration = calibrate([(config, measured)], model=MISTRAL, gpu=H200)
    (error,) = relative_errors([(config, measured)], calibration)
    assert error <= 0.25 * abs(factor - 1.0) + 1e-3


def relative_errors(
    trials: Sequence[tuple[TrialConfig, float]], calibration: Calibration
) -> list[float]:
    configs = [config for config, _ in trials]
    predictions = predict_steps(configs, model=MISTRAL, gpu=H200, calibration=calibration)
    return [
        abs(prediction.step_seconds / measured - 1.0)
        for (_, measured), prediction in zip(trials, predictions, strict=True)
    ]
