"""Texts on a GPU: batches that nobody waits for, texts kept apart, peaks, held-out loss, and a
training that goes on where it was stopped.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qlora_sweep.sweep.data.collation import split
from qlora_sweep.sweep.data.study_epochs import StudyEpochs
from qlora_sweep.sweep.predict.on_dataset import MemoryOnDataset, ShapesOnDataset
from qlora_sweep.sweep.running.wire import DatasetSettings, QualityCommand
from tests.gpu.rig import SMALL, Rig, predicting, small_config
from tests.sweep.data.prepared import prepared_settings
from tests.sweep.finetuning.trainings import ended, job, stopped_and_resumed

pytestmark = [
    pytest.mark.gpu,
    # What libraries warn of depends on the GPU.
    pytest.mark.filterwarnings("default"),
]
HELD_OUT = 0.2
LENGTHS = np.random.default_rng(1).integers(20, 700, 160)
"""Some are longer than a row of most of the configurations."""
LEAN = {"kernels": "liger", "upcast_fp32": False, "checkpoint_fraction": 0.0}
FAST = {**LEAN, "kernels": "fused-loss", "compile": True}
PACKINGS = ("none", "grouped", "packed")
CASES: list[dict[str, Any]] = [
    *({"packing": packing, **settings} for settings in ({}, LEAN, FAST) for packing in PACKINGS),
    {"packing": "packed", "attention": "eager", "checkpoint_fraction": 0.0},
    {"packing": "packed", "compute_dtype": "fp16", "kernels": "fused-loss"},
    {"packing": "packed", "micro_batch_size": 1, "seq_len": 2048, **LEAN},
    {"packing": "grouped", "effective_batch_size": 8, "lora_dropout": 0.1},
    {"packing": "none", "quantization": "none", "double_quant": False, "upcast_fp32": False},
]
QUALITY = QualityCommand(tokens=4000, seed=1, eval_seq_len=512, eval_tokens=4000)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetSettings:
    return prepared_settings(tmp_path_factory.mktemp("texts"), LENGTHS, eval_fraction=HELD_OUT)


@pytest.fixture(scope="module")
def on_dataset(dataset: DatasetSettings) -> Iterator[Rig]:
    total = torch.cuda.get_device_properties(0).total_memory
    rig = Rig(int(0.4 * total), dataset)
    yield rig
    rig.worker._resident.drop()
    gc.unfreeze()


@pytest.fixture(scope="module")
def shapes() -> ShapesOnDataset:
    train, _ = split(len(LENGTHS), HELD_OUT, 0)
    lengths = LENGTHS[train].astype(np.int64)
    return ShapesOnDataset(StudyEpochs(lengths, lengths - 1, seed=0))


@pytest.fixture(scope="module")
def predictor(
    shapes: ShapesOnDataset, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MemoryOnDataset]:
    with predicting(tmp_path_factory.mktemp("profiles")) as traced:
        yield MemoryOnDataset(traced, shapes)


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_texts_are_trained_on_and_the_peak_is_their_epochs(
    on_dataset: Rig, shapes: ShapesOnDataset, predictor: MemoryOnDataset, settings: dict[str, Any]
) -> None:
    config = small_config(**settings)
    before = on_dataset.settle(config)
    if config.compile:
        # The first time, tuning kernels takes some 60 MB of its own: a twentieth of this peak.
        on_dataset.measure(config)
    measurement = on_dataset.measure(config)
    assert on_dataset.allocated_bytes() == before
    assert measurement.documents_apart is (True if config.packing == "packed" else None)
    each = measurement.loss_tokens_per_step
    assert each is not None
    # The epoch's mean counts its last step as well, which may be of fewer rows.
    assert each == pytest.approx(shapes.loss_tokens_per_step(config), rel=0.1)
    assert measurement.tokens_per_second == pytest.approx(each / measurement.step_seconds)
    # A step of so small a model is a few milliseconds; of a large one it is a hundredth of this.
    assert measurement.batch_wait_share is not None
    assert measurement.batch_wait_share < 0.2
    predicted = predictor.predict(config)
    peak = measurement.peak_allocated_bytes
    assert predicted.peak_allocated_bytes == pytest.approx(peak, rel=predicted.uncertainty)


@pytest.mark.parametrize(("packing", "settings"), [("grouped", LEAN), ("packed", FAST)])
def test_the_held_out_loss_is_the_models_whatever_kernels_compute_it(
    on_dataset: Rig, packing: str, settings: dict[str, Any]
) -> None:
    losses = []
    for asked in ({"upcast_fp32": False}, settings):
        config = small_config(packing=packing, micro_batch_size=2, **asked)
        before = on_dataset.settle(config)
        quality = on_dataset.measure(config, QUALITY).quality
        assert quality is not None
        assert quality.train_tokens >= QUALITY.tokens
        losses.append(quality.eval_loss)
        assert on_dataset.allocated_bytes() == before
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_a_training_that_was_stopped_goes_on(tmp_path: Path, dataset: DatasetSettings) -> None:
    options: dict[str, Any] = {
        "model": SMALL.to_json(),
        "device": "cuda",
        "seq_len": 256,
        "micro_batch_size": 4,
        "effective_batch_size": 8,
        "lora_dropout": 0.1,
        "eval_fraction": HELD_OUT,
        "max_steps": 8,
        "budget_bytes": torch.cuda.get_device_properties(0).total_memory // 3,
        "packing": "packed",
        "kernels": "fused-loss",
        "optimizer": "adamw_8bit",
        "lora_rank": 64,
    }
    directory = Path(dataset.directory)
    whole = ended(job(tmp_path / "whole", directory, **options))
    begun = job(tmp_path / "again", directory, **options)
    resumed, _ = stopped_and_resumed(begun, stop_after=4)
    assert resumed.tokens == whole.tokens
    # Kernels of a GPU add up in an order of their own: not to the bit.
    assert resumed.train_loss == pytest.approx(whole.train_loss, rel=1e-3)
    assert resumed.eval_loss == pytest.approx(whole.eval_loss, rel=1e-3)
