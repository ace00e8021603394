"""Numbers, gains, needs, settings and the ends of trials are said in the same words everywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest

from qlora_sweep.reports import format as units
from qlora_sweep.reports import words
from qlora_sweep.reports.words import verdict_words
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.storage.confirmations import Ratio
from qlora_sweep.storage.records import (
    Crashed,
)
from tests.sweep.simulated_device import a_record

CONFIG = TrialConfig()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.gib(20.1 * GIB), "20.10 GiB"),
        # Little memory is told in MiB.
        (units.gib(GIB / 10), "0.10 GiB"),
        (units.gib(GIB // 10 - 1), "102.40 MiB"),
        (units.gib(0.2 * GIB, units.memory_unit(2**26)), "204.80 MiB"),
        (units.model_name("qwen3-30b-a3b"), "Qwen3-30B-A3B"),
        (units.model_name("someone/their-llama-8b"), "their-llama-8b"),
        (units.with_article(units.gpu_name("rtx-4090")), "an RTX 4090"),
        (units.with_article(units.gpu_name("Tesla T4")), "a T4"),
        (units.rate(16_800.4), "16,800"),
        (units.rate(42.34), "42.3"),
        (units.error(0.145), "14.5 %"),
        (units.error(0.25), "25 %"),
        (units.step_time(0.3051), "0.305 s"),
        (units.step_time(12.34), "12.3 s"),
        (units.step_time(0.01234), "12.3 ms"),
        (units.duration(252.0), "4 min 12 s"),
        (units.duration(7_260.0), "2 h 1 min"),
        (units.plural(1, "trial"), "1 trial"),
        (units.plural(1_000, "trial"), "1,000 trials"),
        (units.out_of(7, 2), "7 (2 asked for)"),
        # A share is told with a decimal, and little is not nothing.
        (units.share(0.0), "0 %"),
        (units.share(0.0008), "<0.1 %"),
        (units.share(0.0376), "3.8 %"),
        (units.share(0.9995), ">99.9 %"),
        (units.share(None), "–"),
    ],
)
def test_numbers_read_as_documented(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_unknown_or_not_finite_is_a_dash(value: float | None) -> None:
    for written in (units.gib, units.rate, units.percent, units.step_time, units.duration):
        assert written(value) == units.DASH


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"micro_batch_size": 8}, "as the baseline"),
        (
            {"checkpoint_fraction": 0.0, "kernels": "liger", "upcast_fp32": False},
            "micro-batch 4, no checkpointing, no fp32 upcast, Liger kernels",
        ),
        # Nothing is said of the quantization of a base that has none.
        ({"micro_batch_size": 8, "quantization": "none", "double_quant": False}, "16-bit base"),
        (
            {"micro_batch_size": 8, "double_quant": False, "quantized_fraction": 0.125},
            "single quantization, 12 % of layers quantized",
        ),
    ],
)
def test_a_configuration_is_told_by_its_differences_from_the_baseline_its_shape_first(
    changes: dict[str, Any], expected: str
) -> None:
    baseline = TrialConfig(micro_batch_size=8)
    assert units.changes(TrialConfig(**changes), baseline=baseline) == expected


@pytest.mark.parametrize(
    ("value", "low", "high", "said"),
    [
        (2.122, 2.115, 2.13, "2.12x (2.12–2.13x)"),
        (2.122, 1.9, 2.4, "2x (1.9–2.4x)"),
        (13.82, 9.09, 19.0, "at least 9.0x (13.8x, 9.0–19.0x)"),
        (1.8, 1.049, 3.1, "at least 1.04x (1.8x, 1.04–3.10x)"),
        (0.04, 0.01, 0.5, "0.04x (0.01–0.50x)"),
        (1.0, 1.0, 1.0, "1.00x"),
        (2.31, None, None, "2.3x"),
    ],
)
def test_a_gain_has_no_more_digits_than_its_interval_supports(
    value: float, low: float | None, high: float | None, said: str
) -> None:
    assert words.gain(Ratio(value, low, high, is_paired=True)) == said
    assert words.gain(Ratio(2.1, 2.05, 2.15)) == "2.1x (2.05–2.15x, by single runs)"


def test_an_attempt_that_was_repeated_is_no_trial_of_its_own() -> None:
    """A crash that a second attempt made up for leaves nothing unknown."""
    other, crash = TrialConfig(micro_batch_size=2), Crashed(phase="warmup")
    records = (
        a_record(CONFIG, crash, number=0),
        a_record(other, crash, number=1),
        a_record(CONFIG, number=2),
    )
    assert verdict_words(records) == "1 fits, 1 crashed (after 1 failed attempt)"
    assert verdict_words(records[1:]) == "1 fits, 1 crashed"
    failed = (*records[:2], a_record(other, crash, number=2, attempt=2))
    assert verdict_words(failed) == "2 crashed (after 1 failed attempt)"
    assert verdict_words([]) == ""
