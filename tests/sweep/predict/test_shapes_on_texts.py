"""What is predicted of a configuration on texts, from that of full rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from search_spaces.config import TrialConfig
from search_spaces.gpus import find_gpu
from search_spaces.models import load_model_spec
from sweep.data.epoch import Epoch, epoch
from sweep.predict.on_texts import ShapeOnTexts
from sweep.predict.speed.predictor import StepTimes

MISTRAL, CARD = load_model_spec("mistral-7b-v0.3"), find_gpu("a10")
LENGTHS = np.clip(np.random.default_rng(0).lognormal(5.5, 0.9, 4_000).astype(int), 8, 900)


def _config(**values: Any) -> TrialConfig:
    return TrialConfig(**{"seq_len": 1024, **values})


def _epoch(config: TrialConfig, *, share: float = 1.0) -> Epoch:
    return epoch(LENGTHS, np.maximum((LENGTHS * share).astype(int) - 1, 1), config, seed=0)


def _seconds(configs: Any) -> Any:
    return StepTimes(configs, model=MISTRAL, gpu=CARD).seconds


def _shape(config: TrialConfig, whole: Epoch) -> ShapeOnTexts:
    return ShapeOnTexts.of(config, largest=whole, mean=whole)


def _speed(config: TrialConfig, whole: Epoch) -> tuple[float, float]:
    """Return the seconds of a step, and the supervised tokens per second."""
    shape = _shape(config, whole)
    (full,) = _seconds([config.model_copy(update=shape.mean)])
    return full * shape.seconds, shape.loss_tokens_per_step / (full * shape.seconds)


@pytest.mark.parametrize(
    ("values", "seq_len", "packing"),
    [
        ({}, 900, "none"),
        ({"packing": "grouped"}, 900, "none"),
        ({"seq_len": 512}, 512, "none"),
        ({"compile": True}, 1024, "none"),
        ({"packing": "packed"}, 1024, "packed"),
        ({"packing": "packed", "attention": "flash_attention_2"}, 1024, "none"),
    ],
)
def test_the_largest_micro_batch_is_predicted(
    values: dict[str, Any], seq_len: int, packing: str
) -> None:
    config = _config(**values)
    shape = _shape(config, _epoch(config))
    assert shape.largest == {"seq_len": seq_len, "packing": packing}


def test_packed_rows_of_one_whole_text_each_need_no_mask() -> None:
    config = TrialConfig(packing="packed", seq_len=8, micro_batch_size=2)
    whole = epoch([9, 8, 30, 8], [8, 7, 29, 7], config, seed=0)
    assert _shape(config, whole).largest["packing"] == "none"
    beside = epoch([9, 8, 30, 3], [8, 7, 29, 2], config, seed=0)
    assert _shape(config, beside).largest["packing"] == "packed"


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize(
    "values", [{}, {"packing": "grouped"}, {"packing": "packed"}, {"effective_batch_size": 16}]
)
def test_the_speed_is_that_of_all_micro_batches_one_by_one(
    values: dict[str, Any], share: float
) -> None:
    config = _config(**values)
    whole = _epoch(config, share=share)

    step_seconds, tokens_per_second = _speed(config, whole)
    epoch_seconds = step_seconds * whole.micro_batches / config.accumulation_steps

    widths, counts = np.unique(whole.widths, return_counts=True)
    mean = config.model_copy(update=_shape(config, whole).mean)
    each = [mean.model_copy(update={"seq_len": w}) for w in widths]
    one_by_one = float(_seconds(each) @ counts) / config.accumulation_steps
    assert epoch_seconds == pytest.approx(one_by_one, rel=0.02)
    assert tokens_per_second == pytest.approx(whole.loss_tokens / one_by_one, rel=0.02)


def test_grouped_and_packed_texts_are_predicted_to_go_faster_than_padded_ones() -> None:
    configs = [_config(packing=packing) for packing in ("none", "grouped", "packed")]
    none, grouped, packed = (_speed(c, _epoch(c))[1] for c in configs)
    assert grouped > 1.2 * none
    assert packed > 1.2 * none


def test_a_mask_costs_attention_and_nothing_else() -> None:
    pairs = [_config(packing=packing) for packing in ("none", "packed")]
    plain, masked = (StepTimes([config], model=MISTRAL, gpu=CARD) for config in pairs)
    assert masked.seconds > plain.seconds
    assert masked.uncertainty > plain.uncertainty
    work = masked.phases.compute - plain.phases.compute
    assert (work != 0).sum() == 1
    for attention in ("flash_attention_2", "eager"):
        alike = [_config(packing=p, attention=attention) for p in ("none", "packed")]
        assert len(set(_seconds(alike).tolist())) == 1
