"""Owns what a configuration on texts comes to for predictions: its largest and its mean shape.

Predictions are of full rows, all as long as ``seq_len``. On texts a micro-batch is as wide as its
longest row, and without a mask so padded rows are like any others: what a prediction needs is the
configuration whose full rows have that width. Packed rows are full already; that texts in them are
kept apart is the packing's, which both predictors know. Pure: epochs in, numbers out.
"""

from __future__ import annotations

from dataclasses import dataclass

from search_spaces.config import TrialConfig
from sweep.data.epoch import Epoch


def shape_on_texts(config: TrialConfig, epoch: Epoch) -> TrialConfig:
    """Return the configuration whose full rows are the epoch's largest micro-batch.

    Its peak memory is the peak of any order of these texts. It still says how rows are packed where
    a mask comes of that; otherwise its rows are packed no longer, as any others.
    """
    width = -(-epoch.largest.tokens // config.micro_batch_size)
    return _of_width(config, width, is_masked=epoch.is_masked)


def mean_shape_on_texts(config: TrialConfig, epoch: Epoch) -> TrialConfig:
    """Return the configuration whose full rows are the epoch's mean micro-batch, to the token."""
    width = max(1, round(_mean_width(config, epoch)))
    return _of_width(config, width, is_masked=epoch.is_masked)


def _of_width(config: TrialConfig, width: int, *, is_masked: bool) -> TrialConfig:
    packing = "packed" if is_masked else "none"
    return config.model_copy(update={"seq_len": width, "packing": packing})


def _mean_width(config: TrialConfig, epoch: Epoch) -> float:
    return epoch.padded_tokens / epoch.micro_batches / config.micro_batch_size


@dataclass(frozen=True)
class SpeedOnTexts:
    """How fast texts are gone through."""

    tokens_per_second: float
    """Of those that carry loss."""
    step_seconds: float
    """Mean of an optimizer step with all its micro-batches."""
    epoch_seconds: float


def speed_on_texts(config: TrialConfig, epoch: Epoch, *, step_seconds: float) -> SpeedOnTexts:
    """Return the speed on texts, from that of the mean shape's full rows.

    Args:
        config: what trains.
        epoch: of the texts, under that configuration.
        step_seconds: of `mean_shape_on_texts`, predicted.
    """
    # The mean width is no whole number; a step's time goes with its tokens over half of one.
    mean = _mean_width(config, epoch)
    seconds = step_seconds * mean / max(1, round(mean))
    epoch_seconds = seconds * epoch.micro_batches / config.accumulation_steps
    return SpeedOnTexts(
        tokens_per_second=epoch.loss_tokens / epoch_seconds,
        step_seconds=seconds,
        epoch_seconds=epoch_seconds,
    )
