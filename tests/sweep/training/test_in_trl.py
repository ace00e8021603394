"""A step in TRL's way: its own head, and micro-batches as its collator makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.sweep.data.collation import Collator
from qlora_sweep.sweep.training.adapters import attached
from qlora_sweep.sweep.training.images import stacked
from qlora_sweep.sweep.training.in_trl import InTrl
from qlora_sweep.sweep.training.model import build_base
from qlora_sweep.sweep.training.step import TrainingLoop, with_a_shorter_row

CPU = torch.device("cpu")


def _config(**changes: Any) -> TrialConfig:
    values = {"micro_batch_size": 2, "seq_len": 16, "compute_dtype": "fp32", "trainer": "trl"}
    return TrialConfig(**values | changes)


@pytest.fixture(scope="module")
def base() -> Any:
    from qlora_sweep.search_spaces.models import load_model_spec

    spec = load_model_spec("demo")
    return build_base(_config(), spec=spec, weights="random", device=CPU, seed=0)


def test_trls_head_has_the_loss_that_the_model_has(base: Any) -> None:
    with attached(base, _config()) as found:
        rows = [torch.arange(4, 20), torch.arange(7, 23)]
        for batch in (stacked(rows), with_a_shorter_row(rows)):
            of_trl = InTrl(found.model)(**batch).loss
            assert of_trl.requires_grad
            own = found.model(**batch).loss
            assert of_trl.item() == pytest.approx(own.item(), rel=1e-4)


def test_the_first_steps_have_a_shorter_row_and_the_timed_ones_do_not(base: Any) -> None:
    with attached(base, _config()) as found:
        loop = TrainingLoop(found, _config(), seed=0)
        assert "attention_mask" in loop.next_batch()
        loop.leave_largest()
        assert not loop.is_on_round, "that is of texts"
        assert "attention_mask" not in loop.next_batch()
        assert torch.isfinite(loop.step())


def test_padded_rows_come_with_a_mask_where_the_trainer_passes_one() -> None:
    rows = [{"input_ids": [3, 4, 5, 6]}, {"input_ids": [3, 4]}]
    masks = {
        trainer: Collator(_config(trainer=trainer))(rows).get("attention_mask")
        for trainer in ("sweep", "trl", "axolotl", "llama-factory")
    }
    assert masks["sweep"] is None
    assert all(int(masks[name].sum()) == 6 for name in masks if name != "sweep")


def test_packed_rows_become_one_row_in_trl() -> None:
    rows = [
        {"input_ids": [3, 4, 5, 6], "seq_lengths": [2, 2]},
        {"input_ids": [7, 8, 9], "seq_lengths": [3]},
    ]
    packed = {"packing": "packed", "seq_len": 4}
    batch = Collator(_config(**packed))(rows)
    assert batch["input_ids"].shape == (1, 7)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 0, 1, 2]]
    assert Collator(_config(**packed, trainer="sweep"))(rows)["input_ids"].shape == (2, 4)
