"""Predictions for a dataset: every configuration by what its epoch of the examples comes to.

Predictors know full sequences, all as long as ``seq_len``. A micro-batch of examples is as wide as
its longest sequence, and without a mask such padding costs what any token does. So a configuration
stands for full sequences as wide as its largest micro-batch (memory) or as its mean one (speed).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.trainers import trainer_of
from qlora_sweep.sweep.data.collation import rows_of_samples
from qlora_sweep.sweep.data.epoch import Epoch
from qlora_sweep.sweep.data.study_epochs import StudyEpochs, batch_key
from qlora_sweep.sweep.predict.memory.prediction import Known, WholeMemory
from qlora_sweep.sweep.predict.memory.predictor import MemoryPredictor
from qlora_sweep.sweep.predict.memory.profile_store import OnProgress, ignore_progress
from qlora_sweep.sweep.predict.trainers import factors_of, for_memory, for_speed

ROWS_MAX = 10_000
"""Of more sequences a sample of so many tells the mean micro-batch; a space asks for hundreds."""
LONGEST = 2048
"""The longest sequences are in the sample that tells the largest micro-batch."""


@dataclass(frozen=True)
class ShapeOnDataset:
    """What a dataset makes of one way to batch it."""

    largest: dict[str, Any]
    """Settings of full sequences that need as much memory as the largest micro-batch: no order of
    the examples needs more. Packed where a mask keeps examples apart."""
    mean: dict[str, Any]
    """Settings of full sequences as wide as the mean micro-batch, to the token."""
    seconds: float
    """Of a mean step, for each second of those full sequences'."""
    loss_tokens_per_step: float

    @classmethod
    def of(cls, config: TrialConfig, *, largest: Epoch, mean: Epoch) -> ShapeOnDataset:
        """Return the shape of a configuration's epochs."""
        rows = config.micro_batch_size * config.rows_per_sample
        width = mean.padded_tokens / mean.micro_batches / rows
        full_width = max(1, round(width))
        # The mean width is no whole number; a step's time goes with its tokens over half of one.
        seconds = width / full_width
        epoch_seconds = seconds * mean.micro_batches / config.micro_batches_per_step
        longest = -(-largest.largest.tokens // rows)
        return cls(
            largest=_stand_in(config, longest, is_masked=largest.is_masked),
            mean=_stand_in(config, full_width, is_masked=mean.is_masked),
            seconds=seconds,
            loss_tokens_per_step=mean.loss_tokens / epoch_seconds * seconds,
        )


def _stand_in(config: TrialConfig, width: int, *, is_masked: bool) -> dict[str, Any]:
    """Return the settings of full rows that stand for rows of texts, so wide, in the trainer.

    Args:
        config: the configuration.
        width: tokens of a row, padding included.
        is_masked: whether a mask keeps packed examples apart.
    """
    trainer = trainer_of(config)
    rows = config.micro_batch_size * config.rows_per_sample
    is_padded = config.packing != "packed" and rows > 1
    has_mask = is_masked or (config.masks_padding and is_padded)
    found: dict[str, Any] = {"seq_len": width, "packing": "packed" if has_mask else "none"}
    is_joined = trainer.joins_packed_rows and config.packing == "packed"
    if is_joined and config.attention != "flash_attention_2":
        # As many tokens in one row, in as many micro-batches.
        found["packing"] = "packed"
        found["seq_len"] = width * config.micro_batch_size
        found["effective_batch_size"] = config.micro_batches_per_step
        found["micro_batch_size"] = 1
    return found


class ShapesOnDataset:
    """What configurations come to on the rows of one study's texts.

    Args:
        epochs: of those texts.
        seed: of the sample.
    """

    def __init__(self, epochs: StudyEpochs, *, seed: int = 0) -> None:
        self.epochs = epochs
        each = epochs.rows_per_sample
        sizes = epochs.lengths.reshape(-1, each).max(1)
        few = np.arange(len(sizes))
        self._mean = epochs
        self._longest = epochs
        if len(few) > ROWS_MAX:
            longest = np.argsort(sizes, kind="stable")[-LONGEST:]
            few = np.sort(np.random.default_rng(seed).permutation(few)[:ROWS_MAX])
            self._mean = epochs.of_rows(rows_of_samples(few, each))
            self._longest = epochs.of_rows(rows_of_samples(np.union1d(few, longest), each))
        self._known: dict[Hashable, ShapeOnDataset] = {}

    def for_memory(self, config: TrialConfig) -> TrialConfig:
        """Return the configuration of full rows that needs as much; one that the texts make no
        batch of stands for itself."""
        return config.changed(**self.of(config).largest)

    def for_speed(self, config: TrialConfig) -> TrialConfig:
        """Return the configuration of full rows that takes as long, but for less than a token."""
        return config.changed(**self.of(config).mean)

    def loss_tokens_per_step(self, config: TrialConfig) -> float:
        """Return the tokens that carry loss in an optimizer step, as a mean of the epoch."""
        return self.of(config).loss_tokens_per_step

    def of(self, config: TrialConfig) -> ShapeOnDataset:
        """Return what the texts make of a configuration's way to batch them."""
        key = batch_key(config), config.trainer
        if key not in self._known:
            try:
                mean = self._mean.fresh(config)
                is_sampled = self._longest is not self._mean
                largest = mean
                if is_sampled:
                    largest = self._longest.fresh(config)
                self._known[key] = ShapeOnDataset.of(config, largest=largest, mean=mean)
            except InputError:
                self._known[key] = ShapeOnDataset({}, {}, 1.0, float(config.tokens_per_step))
        return self._known[key]


class MemoryInTrainer(MemoryPredictor):
    """Predicts memory for full rows, as the trainer makes and trains them.

    Args:
        predictor: of full rows in our own step.
    """

    def __init__(self, predictor: MemoryPredictor) -> None:
        self._predictor = predictor

    def predict_all(
        self, configs: Sequence[TrialConfig], *, on_progress: OnProgress = ignore_progress
    ) -> WholeMemory:
        """See `MemoryPredictor.predict_all`."""
        stand_ins = list(map(for_memory, configs))
        whole = self._predictor.predict_all(stand_ins, on_progress=on_progress)
        factors = list(map(factors_of, configs))
        if not any(factors):
            return whole
        known: list[Known] = []
        for row, factor in enumerate(factors):
            if row in whole.unpredicted:
                known.append(whole.unpredicted[row])
            elif factor is not None:
                known.append(whole.prediction(row).scaled(factor.activations))
            else:
                known.append(whole.prediction(row))
        return WholeMemory(configs, known)


class MemoryOnDataset(MemoryPredictor):
    """Predicts memory for texts: of the largest micro-batch that any order of them can have.

    Args:
        predictor: of full rows.
        shapes: of the texts.
    """

    def __init__(self, predictor: MemoryPredictor, shapes: ShapesOnDataset) -> None:
        self._predictor = predictor
        self._shapes = shapes

    def predict_all(
        self, configs: Sequence[TrialConfig], *, on_progress: OnProgress = ignore_progress
    ) -> WholeMemory:
        """See `MemoryPredictor.predict_all`."""
        on_dataset = list(map(self._shapes.for_memory, configs))
        return self._predictor.predict_all(on_dataset, on_progress=on_progress)


def full_rows(
    configs: Sequence[TrialConfig], shapes: ShapesOnDataset | None
) -> Sequence[TrialConfig]:
    """Return the configurations of full rows that take as long."""
    if shapes is not None:
        return [shapes.for_speed(config) for config in configs]
    return [for_speed(config) for config in configs]


def tokens_per_step(
    configs: Sequence[TrialConfig], shapes: ShapesOnDataset | None
) -> NDArray[np.float64]:
    """Return the tokens that carry loss in a step of each configuration."""
    if shapes is None:
        return np.array([float(config.tokens_per_step) for config in configs])
    return np.array([shapes.loss_tokens_per_step(config) for config in configs])
