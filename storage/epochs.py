"""Owns what one epoch of a study's texts takes on the GPU that the study is for. Pure.

An epoch is one pass over the rows that are not held out. Its loss-carrying tokens over the speed
are its seconds: start-up, evaluation and checkpoints come on top. A shorter sequence length cuts
texts off, so an epoch of it is less work: how much is said beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from search_spaces.costs import usd_per_training_second
from storage.definition import StudySnapshot
from storage.records import EpochRecord, TrialRecord


@dataclass(frozen=True)
class EpochCost:
    """What an epoch takes, as far as speed and price are known."""

    record: EpochRecord
    seconds: float | None
    """None where the speed on the target GPU is not known."""
    seconds_low: float | None
    seconds_high: float | None
    """By the ends of the speed's interval."""
    usd_per_second: float | None

    @property
    def dollars(self) -> float | None:
        """At the study's offer; None without a price or a speed."""
        return self._usd(self.seconds)

    def _usd(self, seconds: float | None) -> float | None:
        if seconds is None or self.usd_per_second is None:
            return None
        return seconds * self.usd_per_second

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``sweep best --json``."""
        low, high = self._usd(self.seconds_low), self._usd(self.seconds_high)
        return {
            **self.record.model_dump(mode="json"),
            "seconds": self.seconds,
            "seconds_low": self.seconds_low,
            "seconds_high": self.seconds_high,
            "dollars": self.dollars,
            "dollars_low": low,
            "dollars_high": high,
        }


def epoch_cost(snapshot: StudySnapshot, record: TrialRecord) -> EpochCost | None:
    """Return what an epoch of the study's texts takes as a trial trains; None without texts."""
    epoch = record.epoch
    if epoch is None:
        return None
    speed = snapshot.target_speed(record)
    price = None
    if snapshot.offer is not None:
        price = usd_per_training_second(snapshot.offer, record.config.data_parallel)
    if speed is None:
        return EpochCost(epoch, None, None, None, price)

    def seconds(rate: float | None) -> float | None:
        return epoch.loss_tokens / rate if rate else None

    return EpochCost(
        epoch, seconds(speed.tokens_per_second), seconds(speed.high), seconds(speed.low), price
    )
