"""A whole run with a pretrained model on a GPU, for each kind of numerics: from chats to a merged
model that knows what it knew before.

Needs the model's directory in ``SWEEP_REAL_MODEL``, or the packages that it is made of.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sweep.walk import Walk, assert_near, pretrained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    # What libraries warn of depends on the GPU.
    pytest.mark.filterwarnings("default"),
]
SPACE = """
name: chats
description: A pretrained model and a few chats on a GPU
trials: 2
weights: pretrained
dimensions:
  micro_batch_size: [2, 4]
fixed: {fixed}
baseline: {baseline}
"""
FIXED = {
    "lora_rank": 16,
    "target_modules": "all-linear",
    "seq_len": 128,
    "checkpoint_fraction": 0.0,
    "upcast_fp32": False,
    "packing": "none",
}
NUMERICS = [("nf4", "bf16"), ("fp8", "fp8"), ("int8", "int8"), ("nf4", "fp8"), ("nf4", "int8")]


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Walk:
    model = pretrained()
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return Walk(tmp_path, model, device="cuda", steps=30)


@pytest.mark.parametrize(("quantization", "compute_dtype"), NUMERICS)
def test_a_pretrained_model_learns_chats_and_knows_what_it_knew(
    walk: Walk, quantization: str, compute_dtype: str
) -> None:
    before = walk.loaded()
    base = walk.answers(before)
    assert "Paris" in walk.answer(before)
    fixed = FIXED | {"quantization": quantization, "compute_dtype": compute_dtype}
    baseline = json.dumps(fixed | {"micro_batch_size": 2})
    best = walk.study(SPACE.format(fixed=json.dumps(fixed), baseline=baseline))
    assert best["trials"]["fits"] == 2
    config = best["best"]["config"]
    assert (config["quantization"], config["compute_dtype"]) == (quantization, compute_dtype)
    # Of random weights it is ln 49,152, nearly 11.
    assert best["best"]["measurement"]["final_loss"] < 5
    training = walk.train()
    assert training["steps"] == walk.steps
    verified = walk.sweep("verify", "chats", "--steps", "20")
    assert verified["peak_allocated_bytes"]["ratio"] == pytest.approx(1.0, abs=0.02)
    trained = walk.answers(walk.loaded(adapter=walk.home / "adapter"))
    assert trained.loss < base.loss - 0.2
    said = walk.sweep("merge", "adapter", "--output", "merged")
    assert said["comparison"]["is_near"]
    merged = walk.loaded(walk.home / "merged")
    assert_near(walk.answers(merged), trained)
    assert "Paris" in walk.answer(merged)
    walk.export("script", "train.py")
    assert walk.answers(walk.loaded(adapter=walk.run_script())).loss < base.loss - 0.2
    if (quantization, compute_dtype) == ("nf4", "bf16"):
        # Of 8-bit numerics TRL trains others.
        walk.export("trl", "trl.yaml")
        assert walk.answers(walk.loaded(adapter=walk.run_trl())).loss < base.loss - 0.2
