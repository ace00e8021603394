"""Steps whose frozen layers multiply in 8 bits: physics that must hold, and steps of an H200."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from search_spaces.config import TrialConfig, parse_config
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec, find_gpu, gpu_catalogue
from search_spaces.models import load_model_spec
from sweep.predict.speed.predictor import (
    EIGHT_BIT_SPREAD,
    FACTORS,
    Calibration,
    SpeedPrediction,
    StepTimes,
    calibrate,
    ratio_spread,
)
from tests.sweep.predict.predicted_steps import predict_step
from tests.sweep.predict.rows import EIGHT_BIT, config_of, model_of

MISTRAL = load_model_spec("mistral-7b-v0.3")
H200 = find_gpu("h200")
FAST = {
    "kernels": "fused-loss",
    "upcast_fp32": False,
    "compile": True,
    "checkpoint_fraction": 0.0,
    "optimizer": "adamw_torch_fused",
    "double_quant": False,
    "micro_batch_size": 16,
}
BF16 = {"compute_dtype": "bf16", "quantization": "none"}
FP8 = {"compute_dtype": "fp8", "quantization": "fp8"}
INT8 = {"compute_dtype": "int8", "quantization": "int8"}


def config(**settings: Any) -> TrialConfig:
    return parse_config({**FAST, **settings})


def step(gpu: GpuSpec = H200, **settings: Any) -> SpeedPrediction:
    return predict_step(config(**settings), model=MISTRAL, gpu=gpu)


def test_steps_of_an_h200_are_met() -> None:
    """Rates and counts are those of a prototype, except launches of an eager product."""
    ratios = [
        row["step_seconds"]
        / predict_step(config_of(row), model=model_of(row), gpu=H200).step_seconds
        for row in EIGHT_BIT
    ]
    assert float(np.median(ratios)) == pytest.approx(1.03, abs=0.01)
    assert (min(ratios), max(ratios)) == pytest.approx((0.99, 1.17), abs=0.01)


@pytest.mark.parametrize("gpu", [g for g in gpu_catalogue().values() if "fp8" in g.peak_flops])
def test_fp8_is_faster_than_bf16_where_products_take_the_time(gpu: GpuSpec) -> None:
    assert step(gpu, **FP8).step_seconds < step(gpu, **BF16).step_seconds


def test_where_the_host_is_too_slow_8_bits_cost_launches() -> None:
    small = {"micro_batch_size": 1, "seq_len": 128, "compile": False}
    narrow, wide = (step(**kind, **small) for kind in (FP8, BF16))
    assert (narrow.bottleneck, wide.bottleneck) == ("launch", "launch")
    assert wide.step_seconds < narrow.step_seconds < 2 * wide.step_seconds


def test_head_adapters_and_attention_stay_in_16_bits() -> None:
    wide, narrow = step(**BF16).terms, step(**FP8).terms
    for term in ("lora", "attention", "elementwise", "loss", "optimizer"):
        assert narrow[term] == pytest.approx(wide[term])
    assert wide["eight_bit"] == 0.0
    assert 0.0 < narrow["matmul"] < 0.05 * wide["matmul"]


def test_recomputing_every_layer_makes_a_third_product_of_two() -> None:
    whole = {"checkpoint_fraction": 1.0}
    ratio = step(**FP8, **whole).terms["eight_bit"] / step(**FP8).terms["eight_bit"]
    assert ratio == pytest.approx(1.5, rel=0.05)


def test_what_weights_cost_follows_from_how_they_are_held_and_multiplied() -> None:
    def cost(compute_dtype: str, quantization: str) -> float:
        kind = {"compute_dtype": compute_dtype, "quantization": quantization}
        return step(**kind).terms["dequant"]

    # 8-bit weights are copied once, going back; in 16 bits they are expanded both ways.
    copied = cost("fp8", "fp8")
    assert cost("bf16", "fp8") == pytest.approx(3 * copied)
    assert copied < cost("fp8", "nf4") < cost("bf16", "nf4") < cost("bf16", "fp8")
    assert cost("int8", "int8") == copied
    assert cost("bf16", "none") == 0.0


def test_sums_of_integers_cost_more_to_bring_back() -> None:
    same = H200.model_copy(update={"matrix_flops": {**H200.matrix_flops, "int8": 1.57e15}})
    assert step(same, **INT8).step_seconds > step(same, **FP8).step_seconds


def test_a_gpu_without_a_rate_for_it_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="a10 has no matrix rate for fp8"):
        step(find_gpu("a10"), **FP8)
    assert step(find_gpu("t4"), **INT8).terms["matmul"] > 0.0


def test_it_is_less_sure_where_no_training_in_8_bits_was_measured() -> None:
    a10 = find_gpu("a10")
    assert step(a10, **INT8).uncertainty > 1.1 * step(a10, **BF16).uncertainty
    assert step(**INT8).uncertainty < 1.1 * step(**BF16).uncertainty


def test_trials_in_8_bits_make_it_as_sure_as_any_and_those_in_16_do_not() -> None:
    a10 = find_gpu("a10")

    def after(kind: dict[str, Any]) -> SpeedPrediction:
        trials = [config(**kind, micro_batch_size=n) for n in (4, 8, 16)]
        seconds = StepTimes(trials, model=MISTRAL, gpu=a10).seconds.tolist()
        known = calibrate(list(zip(trials, seconds, strict=True)), model=MISTRAL, gpu=a10)
        return predict_step(config(**INT8), model=MISTRAL, gpu=a10, calibration=known)

    assert after(INT8).uncertainty < 0.15 < after(BF16).uncertainty


def test_a_ratio_of_two_classes_is_surer_than_the_speeds_of_either() -> None:
    l4, configs = find_gpu("l4"), (config(**FP8), config(**BF16))
    spread = ratio_spread(*configs, model=MISTRAL, gpu=l4)
    assert ratio_spread(*configs, model=MISTRAL, gpu=H200) < spread < EIGHT_BIT_SPREAD
    assert ratio_spread(configs[0], configs[0], model=MISTRAL, gpu=l4) == 0.0
    ends = math.exp(1.645 * spread)
    assert ends - 1.0 < step(l4, **FP8).uncertainty


GAINS = {
    ("a10", "int8"): (1.5, 0.9, 2.3),
    ("a100-40gb", "int8"): (1.4, 0.9, 2.2),
    ("rtx-3090", "int8"): (2.4, 1.5, 3.6),
    ("rtx-4090", "int8"): (1.9, 1.3, 2.8),
    ("rtx-4090", "fp8"): (1.6, 1.1, 2.5),
    ("l4", "fp8"): (1.5, 1.0, 2.3),
    ("l40s", "fp8"): (1.5, 1.0, 2.2),
    ("h100-80gb", "fp8"): (1.5, 1.0, 2.3),
    ("h200", "fp8"): (1.6, 1.3, 1.9),
}
"""What docs/speed.md says that 8 bits are expected to bring, and between what."""


@pytest.mark.parametrize(("gpu", "kind"), GAINS)
def test_what_8_bits_are_expected_to_bring_is_as_the_page_says(gpu: str, kind: str) -> None:
    card = find_gpu(gpu)
    narrow = config(compute_dtype=kind, quantization=kind)
    wide = config(quantization="nf4", double_quant=True)
    speeds = [predict_step(c, model=MISTRAL, gpu=card).tokens_per_second for c in (narrow, wide)]
    doubt = math.exp(1.645 * ratio_spread(narrow, wide, model=MISTRAL, gpu=card))
    ratio = speeds[0] / speeds[1]
    assert (ratio, ratio / doubt, ratio * doubt) == pytest.approx(GAINS[gpu, kind], abs=0.06)


def test_the_stated_spread_is_that_of_the_published_rates() -> None:
    """docs/speed.md has their sources; each is over what 16 bits and the data sheet imply."""
    fp8 = [3432.5 / 4500 / (1696 / 2250), 1570 / 1979 / (790 / 989), 1453.4 / 1979 / (790 / 989)]
    fp8 += [1125.5 / (2 * 585.2), 388.9 / 419 / (237 / 209.5), 580.4 / (2 * 433)]
    int8 = [1100 / 1979 / (790 / 989), 247 / (2 * 267)]
    assert math.sqrt(np.mean(np.log(fp8 + int8) ** 2)) == pytest.approx(EIGHT_BIT_SPREAD, abs=0.01)


def test_products_in_8_bits_have_a_factor_of_their_own() -> None:
    slow = Calibration("h200", 1, {f: 2.0 if f == "eight_bit" else 1.0 for f in FACTORS}, 0.0)
    wide, narrow = (
        predict_step(config(**kind), model=MISTRAL, gpu=H200, calibration=slow).step_seconds
        / step(**kind).step_seconds
        for kind in (BF16, FP8)
    )
    assert wide == 1.0
    assert 1.5 < narrow < 2.0
