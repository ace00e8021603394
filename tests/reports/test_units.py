"""Numbers and configurations read the same wherever they are put into words."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from reports import units
from search_spaces.config import CONFIG_KEYS, TrialConfig
from search_spaces.gpus import GIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.gib(20.1 * GIB), "20.10 GiB"),
        (units.gib(0), "0.00 GiB"),
        (units.gib(2**26), "64.00 MiB"),
        (units.gib(0.2 * GIB, units.memory_unit(2**26)), "204.80 MiB"),
        (units.model_name("mistral-7b-v0.3"), "Mistral-7B-v0.3"),
        (units.model_name("qwen3-30b-a3b"), "Qwen3-30B-A3B"),
        (units.model_name("someone/their-llama-8b"), "their-llama-8b"),
        (units.with_article(units.gpu_name("h200")), "an H200"),
        (units.with_article(units.gpu_name("rtx-4090")), "an RTX 4090"),
        (units.with_article(units.gpu_name("Tesla T4")), "a T4"),
        (units.with_article(units.gpu_name("cpu")), "a CPU"),
        (units.rate(16_800.4), "16,800"),
        (units.rate(1_234_567.0), "1,234,567"),
        (units.rate(42.34), "42.3"),
        (units.short_rate(16_849.0), "16.8k"),
        (units.short_rate(42.34), "42.3"),
        (units.rate_interval((16_700.2, 16_900.0)), "16,700–16,900"),
        (units.count(13_631_488), "13,631,488"),
        (units.percent(0.934), "93 %"),
        (units.error(0.015), "1.5 %"),
        (units.error(0.145), "14.5 %"),
        (units.error(0.25), "25 %"),
        (units.step_time(0.3051), "0.305 s"),
        (units.step_time(12.34), "12.3 s"),
        (units.step_time(0.01234), "12.3 ms"),
        (units.duration(0.02), "0.0 s"),
        (units.duration(59.94), "59.9 s"),
        (units.duration(252.0), "4 min 12 s"),
        (units.duration(7_260.0), "2 h 1 min"),
        (units.plural(1, "trial"), "1 trial"),
        (units.plural(1_000, "trial"), "1,000 trials"),
    ],
)
def test_numbers_read_as_documented(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    "written",
    [units.gib, units.rate, units.percent, units.step_time, units.duration],
)
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_unknown_or_not_finite_is_a_dash(
    written: Callable[[float | None], str], value: float | None
) -> None:
    assert written(value) == units.DASH


def test_a_configuration_is_told_by_its_differences_from_the_baseline_its_shape_first() -> None:
    baseline = TrialConfig(micro_batch_size=8)
    config = TrialConfig(
        checkpoint_fraction=0.0, kernels="liger", upcast_fp32=False, micro_batch_size=10
    )
    expected = "micro-batch 10, no checkpointing, no fp32 upcast, Liger kernels"
    assert units.changes(config, baseline=baseline) == expected
    assert units.changes(baseline, baseline=baseline) == "as the baseline"


def test_nothing_is_said_of_the_quantization_of_a_base_that_has_none() -> None:
    baseline = TrialConfig()
    plain = TrialConfig(quantization="none", double_quant=False, quantized_fraction=0.125)
    shared = TrialConfig(double_quant=False, quantized_fraction=0.125)
    assert units.changes(plain, baseline=baseline) == "16-bit base"
    expected = "single quantization, 12 % of layers quantized"
    assert units.changes(shared, baseline=baseline) == expected


def test_every_knob_has_words_for_its_default() -> None:
    defaults = TrialConfig().model_dump(mode="json")
    assert all(units.phrase(key, defaults[key]) for key in CONFIG_KEYS)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("checkpoint_fraction", 0.5, "50 % checkpointed"),
        ("target_modules", "all-linear", "adapters on all linear layers"),
        ("target_modules", ["k_proj", "q_proj"], "adapters on k_proj, q_proj"),
        ("quantization", "none", "16-bit base"),
        ("lora_alpha", 32.0, "alpha 32"),
        ("kernels", "fused-loss", "fused-loss kernels"),
        ("compile", True, "compiled layers"),
    ],
)
def test_settings_read_as_people_say_them(key: str, value: object, expected: str) -> None:
    assert units.phrase(key, value) == expected


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (GIB / 10, "0.10 GiB"),
        (GIB // 10 - 1, "102.40 MiB"),
        (2**26, "64.00 MiB"),
        (12_345, "0.01 MiB"),
        (-(2**26), "-64.00 MiB"),
    ],
)
def test_little_memory_is_told_in_mib(count: float, text: str) -> None:
    assert units.gib(count) == text


@pytest.mark.parametrize(
    ("done", "total", "text"), [(3, 40, "3 of 40"), (40, 40, "40 of 40"), (7, 2, "7 (2 asked for)")]
)
def test_progress_beyond_the_end_says_so(done: int, total: int, text: str) -> None:
    assert units.out_of(done, total) == text


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.0, "0 %"),
        (0.0008, "<0.1 %"),
        (0.001, "0.1 %"),
        (0.0376, "3.8 %"),
        (0.05, "5 %"),
        (0.9995, ">99.9 %"),
        (1.0, "100 %"),
        (None, "–"),
    ],
)
def test_a_share_is_told_with_a_decimal_and_little_is_not_nothing(
    share: float | None, words: str
) -> None:
    assert units.share(share) == words
