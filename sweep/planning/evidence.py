"""What a stored study says to a forecast, and what is predicted of a stored study's trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from search_spaces.config import TrialConfig, canonical
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec, find_gpu, gpu_catalogue, match_product
from search_spaces.models import ModelSpec
from search_spaces.texts import TextsSummary
from storage.definition import MemoryForecast, StudyDefinition, StudySnapshot, Target, TargetSpeed
from storage.objectives import fitting, rankable
from storage.records import Measurement, OutOfMemory, TrialRecord
from sweep.predict.forecast import Evidence, Forecaster, calibrated
from sweep.predict.memory.predictor import MemoryPredictor, TracingPredictor
from sweep.predict.memory.profiles import Structure, Untraceable
from sweep.predict.memory.tracing_children import Traced
from sweep.predict.on_texts import ShapesOnTexts
from sweep.predict.speed.predictor import StepTimes

K = TypeVar("K")
V = TypeVar("V")


def evidence_from(
    snapshot: StudySnapshot,
    *,
    model: ModelSpec,
    gpu: GpuSpec,
    texts: TextsSummary | None = None,
    shapes: ShapesOnTexts | None = None,
) -> Evidence:
    """Return what a study says of ``model`` on ``gpu``.

    Args:
        snapshot: the study.
        model: what would be trained.
        gpu: of the plan.
        texts: what the plan is about; None for full rows.
        shapes: what configurations come to on those.

    Raises:
        InputError: the study is about another model or other texts, or ran on a CPU.
    """
    _refuse_other_texts(snapshot, texts)
    definition, target = snapshot.definition, snapshot.definition.target
    if definition.model_fingerprint != model.fingerprint:
        raise InputError(
            f"study '{snapshot.name}' is about model '{definition.model.get('name')}' and says "
            f"nothing of '{model.name}'"
        )
    if target.device == "cpu":
        raise InputError(f"study '{snapshot.name}' ran on a CPU and says nothing of a card")
    is_same_card = _host(target) == gpu.name
    # As everywhere, the last trial of a configuration that came to a conclusion decides.
    measured = {canonical(r.config): r for r in fitting(rankable(snapshot.records))}
    steady = [r for r in measured.values() if r.measurement and not r.measurement.is_noisy]
    ran_on = target.emulated_on or target.gpu
    other = f"study '{snapshot.name}' ran on {ran_on}: its speeds do not calibrate the {gpu.name}'s"
    return Evidence(
        study=snapshot.name,
        budget_bytes=target.budget_bytes,
        calibration=calibrated(steady, model=model, gpu=gpu, shapes=shapes)
        if is_same_card
        else None,
        trials=measured,
        ran_out=frozenset(
            canonical(record.config)
            for record in snapshot.records
            if isinstance(record.outcome, OutOfMemory)
        ).difference(measured),
        is_same_card=is_same_card,
        memory_errors=tuple(
            r.prediction.peak_allocated_bytes / r.measurement.peak_allocated_bytes - 1.0
            for r in measured.values()
            if r.prediction is not None and r.measurement is not None
        ),
        records=snapshot.records,
        notes=() if is_same_card else (other,),
    )


def _refuse_other_texts(snapshot: StudySnapshot, texts: TextsSummary | None) -> None:
    known = snapshot.definition.texts
    if (known and known.fingerprint) == (texts and texts.fingerprint):
        return
    trained = "full rows of random tokens" if known is None else known.source
    asked = "full rows" if texts is None else texts.source
    do = "leave --study out" if known is None else f"name them with --data {known.source}"
    raise InputError(
        f"study '{snapshot.name}' trained on {trained}, and the plan is about {asked}: {do}"
    )


def _host(target: Target) -> str | None:
    """Return the name of the GPU that really ran the trials, where the catalogue has it."""
    if target.emulated_on is None:
        return target.gpu if target.gpu in gpu_catalogue() else None
    host = match_product(target.emulated_on)
    return None if host is None else host.name


class WhenRead(Mapping[K, V], Generic[K, V]):
    """A mapping that is made at the first look."""

    def __init__(self, make: Callable[[], Mapping[K, V]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Mapping[K, V]:
        return self._make()

    def __getitem__(self, key: K) -> V:
        return self._made[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def with_target_speeds(snapshot: StudySnapshot) -> StudySnapshot:
    """Return a study with its trials' speeds on the target GPU, worked out when first read.

    Nothing is added where the target ran itself, or is a GPU that the catalogue does not know.
    """
    records = (*snapshot.records, *snapshot.confirmations)
    return replace(snapshot, target_speeds=target_speeds(snapshot.definition, records))


def target_speeds(
    definition: StudyDefinition, records: Sequence[TrialRecord]
) -> Mapping[int, TargetSpeed]:
    """Return what is predicted of a study's trials on the GPU it is for, by number; nothing where
    that GPU ran itself, or is not in the catalogue.

    It is what `sweep plan` says of each configuration there. What the stand-in measured does not
    calibrate that: factors fitted to a study's steps on an H200 leave the published steps of six
    other GPUs no better predicted.
    """
    if definition.target.emulated_on is None:
        return {}
    try:
        gpu = find_gpu(definition.target.gpu)
    except InputError:
        return {}
    return WhenRead(lambda: _speeds(records, ModelSpec.from_json(definition.model), gpu))


def _speeds(
    records: Sequence[TrialRecord], model: ModelSpec, gpu: GpuSpec
) -> Mapping[int, TargetSpeed]:
    measured = [(record, record.measurement) for record in records if record.measurement]
    if not measured:
        return {}
    times = StepTimes([record.config for record, _ in measured], model=model, gpu=gpu)
    seconds, unsure = times.seconds(None).tolist(), times.uncertainty(None).tolist()
    return {
        record.number: _speed(measurement, step, error)
        for (record, measurement), step, error in zip(measured, seconds, unsure, strict=True)
        if math.isfinite(step)
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


def with_memory_forecasts(snapshot: StudySnapshot, *, cache_dir: Path) -> StudySnapshot:
    """Return a study with what its configurations would need, each worked out when it is asked for.

    Args:
        snapshot: of a study on a GPU; on the CPU memory is not predicted, and nothing is added.
        cache_dir: where structures that were traced are kept; a report waits for no other.
    """
    target = snapshot.definition.target
    if target.device != "cuda":
        return snapshot
    model, ran_on = (
        ModelSpec.from_json(snapshot.definition.model),
        match_product(target.emulated_on or target.gpu),
    )
    predictor = TracingPredictor(
        model,
        cache_dir=cache_dir,
        compute_capability=None if ran_on is None else ran_on.compute_capability,
        tracer=_Nobody(),
    )
    tried = [record.config for record in snapshot.records]
    known = KeptForecasts(tried, model=model, predictor=predictor, budget_bytes=target.budget_bytes)
    return replace(snapshot, memory_forecasts=known)


class KeptForecasts(Mapping[TrialConfig, MemoryForecast]):
    """What configurations would need; of those whose structure is kept alone.

    Any configuration may be asked for; those that were tried are listed.
    """

    def __init__(
        self,
        tried: Sequence[TrialConfig],
        *,
        model: ModelSpec,
        predictor: MemoryPredictor,
        budget_bytes: int,
    ) -> None:
        self._tried = dict.fromkeys(tried)
        self._forecaster = Forecaster(
            model=model,
            budget_bytes=budget_bytes,
            predictor=predictor,
            violation=lambda _: None,
            warn=lambda _: None,
        )

    def __getitem__(self, config: TrialConfig) -> MemoryForecast:
        forecast = self._forecaster.expect(config)
        if config not in self._tried and (least := forecast.far_beyond_bytes) is not None:
            # Replaying the allocator takes most of a prediction, and would only add to it.
            return MemoryForecast(least, {}, "no")
        if forecast.memory is None:
            raise KeyError(config)
        fits: Any = forecast.fit.value
        return MemoryForecast(forecast.memory.peak_allocated_bytes, forecast.memory.breakdown, fits)

    def __iter__(self) -> Iterator[TrialConfig]:
        return (config for config in self._tried if config in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Nobody:
    """A tracer that traces nothing: what is not kept is not known."""

    def trace(self, model: ModelSpec, structure: Structure) -> dict[str, Any]:
        raise Untraceable(f"model '{model.name}': the structure {structure} was not traced before")

    def trace_all(
        self, model: ModelSpec, structures: Iterable[Structure]
    ) -> Generator[tuple[Structure, Traced]]:
        for structure in structures:
            yield structure, Untraceable(f"model '{model.name}': nothing is traced here")
