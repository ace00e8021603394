"""What a stored study says to a forecast, and what is predicted of a stored study's trials."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.dataset_choice import DatasetSummary
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.gpus import GpuSpec, match_product
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage.confirmations import BETWEEN_RUNS
from qlora_sweep.storage.definition import (
    MemoryForecast,
    StudyDefinition,
    StudySnapshot,
    TargetSpeed,
)
from qlora_sweep.storage.ranking import fitting
from qlora_sweep.storage.records import OutOfMemory, TrialRecord
from qlora_sweep.sweep.predict.building import build_forecaster, shapes_of_study
from qlora_sweep.sweep.predict.forecast import Evidence, Forecaster, calibrated
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import Traced
from qlora_sweep.sweep.predict.memory.profiles import Structure, Untraceable
from qlora_sweep.sweep.predict.on_dataset import ShapesOnDataset
from qlora_sweep.sweep.predict.speed.predictor import within
from qlora_sweep.sweep.predict.speed.stand_in import Array, Took


def evidence_from(
    snapshot: StudySnapshot,
    *,
    model: ModelSpec,
    gpu: GpuSpec,
    dataset: DatasetSummary | None = None,
    shapes: ShapesOnDataset | None = None,
) -> Evidence:
    """Return what a study says of ``model`` on ``gpu``.

    Args:
        snapshot: the study.
        model: what would be trained.
        gpu: of the plan.
        dataset: what the plan is about; None for full rows.
        shapes: what configurations come to on those.

    Raises:
        InputError: the study is about another model or other texts, or ran on a CPU.
    """
    _refuse_other_dataset(snapshot, dataset)
    definition = snapshot.definition
    target = definition.target
    if definition.model_fingerprint != model.fingerprint:
        raise InputError(
            f"study '{snapshot.name}' is about model '{definition.model.get('name')}' and says "
            f"nothing of '{model.name}'"
        )
    if not target.is_on_gpu:
        raise InputError(f"study '{snapshot.name}' ran on a CPU and says nothing of a GPU")
    ran_on = target.emulated_on or target.gpu
    is_same_gpu = match_product(ran_on) == gpu
    # As everywhere, the last trial of a configuration that came to a conclusion decides.
    measured = {canonical(record.config): record for record in fitting(snapshot.records)}
    steady: list[TrialRecord] = []
    memory_errors: list[float] = []
    for record in measured.values():
        measurement = record.measurement
        if measurement is None:
            continue
        if not measurement.is_noisy:
            steady.append(record)
        if record.prediction is not None:
            predicted = record.prediction.peak_allocated_bytes
            memory_errors.append(predicted / measurement.peak_allocated_bytes - 1.0)
    ran_out: set[TrialConfig] = set()
    for record in snapshot.records:
        if isinstance(record.outcome, OutOfMemory):
            ran_out.add(canonical(record.config))
    calibration = None
    notes: tuple[str, ...] = ()
    if is_same_gpu:
        calibration = calibrated(steady, model=model, gpu=gpu, shapes=shapes)
    else:
        ran = f"study '{snapshot.name}' ran on {ran_on}"
        notes = (f"{ran}: its speeds do not calibrate the {gpu.name}'s",)
    return Evidence(
        study=snapshot.name,
        budget_bytes=target.budget_bytes,
        calibration=calibration,
        trials=measured,
        ran_out=frozenset(ran_out.difference(measured)),
        is_same_gpu=is_same_gpu,
        memory_errors=tuple(memory_errors),
        records=snapshot.records,
        notes=notes,
    )


def _refuse_other_dataset(snapshot: StudySnapshot, dataset: DatasetSummary | None) -> None:
    known = snapshot.definition.texts
    if (known and known.fingerprint) == (dataset and dataset.fingerprint):
        return
    trained = "full rows of random tokens" if known is None else known.source
    asked = "full rows" if dataset is None else dataset.source
    do = "leave --from out" if known is None else f"name them with --data {known.source}"
    raise InputError(
        f"study '{snapshot.name}' trained on {trained}, and the plan is about {asked}: {do}"
    )


def with_target_speeds(snapshot: StudySnapshot) -> StudySnapshot:
    """Return a study with its trials' speeds on the target GPU.

    Nothing is added where the target ran itself, or is a GPU that the catalogue does not know; a
    warning where the study's dataset is not here.
    """
    definition = snapshot.definition
    warnings = snapshot.warnings
    speeds = target_speeds(definition, snapshot.records + snapshot.confirmations)
    if definition.target.emulated_on is not None and not _has_its_dataset(definition):
        assert definition.texts is not None, "a study without a dataset needs none"
        why = f"what was prepared of {definition.texts.source} is not on this machine"
        warnings += (f"{why}: speeds on the {definition.target.gpu} are not shown",)
    return replace(snapshot, target_speeds=speeds, warnings=warnings)


def _has_its_dataset(definition: StudyDefinition) -> bool:
    try:
        shapes_of_study(definition)
    except EnvironmentFault:
        return False
    return True


def target_speeds(
    definition: StudyDefinition, records: Sequence[TrialRecord]
) -> Mapping[int, TargetSpeed]:
    """Return the speeds of a study's trials on the GPU it is for, by number; nothing where that GPU
    ran itself, is not in the catalogue, or the study's dataset is not here.

    It is what `sweep plan` says of each configuration there, corrected by what the GPU that stood
    in measured of it (`sweep.predict.speed.stand_in`). A trial that was not measured has what is
    predicted. Every trial of a configuration has one speed.
    """
    known = OnTarget(definition, records)
    speeds: dict[int, TargetSpeed] = {}
    for record in records:
        speed = known.speed_of(record.config)
        if speed is not None:
            speeds[record.number] = speed
    return speeds


class OnTarget:
    """What is predicted of configurations on the GPU that a study is for, where another stood in.

    Args:
        definition: the study's.
        records: its trials, whose configurations are asked about, and what they measured.
        running: configurations that run.
    """

    def __init__(
        self,
        definition: StudyDefinition,
        records: Sequence[TrialRecord],
        running: Sequence[TrialConfig] = (),
    ) -> None:
        self._rows: dict[TrialConfig, int] = {}
        target = definition.target
        trials = [record.config for record in records]
        configs = dict.fromkeys(map(canonical, itertools.chain(trials, running)))
        if target.emulated_on is None or match_product(target.gpu) is None or not configs:
            return
        try:
            shapes = shapes_of_study(definition)
        except EnvironmentFault:
            return
        model = ModelSpec.from_json(definition.model)
        forecaster = build_forecaster(model, target, shapes=shapes, predictor=None)
        stand_in = forecaster.forecast(list(configs)).target
        if stand_in is None:
            return
        self._stand_in = stand_in
        self._rows = {config: row for row, config in enumerate(configs)}
        self._measured = {self._rows[config]: took for config, took in _steps(records).items()}
        self._log_seconds = stand_in.corrected(self._measured)
        self._own = stand_in.own_spread(self._measured)

    def _tokens(self, row: int) -> float:
        """Return how many supervised tokens a step trains on."""
        target = self._stand_in.target
        return float(target.tokens_per_second[row] * target.seconds[row])

    def speed_of(self, config: TrialConfig) -> TargetSpeed | None:
        """Return the speed of a configuration that was asked about; None where nothing is
        predicted."""
        row = self._rows.get(canonical(config))
        if row is None:
            return None
        return self._speed(row, self._log_seconds, self._own)

    def speed_at(self, config: TrialConfig, tokens_per_second: float) -> TargetSpeed | None:
        """Return the same of a configuration that runs, were it to end at so many tokens/s."""
        row = self._rows.get(canonical(config))
        if row is None:
            return None
        took = Took(self._tokens(row) / tokens_per_second, BETWEEN_RUNS)
        measured = {**self._measured, row: took}
        log_seconds = self._stand_in.corrected(measured)
        return self._speed(row, log_seconds, self._stand_in.own_spread(measured))

    def _speed(self, row: int, log_seconds: Array, own_spread: Array) -> TargetSpeed | None:
        target = self._stand_in.target
        if not target.is_known[row]:
            return None
        own = float(own_spread[row])
        speed = self._tokens(row) / math.exp(log_seconds[row])
        # What a measurement tells is of the step's own part alone.
        others = float(target.log_spread[row]) ** 2 - float(target.own_spread[row]) ** 2
        spread = math.sqrt(others + own**2)
        low, high = within(speed, spread).ends
        common = tuple(target.common_spreads[row].tolist())
        return TargetSpeed(speed, low, high, "predicted", spread, own, common)


def _steps(records: Sequence[TrialRecord]) -> Mapping[TrialConfig, Took]:
    """Return what was measured of each configuration: by its newest trial of the search, else by
    the newest run that confirmed it, as speeds of two processes do not compare."""
    steps: dict[TrialConfig, Took] = {}
    for is_search in (False, True):
        for record in records:
            measurement = record.measurement
            if measurement is not None and (record.purpose == "search") is is_search:
                steps[canonical(record.config)] = Took.of(measurement)
    return steps


def with_memory_forecasts(snapshot: StudySnapshot, *, cache_dir: Path) -> StudySnapshot:
    """Return a study with what its configurations would need, each worked out when it is asked for.

    Args:
        snapshot: of a study on a GPU; on the CPU memory is not predicted, and nothing is added,
            nor where the study's dataset is not here.
        cache_dir: where structures that were traced are kept; a report waits for no other.
    """
    target = snapshot.definition.target
    model = ModelSpec.from_json(snapshot.definition.model)
    if not target.is_on_gpu:
        return snapshot
    try:
        shapes = shapes_of_study(snapshot.definition)
    except EnvironmentFault:
        return snapshot
    ran_on = match_product(target.emulated_on or target.gpu)
    predictor = TracingPredictor(
        model,
        cache_dir=cache_dir,
        compute_capability=None if ran_on is None else ran_on.compute_capability,
        tracer=_NoTracer(),
    )
    forecaster = build_forecaster(
        model, target, shapes=shapes, predictor=predictor, warn=lambda _: None
    )
    known = KeptForecasts([record.config for record in snapshot.records], forecaster)
    return replace(snapshot, memory_forecasts=known)


class KeptForecasts(Mapping[TrialConfig, MemoryForecast]):
    """What configurations would need; of those whose structure is kept alone.

    Any configuration may be asked for; those that were tried are listed.
    """

    def __init__(self, tried: Sequence[TrialConfig], forecaster: Forecaster) -> None:
        self._tried = dict.fromkeys(tried)
        self._forecaster = forecaster

    def __getitem__(self, config: TrialConfig) -> MemoryForecast:
        known = self._forecaster.forecast([config])
        least = int(known.least_bytes[0])
        error = float(known.errors[0])
        if config not in self._tried and least * (1.0 - error) > known.budget_bytes:
            # Replaying the allocator takes most of a prediction, and would only add to it.
            return MemoryForecast(least, {}, "no")
        memory = known.memory(0)
        if memory is None:
            raise KeyError(config)
        return MemoryForecast(memory.peak_allocated_bytes, memory.breakdown, known.fit(0).value)

    def __iter__(self) -> Iterator[TrialConfig]:
        return filter(self.__contains__, self._tried)

    def __len__(self) -> int:
        return len(list(iter(self)))


class _NoTracer:
    """A tracer that traces nothing: structures that are not in the cache are not predicted."""

    def trace_all(
        self, model: ModelSpec, structures: Iterable[Structure]
    ) -> Generator[tuple[Structure, Traced]]:
        for structure in structures:
            yield structure, Untraceable(f"model '{model.name}': nothing is traced here")

    def close(self) -> None:
        """See `Tracer.close`: it holds nothing."""
