"""What is predicted of texts: full rows of their largest and of their mean micro-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from search_spaces.config import TrialConfig
from search_spaces.gpus import find_gpu
from search_spaces.models import load_model_spec
from sweep.data.study_epochs import StudyEpochs
from sweep.predict import on_texts
from sweep.predict.on_texts import MemoryOnTexts, ShapesOnTexts, tokens_per_step
from sweep.predict.speed.predictor import SpeedPrediction, StepTimes
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.predict.predicted_steps import predict_step

MODEL, A10 = load_model_spec("mistral-7b-v0.3"), find_gpu("a10")
FULL = TrialConfig(micro_batch_size=4, seq_len=1024)


def epochs(lengths: Any, seed: int = 0) -> StudyEpochs:
    rows = np.asarray(lengths, dtype=np.int64)
    return StudyEpochs(rows, np.maximum(rows - 1, 0), seed=seed)


def step(shapes: ShapesOnTexts, config: TrialConfig) -> SpeedPrediction:
    known = StepTimes([config], model=MODEL, gpu=A10, shapes=shapes).prediction(0)
    assert isinstance(known, SpeedPrediction)
    return known


def test_rows_that_are_all_full_are_predicted_as_full_rows_are() -> None:
    shapes = ShapesOnTexts(epochs([1024] * 64))
    assert shapes.for_memory(FULL) == FULL
    known, full = step(shapes, FULL), predict_step(FULL, model=MODEL, gpu=A10)
    assert known.step_seconds == pytest.approx(full.step_seconds)
    # The first token of a row is predicted by nothing.
    assert known.tokens_per_second == pytest.approx(full.tokens_per_second * 1023 / 1024)
    assert sum(known.terms.values()) == pytest.approx(known.step_seconds)


def test_memory_is_that_of_the_longest_rows_and_speed_that_of_the_mean_ones() -> None:
    shapes = ShapesOnTexts(epochs([100] * 396 + [900] * 4))
    assert shapes.for_memory(FULL).seq_len == 900
    assert 100 < shapes.for_speed(FULL).seq_len < 200
    assert (
        step(shapes, FULL).step_seconds < predict_step(FULL, model=MODEL, gpu=A10).step_seconds / 3
    )


def test_packing_and_grouping_are_faster_by_the_token_than_padding_uneven_rows() -> None:
    lengths = np.random.default_rng(0).lognormal(4.5, 1.0, 2000).astype(int) + 2
    shapes = ShapesOnTexts(epochs(np.minimum(lengths, 1024)))
    speeds = {
        packing: step(shapes, FULL.model_copy(update={"packing": packing})).tokens_per_second
        for packing in ("none", "grouped", "packed")
    }
    assert speeds["none"] < speeds["grouped"]
    assert speeds["none"] < speeds["packed"]


def test_of_many_rows_a_sample_says_the_same_and_the_longest_is_among_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = np.random.default_rng(1).lognormal(4.5, 0.7, 4000).astype(int) + 2
    lengths[1234] = 1000
    whole = ShapesOnTexts(epochs(np.minimum(lengths, 1000)))
    monkeypatch.setattr(on_texts, "ROWS_MAX", 1000)
    monkeypatch.setattr(on_texts, "LONGEST", 16)
    sampled = ShapesOnTexts(epochs(np.minimum(lengths, 1000)))
    for packing in ("none", "grouped", "packed"):
        config = FULL.model_copy(update={"packing": packing})
        assert sampled.for_memory(config) == whole.for_memory(config)
        assert sampled.loss_tokens_per_step(config) == pytest.approx(
            whole.loss_tokens_per_step(config), rel=0.05
        )


def test_what_was_measured_on_texts_says_what_full_rows_take() -> None:
    shapes = ShapesOnTexts(epochs(list(range(100, 500))))
    full = predict_step(shapes.for_speed(FULL), model=MODEL, gpu=A10).step_seconds
    assert step(shapes, FULL).step_seconds / shapes.of(FULL).seconds == pytest.approx(full)


def test_what_the_texts_make_no_batch_of_stands_for_itself() -> None:
    shapes = ShapesOnTexts(epochs([50] * 3))
    assert shapes.for_memory(FULL) == FULL == shapes.for_speed(FULL)
    assert shapes.loss_tokens_per_step(FULL) == FULL.tokens_per_step


def test_memory_on_texts_is_asked_of_the_largest_micro_batch() -> None:
    shapes, imagined = ShapesOnTexts(epochs([100] * 60 + [700])), ImaginedPredictor()
    known = MemoryOnTexts(imagined, shapes)
    wide = FULL.model_copy(update={"seq_len": 700})
    assert known.predict(FULL).peak_allocated_bytes == imagined.predict(wide).peak_allocated_bytes
    whole = known.predict_all([FULL, wide])
    assert len(set(whole.peak_allocated_bytes.tolist())) == 1


def test_without_texts_every_token_of_a_step_counts() -> None:
    assert tokens_per_step([FULL], None).tolist() == [4096.0]
