"""Step times of many configurations at once: each is what it is alone, under any calibration."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import GpuSpec, Interconnect, find_gpu, gpu_catalogue
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.predict.speed.kernels import MASKED_DOUBT, KernelShapes, attention
from qlora_sweep.sweep.predict.speed.predictor import (
    FACTORS,
    Calibration,
    SpeedPrediction,
    StepTimes,
    calibrate,
    ratio_spread,
)
from qlora_sweep.sweep.predict.speed.steps import ATTENTION_EFFICIENCY, ELEMENTWISE_EFFICIENCY
from tests.sweep.predict.mixed_space import mixed_configs
from tests.sweep.predict.predicted_steps import predict_step
from tests.sweep.predict.rows import EIGHT_BIT, SEVERAL_GPUS, config_of, describe, model_of
from tests.tables import cases

MISTRAL = load_model_spec("mistral-7b-v0.3")
H200 = find_gpu("h200")
CALIBRATION = Calibration("a10", 7, {f: 0.7 + 0.1 * i for i, f in enumerate(FACTORS)}, 0.02)


@pytest.mark.parametrize("calibration", [None, CALIBRATION])
def test_each_of_many_configurations_takes_as_long_as_it_does_alone(
    calibration: Calibration | None,
) -> None:
    configs = [
        *mixed_configs(40),
        *mixed_configs(15, compute_dtype="int8", quantization="int8"),
    ]
    known: dict[str, Any] = {
        "model": load_model_spec("qwen3-8b"),
        "gpu": find_gpu("t4"),
        "calibration": calibration,
    }
    times = StepTimes(configs, **known)
    for row, config in enumerate(configs):
        try:
            alone = predict_step(config, **known)
        except InputError:
            assert math.isnan(times.seconds[row])
            assert math.isnan(times.log_spread[row])
            continue
        assert times.seconds[row] == pytest.approx(alone.step_seconds, rel=1e-9)
        assert times.log_spread[row] == pytest.approx(alone.log_spread, rel=1e-9)
        assert sum(alone.terms.values()) == pytest.approx(alone.step_seconds, rel=1e-9)
        assert min(alone.terms.values()) >= 0.0


# What GPUs that train together wait for each other: physics that must hold

LEAN = {
    "micro_batch_size": 8,
    "upcast_fp32": False,
    "kernels": "liger",
    "optimizer": "adamw_torch_fused",
}
SHARDED = {**LEAN, "sharding": "fsdp"}


def predicted(gpu: GpuSpec = H200, **settings: Any) -> SpeedPrediction:
    return predict_step(parse_config(settings), model=MISTRAL, gpu=gpu)


def step(gpu: GpuSpec, **settings: Any) -> SpeedPrediction:
    return predicted(gpu, **{**LEAN, **settings})


def linked(gpu: GpuSpec, bytes_per_second: float) -> GpuSpec:
    link = Interconnect(kind="pcie", bytes_per_second=bytes_per_second)
    return gpu.model_copy(update={"interconnect": link})


@pytest.mark.parametrize(("name", "gpus"), [("a10", 2), ("h200", 4)])
def test_gpus_that_hold_the_model_each_are_nearly_as_fast(name: str, gpus: int) -> None:
    alone, together = step(find_gpu(name)), step(find_gpu(name), data_parallel=gpus)
    ratio = together.tokens_per_second / alone.tokens_per_second
    assert 0.9 * gpus < ratio < gpus
    assert together.log_spread > alone.log_spread


def test_what_gpus_share_takes_time_and_that_and_a_mask_is_stated_less_surely() -> None:
    gpu = linked(find_gpu("h200"), 1e10)
    whole, shared = (step(gpu, **settings, data_parallel=2) for settings in ({}, SHARDED))
    assert shared.step_seconds > whole.step_seconds
    assert shared.log_spread > whole.log_spread + 0.02
    plain, masked = (
        step(find_gpu("a10"), packing=packing, seq_len=1024) for packing in ("none", "packed")
    )
    assert masked.step_seconds > plain.step_seconds
    assert masked.log_spread > plain.log_spread


@pytest.mark.parametrize("settings", [{}, SHARDED], ids=str)
def test_a_slower_link_never_makes_a_step_shorter(settings: dict[str, Any]) -> None:
    gpus = [linked(find_gpu("a10"), rate) for rate in (1e8, 1e9, 1e10, 1e11)]
    times = [step(gpu, **settings, data_parallel=2).step_seconds for gpu in gpus]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_what_two_gpus_took_is_within_what_is_stated_of_them() -> None:
    for row in (row for row in SEVERAL_GPUS if row["gpus"] > 1):
        config, gpu = config_of(row), find_gpu("h200")
        found = predict_step(config, model=model_of(row), gpu=gpu)
        low, high = found.step_estimate.ends
        assert low < row["step_seconds"] < high, describe(row)


def test_the_host_is_busy_with_what_it_gathers_and_one_gpu_waits_for_none() -> None:
    # Measured on two H200: 0.65 s a step, of which the GPU computes a tenth.
    small = {**SHARDED, "micro_batch_size": 1, "data_parallel": 2}
    assert step(find_gpu("h200"), **small).bottleneck == "launch"
    gpu = find_gpu("a10")
    assert step(gpu).step_seconds == step(linked(gpu, 1.0)).step_seconds
    # A DGX Spark has one, and the next one is in another.
    alone = {spec.name for spec in gpu_catalogue().values() if spec.interconnect is None}
    assert alone == {"gb10"}


# Steps whose frozen layers multiply in 8 bits: physics that must hold, and steps of an H200

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


def fast_step(gpu: GpuSpec = H200, **settings: Any) -> SpeedPrediction:
    return predicted(gpu, **{**FAST, **settings})


def test_steps_of_an_h200_are_met() -> None:
    """Rates and counts are those of a prototype, except launches of an eager product."""
    ratios = [
        row["step_seconds"]
        / predict_step(config_of(row), model=model_of(row), gpu=H200).step_seconds
        for row in EIGHT_BIT
    ]
    assert float(np.median(ratios)) == pytest.approx(1.015, abs=0.015)
    assert (min(ratios), max(ratios)) == pytest.approx((0.96, 1.15), abs=0.01)


@pytest.mark.parametrize("gpu", [g for g in gpu_catalogue().values() if "fp8" in g.peak_flops])
def test_fp8_is_faster_than_bf16_where_products_take_the_time(gpu: GpuSpec) -> None:
    assert fast_step(gpu, **FP8).step_seconds < fast_step(gpu, **BF16).step_seconds


def test_it_is_less_sure_where_no_training_in_8_bits_was_measured() -> None:
    a10 = find_gpu("a10")
    assert fast_step(a10, **INT8).log_spread > 1.1 * fast_step(a10, **BF16).log_spread
    assert fast_step(**INT8).log_spread < 1.1 * fast_step(**BF16).log_spread


def test_trials_in_8_bits_make_it_as_sure_as_any_and_those_in_16_do_not() -> None:
    a10 = find_gpu("a10")

    def after(kind: dict[str, Any]) -> SpeedPrediction:
        trials = [config(**kind, micro_batch_size=n) for n in (4, 8, 16)]
        seconds = StepTimes(trials, model=MISTRAL, gpu=a10).seconds.tolist()
        known = calibrate(list(zip(trials, seconds, strict=True)), model=MISTRAL, gpu=a10)
        return predict_step(config(**INT8), model=MISTRAL, gpu=a10, calibration=known)

    assert after(INT8).log_spread < 0.09 < after(BF16).log_spread


def ratio_is_off(one: TrialConfig, other: TrialConfig, gpu: GpuSpec) -> float:
    times = StepTimes([one, other], model=MISTRAL, gpu=gpu)
    return ratio_spread(*times.slopes(np.zeros(len(FACTORS)), slice(None)), gpu=gpu)


GAINS = """
a10 | int8 | [1.5, 0.9, 2.3]
a100-40gb | int8 | [1.4, 0.9, 2.2]
rtx-3090 | int8 | [2.3, 1.5, 3.4]
rtx-4090 | int8 | [1.8, 1.2, 2.6]
rtx-4090 | fp8 | [1.6, 1.1, 2.4]
l4 | fp8 | [1.5, 1.0, 2.3]
l40s | fp8 | [1.5, 1.0, 2.2]
h100-80gb | fp8 | [1.5, 1.0, 2.3]
h200 | fp8 | [1.6, 1.3, 1.9]
"""
"""What docs/lab/speed.md says that 8 bits are expected to bring, and between what."""


@pytest.mark.parametrize(("gpu", "kind", "gains"), cases(GAINS))
def test_what_8_bits_are_expected_to_bring_is_as_the_page_says(
    gpu: str, kind: str, gains: list[float]
) -> None:
    gpu_spec = find_gpu(gpu)
    narrow = config(compute_dtype=kind, quantization=kind)
    wide = config(quantization="nf4", double_quant=True)
    speeds = [
        predict_step(c, model=MISTRAL, gpu=gpu_spec).tokens_per_second for c in (narrow, wide)
    ]
    doubt = math.exp(1.645 * ratio_is_off(narrow, wide, gpu_spec))
    ratio = speeds[0] / speeds[1]
    assert [ratio, ratio / doubt, ratio * doubt] == pytest.approx(gains, abs=0.06)


# The mask that keeps packed texts apart costs what was measured of it on a GPU

MEASURED = Path(__file__).parents[3] / "bench" / "results" / "masked_attention.json"
LONG = 4096
"""Tokens; of shorter rows the host's launches are most of what is measured."""


