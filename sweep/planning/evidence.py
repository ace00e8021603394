"""What a stored study says to a forecast, and what is predicted of a stored study's trials."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from search_spaces.config import TrialConfig, canonical
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec, match_product
from search_spaces.models import ModelSpec
from search_spaces.texts import TextsSummary
from storage.confirmations import noise
from storage.definition import MemoryForecast, StudyDefinition, StudySnapshot, TargetSpeed
from storage.ranking import fitting, rankable
from storage.records import Measurement, OutOfMemory, TrialRecord
from sweep.predict.forecast import Evidence, Forecaster, calibrated
from sweep.predict.memory.predictor import TracingPredictor
from sweep.predict.memory.profile_store import Traced
from sweep.predict.memory.profiles import Structure, Untraceable
from sweep.predict.on_texts import ShapesOnTexts
from sweep.predict.speed.predictor import StepTimes, within
from sweep.predict.speed.stand_in import StandIn


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
        raise InputError(f"study '{snapshot.name}' ran on a CPU and says nothing of a GPU")
    ran_on = target.emulated_on or target.gpu
    is_same_card = match_product(ran_on) == gpu
    # As everywhere, the last trial of a configuration that came to a conclusion decides.
    measured = {canonical(r.config): r for r in fitting(rankable(snapshot.records))}
    steady = [r for r in measured.values() if r.measurement and not r.measurement.is_noisy]
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
    do = "leave --from out" if known is None else f"name them with --data {known.source}"
    raise InputError(
        f"study '{snapshot.name}' trained on {trained}, and the plan is about {asked}: {do}"
    )


def with_target_speeds(snapshot: StudySnapshot) -> StudySnapshot:
    """Return a study with its trials' speeds on the target GPU.

    Nothing is added where the target ran itself, or is a GPU that the catalogue does not know.
    """
    records = (*snapshot.records, *snapshot.confirmations)
    return replace(snapshot, target_speeds=target_speeds(snapshot.definition, records))


def target_speeds(
    definition: StudyDefinition, records: Sequence[TrialRecord]
) -> Mapping[int, TargetSpeed]:
    """Return the speeds of a study's trials on the GPU it is for, by number; nothing where that GPU
    ran itself, or is not in the catalogue.

    It is what `sweep plan` says of each configuration there, corrected by what the GPU that stood
    in measured of it (`sweep.predict.speed.stand_in`). A trial that was not measured has what is
    predicted. Every trial of a configuration has one speed.
    """
    gpu, stood_in = match_product(definition.target.gpu), definition.target.emulated_on
    if stood_in is None or gpu is None:
        return {}
    model = ModelSpec.from_json(definition.model)
    configs = dict.fromkeys(canonical(record.config) for record in records)
    rows = {config: row for row, config in enumerate(configs)}
    if not rows:
        return {}
    target = StepTimes(list(rows), model=model, gpu=gpu)
    log_seconds, own_spread = np.log(target.seconds), np.array(target.own_spread)
    host, measured = match_product(stood_in), _measured_by_row(records, rows)
    if host is not None and measured:
        both = StandIn(StepTimes(list(rows), model=model, gpu=host), target)
        at = np.array(list(measured))
        noises = np.array([noise([one]) for one in measured.values()])
        took = np.log([one.step_seconds for one in measured.values()])
        log_seconds[at] += both.log_corrections(at, took, noises)
        own_spread[at] = both.left_spread(at, noises)
    # What is gained by a measurement is of the step's own part alone.
    spreads = np.sqrt(target.log_spread**2 - target.own_spread**2 + own_spread**2)
    tokens = target.tokens_per_second * target.seconds
    found = {}
    for record in records:
        row = rows[canonical(record.config)]
        seconds = math.exp(log_seconds[row])
        if not math.isfinite(seconds):
            continue
        trained = float(tokens[row])
        if record.measurement is not None:
            # As many tokens that carry loss as where it was measured: all of them, but for rows
            # that the user's texts left padded.
            trained = record.measurement.tokens_per_second * record.measurement.step_seconds
        spread = float(spreads[row])
        low, high = within(speed := trained / seconds, spread)
        common = tuple(target.common_spreads[row].tolist())
        own = float(own_spread[row])
        found[record.number] = TargetSpeed(speed, low, high, "predicted", spread, own, common)
    return found


def _measured_by_row(
    records: Sequence[TrialRecord], rows: Mapping[TrialConfig, int]
) -> Mapping[int, Measurement]:
    """Return what decides what was measured of each configuration: its newest trial of the search,
    else the newest run that confirmed it. Speeds of two processes do not compare."""
    measured: dict[int, Measurement] = {}
    for is_search in (False, True):
        for record in records:
            known = record.measurement
            if known is not None and known.is_sound and (record.purpose == "search") is is_search:
                measured[rows[canonical(record.config)]] = known
    return measured


def with_memory_forecasts(snapshot: StudySnapshot, *, cache_dir: Path) -> StudySnapshot:
    """Return a study with what its configurations would need, each worked out when it is asked for.

    Args:
        snapshot: of a study on a GPU; on the CPU memory is not predicted, and nothing is added.
        cache_dir: where structures that were traced are kept; a report waits for no other.
    """
    target, model = snapshot.definition.target, ModelSpec.from_json(snapshot.definition.model)
    if target.device != "cuda":
        return snapshot
    ran_on = match_product(target.emulated_on or target.gpu)
    predictor = TracingPredictor(
        model,
        cache_dir=cache_dir,
        compute_capability=None if ran_on is None else ran_on.compute_capability,
        tracer=_Nobody(),
    )
    forecaster = Forecaster(
        model=model,
        budget_bytes=target.budget_bytes,
        predictor=predictor,
        violation=lambda _: None,
        warn=lambda _: None,
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
        least, error = int(known.least_bytes[0]), float(known.errors[0])
        if config not in self._tried and least * (1.0 - error) > known.budget_bytes:
            # Replaying the allocator takes most of a prediction, and would only add to it.
            return MemoryForecast(least, {}, "no")
        memory = known.memory(0)
        if memory is None:
            raise KeyError(config)
        return MemoryForecast(memory.peak_allocated_bytes, memory.breakdown, known.fit(0).value)

    def __iter__(self) -> Iterator[TrialConfig]:
        return (config for config in self._tried if config in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Nobody:
    """A tracer that traces nothing: what is not kept is not known."""

    def trace_all(
        self, model: ModelSpec, structures: Iterable[Structure]
    ) -> Generator[tuple[Structure, Traced]]:
        for structure in structures:
            yield structure, Untraceable(f"model '{model.name}': nothing is traced here")
