"""The trainings on a real model, on a tiny one: they learn, and are judged in both computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sweep.training.tiny import saved_with_outliers

SETTINGS = {
    "lora_rank": 8,
    "target_modules": "all-linear",
    "micro_batch_size": 4,
    "seq_len": 32,
    "checkpoint_fraction": 0.0,
    "upcast_fp32": False,
    "optimizer": "adamw_torch_fused",
    "learning_rate": 1e-2,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    saved_with_outliers(tmp_path)
    return tmp_path


def trained(directory: Path, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    from tests.bench import real_weights

    # A text that goes over the same few tokens is learned in some steps.
    text = np.tile(np.arange(7), 1000)
    sources = real_weights.Sources(training=text, held_out=text[:640])
    return list(real_weights.trained(runs, model=str(directory), sources=sources))


@pytest.mark.integration
def test_a_run_learns_and_is_judged_in_both_computes(directory: Path) -> None:
    int8 = {**SETTINGS, "quantization": "int8", "compute_dtype": "int8"}
    before, after, in_16_bits = trained(
        directory,
        {"config": int8, "seed": 0, "tokens": 0},
        {"config": int8, "seed": 0, "tokens": 10 * 4 * 32},
        {"config": {**SETTINGS, "quantization": "none"}, "seed": 0, "tokens": 10 * 4 * 32},
    )
    assert (before["steps"], after["steps"]) == (0, 10)
    assert after["eval_loss"] < before["eval_loss"] - 0.5
    assert after["eval_loss_16_bit"] == pytest.approx(after["eval_loss"], abs=0.1)
    assert after["eval_loss_16_bit"] != after["eval_loss"]
    assert after["eight_bit"]["errors"]
    assert in_16_bits["eval_loss"] == in_16_bits["eval_loss_16_bit"]
    assert in_16_bits["eval_loss_16_bit_base"] == in_16_bits["eval_loss"]
    assert after["eval_loss_16_bit_base"] == pytest.approx(after["eval_loss_16_bit"], abs=0.1)
    assert after["eval_loss_16_bit_base"] not in (after["eval_loss_16_bit"], before["eval_loss"])
    assert in_16_bits["eval_loss"] == pytest.approx(after["eval_loss"], abs=0.5)


def test_a_run_that_fails_is_told_and_the_next_goes_on(directory: Path) -> None:
    failed, after = trained(
        directory,
        {"config": {**SETTINGS, "target_modules": "no_such"}, "seed": 0, "tokens": 0},
        {"config": SETTINGS, "seed": 0, "tokens": 0},
    )
    assert "no_such" in failed["error"]
    assert after["eval_loss"] > 0
