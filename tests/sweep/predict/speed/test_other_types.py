"""Steps of model types whose layers are read off a walk of the model's code."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.linears import linear_shapes, types
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec, shipped_models
from qlora_sweep.search_spaces.rules import attention_of
from qlora_sweep.sweep.predict.memory.profile_store import trace_layers
from qlora_sweep.sweep.predict.speed import layers as known_layers
from qlora_sweep.sweep.predict.speed.kernels import BYTES, FLOPS, LAUNCHES, KernelShapes
from qlora_sweep.sweep.predict.speed.layers import DeltaRule, Layers, from_json, layers_of
from qlora_sweep.sweep.predict.speed.predictor import TYPE_SPREAD, StepTimes, calibrate
from qlora_sweep.sweep.predict.speed.steps import TERMS, layers_refusal, micro_batches
from tests.families import FAMILIES, spec_of
from tests.sweep.predict.rows import NEW_MODELS, config_of, model_of
from tests.sweep.predict.speed.stated_speeds import steps

H200, A100 = find_gpu("h200"), find_gpu("a100-80gb")
UNMODELLED = types("granitemoehybrid falcon_h1 jamba bamba recurrent_gemma")
"""Families with a state space, whose kernels are not modelled."""
QWEN, GPT_OSS = load_model_spec("qwen3-30b-a3b"), load_model_spec("gpt-oss-20b")
PLAIN: dict[str, Any] = {"quantization": "none", "double_quant": False, "upcast_fp32": False}
KNOWN = {
    "llama-3.1-8b": (0.01, 0.02),
    # Norms of queries and of keys are counted as one: half of their launches.
    "qwen3-8b": (0.01, 0.1),
    "gemma-3-4b": (0.03, 0.16),
    # A fused matrix's gradient is put together of its parts, which is not counted.
    "phi-4": (0.07, 0.06),
    # Every fourth layer has no rotary positions, which is not counted either.
    "smollm3-3b": (0.03, 0.05),
}
"""How far a walk's bytes and launches may be from those of the type as it is known."""


def walked(model: ModelSpec) -> tuple[Layers, ...]:
    return from_json(trace_layers(model))


