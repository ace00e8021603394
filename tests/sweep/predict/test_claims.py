"""Published advice held against the predictors, case by case (`docs/lab/claims.md` has the prose).

What a published step or sample rate costs is in `test_claims_costs.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.gpus import GIB, find_gpu
from qlora_sweep.search_spaces.linears import lora_parameters
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.predict.memory.predictor import Fit, MemoryPrediction
from tests.sweep.predict.predicted_steps import predict_step
from tests.sweep.predict.rows import TABLE, config_of
from tests.tables import cases

MISTRAL = "mistral-7b-v0.3"
WIDE = {"lora_rank": 64, "target_modules": "all-linear"}
PUBLISHED = {"micro_batch_size": 4, "seq_len": 2048, "effective_batch_size": 16}
GIGABYTE = 10**9

Predict = Callable[..., MemoryPrediction]


def recipe(**keys: Any) -> TrialConfig:
    """The standard recipe at 8 x 512, but for ``keys``."""
    return parse_config({"micro_batch_size": 8, "seq_len": 512, **keys})


@pytest.fixture
def predict(predictor: Any) -> Predict:
    """Predict a configuration of a model, by name, on a GPU of the catalogue."""

    def predicted(model: str, gpu: str, config: TrialConfig) -> MemoryPrediction:
        spec = load_model_spec(model)
        return predictor(spec, find_gpu(gpu).compute_capability).predict(config)

    return predicted


def measured(config: TrialConfig, model: str = MISTRAL) -> dict[str, Any]:
    """The row that an H200 measured for exactly this configuration."""
    (row,) = (r for r in TABLE if r["model"] == model and config_of(r) == config)
    return row


@pytest.mark.parametrize(
    ("config", "claimed_gb", "measured_gb"),
    [
        (recipe(), 20.0, 8.92),
        (recipe(micro_batch_size=4, checkpoint_fraction=0.0), 29.0, 22.32),
        (recipe(**WIDE), 11.0, 10.00),
    ],
    ids=["8 x 512", "no checkpointing", "rank 64 on all layers"],
)
def test_memory_is_what_was_measured_and_below_what_was_claimed(
    predict: Predict, config: TrialConfig, claimed_gb: float, measured_gb: float
) -> None:
    truth = measured(config)["peak_allocated_bytes"]
    assert truth / GIGABYTE == pytest.approx(measured_gb, abs=0.01)
    assert predict(MISTRAL, "h200", config).peak_allocated_bytes == pytest.approx(truth, rel=0.01)
    assert measured_gb < claimed_gb


FITS = """
# An A10: 12 x 512 was to run out of memory, and 1024 to allow four rows at most.
mistral-7b-v0.3 | a10 | | {micro_batch_size: 12} | 10.04 | true
mistral-7b-v0.3 | a10 | | {seq_len: 1024} | 11.82 | true
mistral-7b-v0.3 | a10 | | {checkpoint_fraction: 0.0} | 36.76 | false
# An A100 of 40 GB: eight rows of 2048 were not to fit, MLP targets to be close to it.
mistral-7b-v0.3 | a100-40gb | published | {target_modules: all-linear, lora_dropout: 0.05}
    | 12.57 | true
# An A10G: the recipe does not fit as published, and does with less.
llama-3.1-8b | a10g | published | {target_modules: qv} | 24.20 | false
llama-3.1-8b | a10g | published | {target_modules: qv, kernels: liger, upcast_fp32: false}
    | 8.68 | true
# A T4 was not to hold eight rows, and an A10 13 B at four rows at most.
mistral-7b-v0.3 | t4 | | {compute_dtype: fp16, seq_len: 2048} | 29.83 | false
llama-2-13b | a10 | | {seq_len: 2048} | 26.80 | false
"""


@pytest.mark.parametrize(("model", "gpu", "base", "keys", "peak_gib", "fits"), cases(FITS))
def test_what_was_said_to_fit_or_not(
    predict: Predict,
    model: str,
    gpu: str,
    base: str | None,
    keys: dict[str, Any],
    peak_gib: float,
    fits: bool,
) -> None:
    if base == "published":
        keys = PUBLISHED | keys
    prediction = predict(model, gpu, recipe(**keys))
    assert prediction.peak_allocated_bytes / GIB == pytest.approx(peak_gib, rel=0.01)
    assert prediction.fits(find_gpu(gpu).budget_bytes) is (Fit.YES if fits else Fit.NO)


def test_what_single_settings_cost_was_measured_and_is_predicted(predict: Predict) -> None:
    def peak(config: TrialConfig) -> int:
        return predict(MISTRAL, "h200", config).peak_allocated_bytes

    whole, base = recipe(), measured(recipe())
    # Double quantization saves a third of a gibibyte.
    once = recipe(double_quant=False)
    saved = measured(once)["base_bytes"] - base["base_bytes"]
    assert saved == 354_992_128
    assert peak(once) - peak(whole) == pytest.approx(saved, rel=0.01)
    # fp16 costs time and no memory.
    fp16 = recipe(compute_dtype="fp16")
    assert 1.08 <= measured(fp16)["step_seconds"] / base["step_seconds"] <= 1.12
    assert peak(fp16) == pytest.approx(peak(whole), rel=1e-4)
    # A paged optimizer saves nothing where the update is not the peak.
    paged = measured(recipe(optimizer="paged_adamw_8bit"))
    assert paged["peak_allocated_bytes"] == base["peak_allocated_bytes"]
    assert base["stage_peaks"]["optimizer"] < 0.6 * base["peak_allocated_bytes"]
    assert paged["step_seconds"] == pytest.approx(base["step_seconds"], rel=0.03)
    assert predict(MISTRAL, "h200", config_of(paged)).moment != "optimizer"


@pytest.mark.parametrize(
    ("keys", "ours"),
    [
        # Published as 8.4 M, with keys and values for as wide as queries, and as 33,554,432.
        ({"lora_rank": 8}, 6_815_744),
        (WIDE, 167_772_160),
    ],
)
def test_parameters_of_grouped_queries(keys: dict[str, Any], ours: int) -> None:
    assert lora_parameters(recipe(**keys), load_model_spec(MISTRAL)) == ours


@pytest.mark.parametrize(
    ("model", "gpu", "keys", "published_seconds", "utilization"),
    cases(
        """
        # As an optimizer step, each of these would need more than every FLOP of the GPU.
        mistral-7b-v0.3 | a100-40gb | {micro_batch_size: 4, seq_len: 2048, effective_batch_size: 16}
            | 1.7
            | 1.862
        llama-3.1-8b | a10g
            | {micro_batch_size: 4, seq_len: 2048, effective_batch_size: 16, target_modules: qv}
            | 3.0
            | 4.942
        # This one the GPU can do; it was published with a utilization of 45 to 50 %.
        mistral-7b-v0.3 | a10 | {} | 5.47945205479452 | 0.173
        """
    ),
)
def test_a_published_speed_is_held_against_the_gpus_peak(
    model: str, gpu: str, keys: dict[str, Any], published_seconds: float, utilization: float
) -> None:
    """Utilization leaves out what checkpointing recomputes, so it flatters no claim."""
    step = predict_step(recipe(**keys), model=load_model_spec(model), gpu=find_gpu(gpu))
    published = step.flops_utilization * step.step_seconds / published_seconds
    assert published == pytest.approx(utilization, rel=0.01)
    assert step.flops_utilization < 1
