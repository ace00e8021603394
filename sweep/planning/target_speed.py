"""Owns how fast a study's trials are on the card it is for, where another card stood in for it.

The memory of a trial is measured under the target's budget and is real; its speed is that of the
card that ran it. What stands for it is what `sweep plan` says of the configuration on the target.
What the stand-in measured does not calibrate that: factors fitted to a study's steps on an H200
leave the published steps of six other cards no better predicted.
Knows nothing of files, terminals or how a study is driven.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec, find_gpu
from search_spaces.models import ModelSpec
from storage.definition import StudyDefinition, StudySnapshot, TargetSpeed
from storage.records import Measurement, TrialRecord
from sweep.predict.speed.arrays import StepTimes


def with_target_speeds(snapshot: StudySnapshot) -> StudySnapshot:
    """Return a study with its trials' speeds on the target card, worked out when first read.

    Nothing is added where the target ran itself, or is a card that the catalogue does not know.
    """
    records = (*snapshot.records, *snapshot.confirmations)
    return replace(snapshot, target_speeds=target_speeds(snapshot.definition, records))


def target_speeds(
    definition: StudyDefinition, records: Sequence[TrialRecord]
) -> Mapping[int, TargetSpeed]:
    """Return what is predicted of a study's trials on the GPU it is for, by number; nothing where
    that GPU ran itself, or is not in the catalogue."""
    target = definition.target
    if target.emulated_on is None:
        return {}
    try:
        gpu = find_gpu(target.gpu)
    except InputError:
        return {}
    return PredictedSpeeds(records, model=ModelSpec.from_json(definition.model), gpu=gpu)


class PredictedSpeeds(Mapping[int, TargetSpeed]):
    """The predicted speeds of measured trials, by number, all worked out at the first look.

    Trials without a measurement, and those that have no prediction, are not in it.

    Args:
        records: of one study.
        model: that it trains.
        gpu: the card that is asked about.
    """

    def __init__(self, records: Sequence[TrialRecord], *, model: ModelSpec, gpu: GpuSpec) -> None:
        self._trials = tuple((r, r.measurement) for r in records if r.measurement is not None)
        self._model = model
        self._gpu = gpu

    def __getitem__(self, number: int) -> TargetSpeed:
        return self._speeds[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._speeds)

    def __len__(self) -> int:
        return len(self._speeds)

    @cached_property
    def _speeds(self) -> Mapping[int, TargetSpeed]:
        if not self._trials:
            return {}
        configs = [record.config for record, _ in self._trials]
        times = StepTimes(configs, model=self._model, gpu=self._gpu)
        seconds, unsure = times.seconds(None).tolist(), times.uncertainty(None).tolist()
        return {
            record.number: _speed(measured, step_seconds, uncertainty)
            for (record, measured), step_seconds, uncertainty in zip(
                self._trials, seconds, unsure, strict=True
            )
            if math.isfinite(step_seconds)
        }


def _speed(measured: Measurement, step_seconds: float, uncertainty: float) -> TargetSpeed:
    """Return a speed from a predicted step, nine in ten of which are within ``uncertainty``.

    A step holds as many tokens that carry loss as it did where it was measured: all of them, but
    for rows that the user's texts left padded.
    """
    tokens = measured.tokens_per_second * measured.step_seconds
    speed = tokens / step_seconds
    return TargetSpeed(
        speed,
        low=speed / (1.0 + uncertainty),
        high=speed / (1.0 - uncertainty) if uncertainty < 1.0 else None,
        basis="predicted",
    )
