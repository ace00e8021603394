"""What is predicted of texts: full rows of their largest and of their mean micro-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB, find_gpu
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage.records import Measured
from qlora_sweep.sweep.data.epoch import Epoch, epoch
from qlora_sweep.sweep.data.study_epochs import StudyEpochs
from qlora_sweep.sweep.predict import on_dataset
from qlora_sweep.sweep.predict.forecast import Forecaster, SpeedForecast
from qlora_sweep.sweep.predict.on_dataset import (
    MemoryOnDataset,
    ShapeOnDataset,
    ShapesOnDataset,
    tokens_per_step,
)
from qlora_sweep.sweep.predict.speed.predictor import SpeedPrediction, StepTimes
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.predict.predicted_steps import predict_step
from tests.sweep.simulated_device import a_measurement, a_record
from tests.tables import cases

MODEL, A10 = load_model_spec("mistral-7b-v0.3"), find_gpu("a10")
FULL = TrialConfig(micro_batch_size=4, seq_len=1024)
LENGTHS = np.clip(np.random.default_rng(0).lognormal(5.5, 0.9, 4_000).astype(int), 8, 900)
PACKINGS = ("none", "grouped", "packed")


def full(**values: Any) -> TrialConfig:
    return FULL.model_copy(update=values)


def shapes_of(lengths: Any = LENGTHS) -> ShapesOnDataset:
    rows = np.asarray(lengths, dtype=np.int64)
    return ShapesOnDataset(StudyEpochs(rows, np.maximum(rows - 1, 0), seed=0))


def step(shapes: ShapesOnDataset, config: TrialConfig) -> SpeedPrediction:
    known = StepTimes([config], model=MODEL, gpu=A10, shapes=shapes).prediction(0)
    assert isinstance(known, SpeedPrediction)
    return known


def seconds(*configs: TrialConfig) -> Any:
    return StepTimes(configs, model=MODEL, gpu=A10).seconds


@pytest.fixture(scope="module")
def forecaster() -> Forecaster:
    return Forecaster(
        model=MODEL,
        budget_bytes=20 * GIB,
        violation=lambda _: None,
        predictor=ImaginedPredictor(),
        speed=SpeedForecast(model=MODEL, gpu=A10, shapes=shapes_of()),
        shapes=shapes_of(),
    )


@pytest.mark.parametrize(
    ("values", "seq_len", "packing"),
    cases(
        """
        {} | 900 | none
        {packing: grouped} | 900 | none
        {seq_len: 512} | 512 | none
        {compile: true} | 1024 | none
        {packing: packed} | 1024 | packed
        {packing: packed, attention: flash_attention_2} | 1024 | none
        """
    ),
)
def test_memory_is_that_of_the_longest_rows(
    forecaster: Forecaster, values: dict[str, Any], seq_len: int, packing: str
) -> None:
    config, largest = full(**values), {"seq_len": seq_len, "packing": packing}
    assert shapes_of().for_memory(config) == config.model_copy(update=largest)
    wide = ImaginedPredictor().predict(full(seq_len=seq_len))
    assert forecaster.expect(config).record.peak_allocated_bytes == wide.peak_allocated_bytes


def test_packed_rows_of_one_whole_text_each_need_no_mask() -> None:
    config = TrialConfig(packing="packed", seq_len=8, micro_batch_size=2)
    for last, packing in ((8, "none"), (3, "packed")):
        whole = epoch([9, 8, 30, last], [8, 7, 29, last - 1], config, seed=0)
        assert ShapeOnDataset.of(config, largest=whole, mean=whole).largest["packing"] == packing


def test_rows_that_are_all_full_are_predicted_as_full_rows_are() -> None:
    shapes = shapes_of([1024] * 64)
    assert shapes.for_memory(FULL) == FULL
    known, alone = step(shapes, FULL), predict_step(FULL, model=MODEL, gpu=A10)
    assert known.step_seconds == pytest.approx(alone.step_seconds)
    # The first token of a row is predicted by nothing.
    assert known.tokens_per_second == pytest.approx(alone.tokens_per_second * 1023 / 1024)
    assert sum(known.terms.values()) == pytest.approx(known.step_seconds)


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize(
    "values", [{}, {"packing": "grouped"}, {"packing": "packed"}, {"effective_batch_size": 16}]
)
def test_speed_is_that_of_all_micro_batches(values: dict[str, Any], share: float) -> None:
    config, supervised = full(**values), np.maximum((LENGTHS * share).astype(int) - 1, 1)
    whole: Epoch = epoch(LENGTHS, supervised, config, seed=0)
    shape = ShapeOnDataset.of(config, largest=whole, mean=whole)
    mean = config.model_copy(update=shape.mean)
    step_seconds = float(seconds(mean)[0] * shape.seconds)
    epoch_seconds = step_seconds * whole.micro_batches / config.accumulation_steps

    widths, counts = np.unique(whole.widths, return_counts=True)
    each = seconds(*(mean.model_copy(update={"seq_len": width}) for width in widths))
    one_by_one = float(each @ counts) / config.accumulation_steps
    assert epoch_seconds == pytest.approx(one_by_one, rel=0.02)
    tokens_per_second = shape.loss_tokens_per_step / step_seconds
    assert tokens_per_second == pytest.approx(whole.loss_tokens / one_by_one, rel=0.02)


def test_a_sample_of_many_rows_has_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = LENGTHS.copy()
    lengths[1234] = 1000
    whole = shapes_of(lengths)
    monkeypatch.setattr(on_dataset, "ROWS_MAX", 1000)
    monkeypatch.setattr(on_dataset, "LONGEST", 16)
    sampled = shapes_of(lengths)
    for config in (full(packing=packing) for packing in PACKINGS):
        assert sampled.for_memory(config) == whole.for_memory(config)
        expected = pytest.approx(whole.loss_tokens_per_step(config), rel=0.05)
        assert sampled.loss_tokens_per_step(config) == expected


def test_trials_on_texts_calibrate_by_what_they_computed() -> None:
    shapes = shapes_of()
    forecast = SpeedForecast(model=MODEL, gpu=A10, shapes=shapes)
    configs = [full(packing=p, lora_rank=r) for p in ("none", "grouped") for r in (8, 16, 32)]
    before = [forecast.predict(config) for config in configs]
    for config, speed in zip(configs, before, strict=True):
        slower = shapes.loss_tokens_per_step(config) / speed * 1.2
        measured = a_measurement(config, step_seconds=slower, step_seconds_ci95=None)
        forecast.learn(a_record(config, Measured(measurement=measured)))
    after = [forecast.predict(config) for config in configs]
    assert after == pytest.approx([speed / 1.2 for speed in before], rel=0.02)


def test_one_by_one_and_together_are_the_same(forecaster: Forecaster) -> None:
    configs = [full(packing=p, effective_batch_size=8) for p in PACKINGS]
    whole = forecaster.forecast(configs)
    each = [forecaster.expect(config).record for config in configs]
    assert whole.peak_bytes.tolist() == [record.peak_allocated_bytes for record in each]
    zeros = np.zeros(len(whole.physics.spread))
    together = whole.tokens_per_step / np.exp(whole.physics.log_seconds(zeros, slice(None)))
    # A mean shape is of whole tokens in width.
    assert together == pytest.approx([r.tokens_per_second for r in each], rel=0.01)
    memory = MemoryOnDataset(ImaginedPredictor(), shapes_of())
    both = [FULL, full(seq_len=900)]
    assert {memory.predict(c).peak_allocated_bytes for c in both} == set(
        memory.predict_all(both).peak_allocated_bytes.tolist()
    )


def test_texts_that_make_no_batch_are_refused(forecaster: Forecaster) -> None:
    too_large = full(micro_batch_size=4096)
    assert forecaster.expect(too_large).is_refused
    assert forecaster.forecast([too_large]).tokens_per_step == pytest.approx([4096 * 1024])
    shapes = shapes_of([50] * 3)
    assert shapes.for_memory(FULL) == FULL == shapes.for_speed(FULL)
    assert shapes.loss_tokens_per_step(FULL) == FULL.tokens_per_step
    assert tokens_per_step([FULL], None).tolist() == [4096.0]