def _seconds(model: str, rows: int, packing: str) -> float:
    config = TrialConfig(micro_batch_size=rows, seq_len=LONG, packing=packing)  # type: ignore[arg-type]
    gpu = find_gpu("h200")
    matrix = gpu.matrix_rate("bf16")
    assert matrix is not None
    forward, backward = attention(KernelShapes([config], load_model_spec(model)))
    flops, moved, _ = (forward + backward)[:, 0].tolist()
    memory = gpu.copy_rate * ELEMENTWISE_EFFICIENCY
    return float(flops / (matrix * ATTENTION_EFFICIENCY) + moved / memory)


def test_a_mask_slows_attention_as_it_was_measured_to() -> None:
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    errors = []
    for row in (row for row in rows if row["length"] == LONG):
        measured = row["masked"]["both"] / row["plain"]["both"]
        model, batch = row["model"], row["rows"]
        predicted = _seconds(model, batch, "packed") / _seconds(model, batch, "none")
        errors.append(predicted / measured - 1.0)
        assert abs(errors[-1]) < MASKED_DOUBT
    assert statistics.fmean(errors) == pytest.approx(0.0, abs=0.1)


# Behaviour of the speed prediction: physics that must hold, accuracy against measured steps


EIGHT_BITS = (("int8", "int8"), ("fp8", "fp8"), ("fp8", "nf4"))
DRAWN = [
    config.model_copy(update={"effective_batch_size": None})
    for config in (
        *mixed_configs(80),
        *mixed_configs(20, quantized_fraction=0.7),
        *(c for d, q in EIGHT_BITS for c in mixed_configs(20, compute_dtype=d, quantization=q)),
    )
]
"""Over all settings, 8-bit compute and partly quantized bases among them."""


