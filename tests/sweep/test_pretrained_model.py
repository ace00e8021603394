"""A whole run with a pretrained model on the CPU: from chats to a merged model that knows what it
knew before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.sweep.walk import CHATS, Answers, Walk, assert_near, chats, pretrained

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("default"),
]

SPACE = """
name: chats
description: A pretrained model and a few chats on a CPU
gpu: cpu
budget_gib: 4
trials: 2
weights: pretrained
steps: {warmup_min: 1, warmup_max: 1, measured_min: 2, measured_max: 2}
dimensions:
  micro_batch_size: [1, 2]
fixed:
  lora_rank: 8
  seq_len: 128
  quantization: nf4
  compute_dtype: fp32
  checkpoint_fraction: 0.0
  packing: none
baseline: {micro_batch_size: 1, lora_rank: 8, seq_len: 128, compute_dtype: fp32}
"""


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    model = pretrained()
    home = tmp_path_factory.mktemp("walk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWEEP_HOME", str(home))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.chdir(home)
        yield Walk(home, model, device="cpu", steps=16)


@pytest.fixture(scope="module")
def best(walk: Walk) -> dict[str, Any]:
    """What the study says of its winner."""
    return walk.study(SPACE)


@pytest.fixture(scope="module")
def training(walk: Walk, best: dict[str, Any]) -> dict[str, Any]:
    """What the winner's training says."""
    return walk.train()


@pytest.fixture(scope="module")
def base(walk: Walk) -> Answers:
    """What the base makes of the chats' answers."""
    return walk.answers(walk.loaded())


def test_the_chats_are_counted_and_the_assistants_turns_found(walk: Walk) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(walk.model)
    said = 0
    for messages in chats():
        for turn in messages:
            if turn["role"] == "assistant":
                said += len(tokenizer(f"{turn['content']}<|im_end|>\n")["input_ids"])
    found = walk.sweep("data", CHATS, "--model", walk.model, "--set", "data.completions_only=true")
    assert found["kind"] == "messages"
    assert found["rows"] == len(chats())
    assert found["broken"] == []
    assert found["loss_tokens"] == said


def test_a_winner_is_found_with_the_pretrained_weights(best: dict[str, Any]) -> None:
    assert best["trials"]["fits"] == 2
    # Of random weights it is ln 49,152, nearly 11.
    assert best["best"]["measurement"]["final_loss"] < 5


def test_the_winner_is_verified(walk: Walk, best: dict[str, Any]) -> None:
    found = walk.sweep("verify", "chats", "--steps", "8")
    assert found["steps"] == 8
    # How fast it is depends on what else this machine does.
    assert found["peak_allocated_bytes"]["ratio"] == pytest.approx(1.0, abs=0.02)


def test_the_merged_model_is_base_and_adapter_and_knows_what_the_base_knew(
    walk: Walk, training: dict[str, Any], base: Answers
) -> None:
    assert training["steps"] == walk.steps
    assert "Paris" in walk.answer(walk.loaded())
    trained = walk.answers(walk.loaded(adapter=walk.home / "adapter"))
    assert trained.loss < base.loss - 0.2
    said = walk.sweep("merge", "adapter", "--output", "merged")
    assert said["comparison"]["is_near"]
    merged = walk.loaded(walk.home / "merged")
    assert_near(walk.answers(merged), trained)
    assert "Paris" in walk.answer(merged)


def test_the_exported_script_trains_it(walk: Walk, best: dict[str, Any], base: Answers) -> None:
    walk.export("script", "train.py")
    trained = walk.answers(walk.loaded(adapter=walk.run_script()))
    assert trained.loss < base.loss - 0.2


def test_trl_trains_it_by_the_exported_file(
    walk: Walk, best: dict[str, Any], base: Answers
) -> None:
    walk.export("trl", "trl.yaml")
    trained = walk.answers(walk.loaded(adapter=walk.run_trl()))
    assert trained.loss < base.loss - 0.2