def seconds(model: ModelSpec, gpu: Any = H200, **settings: Any) -> float:
    config = TrialConfig(**{"attention": attention_of(model), **PLAIN, **settings})
    return float(StepTimes([config], model=model, gpu=gpu, evidence=None).seconds[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_speed_or_a_reason_in_words(family: str) -> None:
    model = spec_of(family)
    config = TrialConfig(attention=attention_of(model), seq_len=64, **PLAIN)
    times = StepTimes([config], model=model, gpu=H200, evidence=None)
    prediction = times.prediction(0)
    if family in UNMODELLED:
        assert isinstance(prediction, InputError)
        assert f"'{family}' are not known: " in str(prediction)
        assert "not modelled" in str(prediction)
        return
    assert not isinstance(prediction, InputError)
    assert prediction.step_seconds > 0
    assert sum(kind.count for kind in layers_of(model)) == model.hidden_layers  # type: ignore[union-attr]
    is_measured = linear_shapes(model) is not None
    assert (times.type_spread[0] == 0.0) == is_measured


@pytest.mark.parametrize("name", KNOWN)
def test_a_walk_of_a_known_type_finds_what_is_known_of_it(name: str) -> None:
    model = load_model_spec(name)
    found, known = walked(model), layers_of(model)
    assert not isinstance(known, InputError)
    assert sum(kind.count for kind in found) == known[0].count
    ends = {path.rpartition(".")[2]: shape for path, shape in found[0].linears.items()}
    assert ends == known[0].linears
    configs = [
        TrialConfig(**settings, seq_len=1024)
        for settings in (
            {},
            {"kernels": "liger", "upcast_fp32": False, "checkpoint_fraction": 0.0},
            {"compile": True, "target_modules": "all-linear", "lora_rank": 64},
            {**PLAIN, "attention": "eager"},
        )
    ]
    one, other = (
        micro_batches(
            [KernelShapes(configs, model, kinds=kinds, at=at) for at in range(len(kinds))]
        )
        for kinds in (found, known)
    )
    totals, expected = one.sum(axis=0), other.sum(axis=0)
    assert totals[FLOPS] == pytest.approx(expected[FLOPS], rel=1e-9)
    bytes_within, launches_within = KNOWN[name]
    assert totals[BYTES] == pytest.approx(expected[BYTES], rel=bytes_within)
    assert totals[LAUNCHES] == pytest.approx(expected[LAUNCHES], rel=launches_within)


def test_shipped_layers_are_what_is_walked() -> None:
    shipped = json.loads(known_layers.SHIPPED.read_text(encoding="utf-8"))
    models = {model.fingerprint: model for model in shipped_models()}
    assert shipped.keys() == {
        fingerprint for fingerprint, model in models.items() if linear_shapes(model) is None
    }
    for fingerprint, layers in shipped.items():
        assert trace_layers(models[fingerprint]) == layers


def test_of_experts_those_that_run_are_multiplied_by() -> None:
    (qwen,), (gpt_oss,) = layers_of(QWEN), layers_of(GPT_OSS)  # type: ignore[misc]
    # Without the embedding and the head: 8 of 128 experts, 4 of 32.
    assert 48 * qwen.frozen_weights == pytest.approx(2.73e9, rel=0.01)
    assert 24 * gpt_oss.frozen_weights == pytest.approx(3.03e9, rel=0.01)
    for model, key in ((QWEN, "num_experts_per_tok"), (GPT_OSS, "num_experts_per_tok")):
        twice = replace(model, config={**model.config, key: 2 * model.config[key]})
        once, more = (seconds(each, micro_batch_size=16, seq_len=1024) for each in (model, twice))
        assert 1.2 < more / once < 2.0


def test_without_a_kernel_for_all_experts_the_host_launches_each() -> None:
    configs = [TrialConfig(**PLAIN), TrialConfig(**PLAIN, compute_dtype="fp16")]
    fast, slow = (StepTimes(configs, model=QWEN, gpu=gpu, evidence=None) for gpu in (H200, A100))
    launches = fast.phases.launch.sum(axis=1) / H200.launch_seconds
    assert launches[1] > 1.5 * launches[0]
    assert slow.phases.launch.sum(axis=1)[0] / A100.launch_seconds > 1.5 * launches[0]
    assert slow.type_spread[0] > fast.type_spread[0] > TYPE_SPREAD


def test_a_step_takes_as_long_as_what_comes_from_the_host() -> None:
    """Where little is computed the link decides, where much is it hides."""
    nf4: dict[str, Any] = {**PLAIN, "quantization": "nf4"}
    size: dict[str, Any] = {**nf4, "micro_batch_size": 1, "seq_len": 64, "compile": True}
    weights = 48 * 128 * 3 * 2048 * 768
    layers = 48 - 2
    sent = 2 * weights / 48 * layers * (0.5 + 4 / 64)
    little = seconds(QWEN, **size, offload_fraction=1.0)
    assert little > sent / H200.host_bytes_per_second
    assert seconds(QWEN, find_gpu("a10"), **size, offload_fraction=1.0) > 1.5 * little
    half = seconds(QWEN, **size, offload_fraction=0.5)
    assert seconds(QWEN, **size) < half < little
    much: dict[str, Any] = {**nf4, "micro_batch_size": 64, "seq_len": 2048}
    assert seconds(QWEN, **much, offload_fraction=1.0) < 1.02 * seconds(QWEN, **much)
    accumulated = {**size, "effective_batch_size": 4}
    four = seconds(QWEN, **accumulated, offload_fraction=1.0)
    assert four - seconds(QWEN, **accumulated) == pytest.approx(
        4 * (little - seconds(QWEN, **size)), rel=0.1
    )


def test_experts_in_8_bits_are_decoded_from_a_byte() -> None:
    size: dict[str, Any] = {"micro_batch_size": 8, "seq_len": 512, "compile": True}
    wide, narrow = (
        seconds(QWEN, **{**PLAIN, **size, "quantization": kind}) for kind in ("none", "int8")
    )
    assert wide < narrow < 1.5 * wide


def test_adapters_on_experts_have_no_speed_but_a_reason() -> None:
    everywhere = TrialConfig(**PLAIN, target_modules="all-linear")
    assert "adapters on experts" in str(layers_refusal(everywhere, QWEN))
    assert layers_refusal(everywhere, GPT_OSS) is None
    times = StepTimes([everywhere, TrialConfig(**PLAIN)], model=QWEN, gpu=H200, evidence=None)
    assert times.is_known.tolist() == [False, True]


def test_measured_steps_of_mixtures_are_in_their_intervals() -> None:
    rows = [row for row in NEW_MODELS if row["model"] in (QWEN.name, GPT_OSS.name)]
    assert len(rows) == 6
    logs = []
    for row in rows:
        times = StepTimes([config_of(row)], model=model_of(row), gpu=H200, evidence=None)
        found = times.prediction(0)
        assert not isinstance(found, InputError)
        low, high = found.step_estimate.ends
        assert low < row["step_seconds"] < high
        logs.append(math.log(row["step_seconds"] / found.step_seconds))
    # Other work ran on the host: all of them are flagged.
    assert statistics.median(map(abs, logs)) < 0.2


@pytest.mark.integration
def test_the_spread_of_types_is_what_known_ones_are_apart() -> None:
    sessions: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step in steps():
        times = step.times(find_gpu(step.gpu).speed)
        if step.config.is_on_pairs or step.config.is_8bit_compute or times.host_shares[0] > 0.5:
            continue
        off = math.log(step.seconds / float(times.seconds[0]))
        sessions[step.gpu, step.source][step.model.model_type].append(off)
    several = [of for of in sessions.values() if len(of) > 1]
    means = [np.array([statistics.fmean(each) for each in of.values()]) for of in several]
    apart = np.concatenate([mean - mean.mean() for mean in means])
    freedom = len(apart) - len(several)
    spread = math.sqrt(float(apart @ apart) / freedom)
    # The chi-squared distribution's lower twentieth (Wilson and Hilferty).
    lower = freedom * (1 - 2 / (9 * freedom) - 1.645 * math.sqrt(2 / (9 * freedom))) ** 3
    assert spread * math.sqrt(freedom / lower) == pytest.approx(TYPE_SPREAD, abs=0.01)


def test_trials_of_a_model_narrow_what_its_type_leaves_open() -> None:
    sizes = [(2, 512), (8, 512), (4, 1024), (8, 1024), (4, 2048)]
    configs = [TrialConfig(**PLAIN, micro_batch_size=b, seq_len=s) for b, s in sizes]
    seconds = 1.4 * StepTimes(configs, model=QWEN, gpu=H200, evidence=None).seconds
    known = calibrate(list(zip(configs, seconds.tolist(), strict=True)), model=QWEN, gpu=H200)
    other = [TrialConfig(**PLAIN, micro_batch_size=16, seq_len=1024)]
    after = StepTimes(other, model=QWEN, gpu=H200, calibration=known, evidence=None)
    fresh = StepTimes(other, model=QWEN, gpu=H200, evidence=None)
    assert after.seconds[0] / fresh.seconds[0] == pytest.approx(1.4, rel=0.1)
    assert after.log_spread[0] < 0.5 * fresh.log_spread[0]


def test_layers_before_the_first_adapter_take_no_backward_pass() -> None:
    """Of a hybrid, whose first layers do not attend."""
    model = spec_of("qwen3_5_text")
    (linear, _) = layers_of(model)  # type: ignore[misc]
    assert linear.places == (0, 1, 2)
    assert linear.recurrent == (DeltaRule(heads=4, keys=32, values=32),)
    configs = [
        TrialConfig(target_modules=targets, seq_len=1024, **PLAIN)
        for targets in ("qv", ("q_proj", "in_proj_z"))
    ]
    kinds = layers_of(model)
    assert not isinstance(kinds, InputError)
    before = [KernelShapes(configs, model, kinds=kinds, at=at).before.tolist() for at in (0, 1)]
    assert before == [[3.0, 0.0], [0.0, 0.0]]
    few, all_of_them = micro_batches(
        [KernelShapes(configs, model, kinds=kinds, at=at) for at in (0, 1)]
    )[TERMS.index("attention"), FLOPS]
    assert few < 0.6 * all_of_them