def all_seconds(configs: Sequence[TrialConfig]) -> Any:
    return StepTimes(configs, model=MISTRAL, gpu=H200).seconds


@pytest.mark.parametrize("more", [1, 2, 8])
@pytest.mark.parametrize("key", ["micro_batch_size", "seq_len"])
def test_more_tokens_never_make_a_step_shorter(key: str, more: int) -> None:
    larger = [c.model_copy(update={key: getattr(c, key) + more}) for c in DRAWN]
    assert (all_seconds(larger) >= all_seconds(DRAWN)).all()


@pytest.mark.parametrize("more", [0.01, 0.05, 0.1])
def test_recomputing_never_makes_a_step_shorter(more: float) -> None:
    fewer = [c for c in DRAWN if c.checkpoint_fraction < 0.9]
    update = [{"checkpoint_fraction": c.checkpoint_fraction + more} for c in fewer]
    recomputed = [c.model_copy(update=keys) for c, keys in zip(fewer, update, strict=True)]
    assert (all_seconds(recomputed) >= all_seconds(fewer)).all()


@pytest.mark.parametrize(
    ("slower", "faster"),
    cases(
        """
        {upcast_fp32: true} | {upcast_fp32: false}
        {kernels: hf} | {kernels: liger}
        {attention: eager} | {attention: sdpa}
        {lora_dropout: 0.1} | {lora_dropout: 0.0}
        {target_modules: all-linear} | {target_modules: qv}
        {compute_dtype: fp16} | {compute_dtype: bf16}
        {} | {quantized_fraction: 0.75, upcast_fp32: false}
        {adapter_dtype: fp32} | {adapter_dtype: bf16}
        {quantization: nf4} | {quantization: none, upcast_fp32: true}
        """
    ),
)
def test_more_work_costs_time(slower: dict[str, Any], faster: dict[str, Any]) -> None:
    assert predicted(**slower).step_seconds > predicted(**faster).step_seconds


@pytest.mark.parametrize(
    ("config", "bottleneck"),
    cases(
        """
        {micro_batch_size: 1} | launch
        {micro_batch_size: 64, kernels: liger, upcast_fp32: false} | compute
        {micro_batch_size: 64, lora_rank: 64, target_modules: all-linear} | bandwidth
        """
    ),
)
def test_the_bottleneck_is_what_a_step_waits_for(config: dict[str, Any], bottleneck: str) -> None:
    assert predicted(**config).bottleneck == bottleneck


def test_what_has_no_rate_or_no_known_layers_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="t4 has no matrix rate for bf16"):
        predicted(find_gpu("t4"))
    strange = replace(MISTRAL, name="mine", config=dict(MISTRAL.config, model_type="brand_new"))
    with pytest.raises(InputError, match=r"'brand_new'.*not known"):
        predict_step(TrialConfig(), model=strange, gpu=H200)


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.3, 2.0])
def test_one_trial_moves_its_prediction_most_of_the_way(factor: float) -> None:
    configs = DRAWN[::12]
    for config, before in zip(configs, all_seconds(configs).tolist(), strict=True):
        known = calibrate([(config, factor * before)], model=MISTRAL, gpu=H200)
        after = predict_step(config, model=MISTRAL, gpu=H200, calibration=known)
        error = abs(after.step_seconds / (factor * before) - 1.0)
        assert error <= 0.25 * abs(factor - 1.0) + 1e-3
        assert (after.basis, after.trials) == ("calibrated", 1)
