"""Studies of recorded trials: a surface's rows as a space and as records, and searches of them.

A sampler may ask for the surface's configurations and nothing else, knows the same of them as every
other, and is told what was recorded.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler

from qlora_sweep.reports import units
from qlora_sweep.search_spaces.config import CONFIG_KEYS, TrialConfig
from qlora_sweep.search_spaces.documents import Document, validate
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.linears import lora_parameters
from qlora_sweep.search_spaces.loading import parse_space, shipped_presets
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.presets import starting_text
from qlora_sweep.search_spaces.rules import Violation
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage import codec
from qlora_sweep.storage.definition import StudyDefinition, StudySnapshot, Target
from qlora_sweep.storage.records import Measured, Measurement, Outcome, OutOfMemory, TrialRecord
from qlora_sweep.storage.surfaces import Surface, SurfaceRow, read_surface
from qlora_sweep.sweep.predict.building import build_forecaster
from qlora_sweep.sweep.predict.forecast import Forecaster, SpeedForecast, SpeedModel
from qlora_sweep.sweep.predict.memory.prediction import (
    MemoryPrediction,
    WholeMemory,
    stated_uncertainty,
)
from qlora_sweep.sweep.predict.memory.predictor import MemoryPredictor
from qlora_sweep.sweep.predict.memory.profile_store import OnProgress, tell_nobody
from qlora_sweep.sweep.sampling.encoding import Candidate, Candidates, Params, identity
from qlora_sweep.sweep.sampling.guided import GuidedSampler
from qlora_sweep.sweep.sampling.samplers import WithoutRepeats, optunas_own, quiet_optuna

PAUSE_SECONDS = 0.2
"""Before each thing that a recorded trial is shown to do."""


def space_of(surface: Surface, space: SearchSpace) -> SearchSpace:
    """Return the space of what was recorded, for the GPU, the budget and the baseline of ``space``.

    Nothing is measured again: of each configuration there is one recorded run.

    Raises:
        InputError: the space is of another model, or of a dataset.
    """
    if space.model != surface.model.name or space.data is not None:
        raise InputError(
            f"{surface.name}: its trials are of {surface.model.name} on random examples: say "
            f"--model {surface.model.name}, and leave --data out"
        )
    known = {
        key: list(dict.fromkeys(getattr(row.config, key) for row in surface.rows))
        for key in CONFIG_KEYS
    }
    free = {key: values for key, values in known.items() if len(values) > 1}
    choices = {key: sorted(of) if _are_numbers(of) else of for key, of in free.items()}
    values = space.model_dump() | {
        "name": f"{space.name}-recorded",
        "confirm": None,
        "leave_out": [],
        "dimensions": {key: {"choices": of} for key, of in choices.items()},
        "fixed": {key: values[0] for key, values in known.items() if key not in free},
    }
    return validate(SearchSpace, values, Document(surface.name))


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def target_of(surface: Surface, target: Target) -> Target:
    """Return a target whose trials are a surface's."""
    product, date = units.with_article(surface.card.product), surface.header.date
    return target.model_copy(update={"recorded": f"{product}, {date}" if date else product})


def within(surface: Surface, space: SearchSpace, *, budget_bytes: int) -> Surface:
    """Return what of a surface says something of a space under a budget.

    Raises:
        InputError: nothing does.
    """
    rows = tuple(row for row in surface.rows if space.holds(row.config))
    if budget_bytes > (surface.header.budget_bytes or math.inf):
        # What ran out of a smaller budget may fit this one.
        rows = tuple(row for row in rows if row.verdict != "oom")
    if not rows:
        fixed = ", ".join(f"{key} {value}" for key, value in space.fixed.items())
        raise InputError(f"{surface.name}: no recorded trial has {fixed}")
    return replace(surface, rows=rows)


def recorded_study(name: str) -> StudySnapshot:
    """Return a surface as a study that tried all of it, for the GPU that its file names.

    Its baseline is that of the first preset whose baseline was recorded.

    Raises:
        InputError: as `read_surface` does.
    """
    surface = read_surface(name)
    gpu = find_gpu(surface.gpu)
    own = parse_space(starting_text(gpu.name, None), label=gpu.name)
    own = own.model_copy(update={"model": surface.model.name})
    known = {identity(row.config) for row in surface.rows}
    baselines = [space.baseline_config() for space in (own, *shipped_presets())]
    baseline = next((b for b in baselines if identity(b) in known), baselines[0])
    values = own.model_dump() | {"baseline": baseline.model_dump()}
    space = space_of(surface, validate(SearchSpace, values, Document(surface.name)))
    budget_bytes = surface.header.budget_bytes or gpu.budget_bytes
    target = Target(
        gpu=gpu.name,
        device="cuda",
        budget_bytes=budget_bytes,
        emulated_on=None if surface.card == gpu else surface.card.product,
    )
    records = [
        record.model_copy(update={"is_baseline": identity(record.config) == identity(baseline)})
        for record in records_of(surface, budget_bytes=budget_bytes)
    ]
    return StudySnapshot(
        name=Path(surface.name).stem,
        definition=StudyDefinition(
            space=space,
            model=surface.model.to_json(),
            model_fingerprint=surface.model.fingerprint,
            target=target_of(surface, target),
        ),
        environment={},
        records=tuple(records),
        wall_seconds=sum(record.device_seconds for record in records),
    )


def records_of(surface: Surface, *, budget_bytes: int) -> list[TrialRecord]:
    """Return a surface's rows as the trials of a study under a budget."""
    return [
        record_of(row, surface.model, number=number, budget_bytes=budget_bytes)
        for number, row in enumerate(surface.rows)
    ]


def record_of(row: SurfaceRow, model: ModelSpec, *, number: int, budget_bytes: int) -> TrialRecord:
    """Return a row as the trial of a number, of a study under a budget."""
    seconds, speed = row.step_seconds or 0.0, row.tokens_per_second or 0.0
    outcome: Outcome = OutOfMemory(stage="forward")
    if row.fits(budget_bytes):
        measurement = Measurement(
            tokens_per_second=speed,
            samples_per_second=speed / row.config.seq_len,
            step_seconds=seconds,
            step_seconds_ci95=row.step_seconds_ci95,
            steps_measured=1,
            steps_warmup=1,
            peak_allocated_bytes=row.peak_allocated_bytes or 0,
            peak_reserved_bytes=row.peak_reserved_bytes,
            trainable_parameters=lora_parameters(row.config, model) or 0,
            final_loss=0.0,
            setup_seconds=0.0,
            measured_seconds=seconds,
        )
        outcome = Measured(measurement=measurement)
    device_seconds = row.device_seconds or 0.0
    return TrialRecord(
        number=number, config=row.config, outcome=outcome, device_seconds=device_seconds
    )


def recorded_peaks(surface: Surface) -> dict[str, int]:
    """Return what a surface says was predicted of its rows, bytes by identity."""
    known = ((identity(row.config), row.predicted_peak_allocated_bytes) for row in surface.rows)
    return {key: peak for key, peak in known if peak is not None}


class RecordedPeaks(MemoryPredictor):
    """Answers with peaks that were predicted before.

    Args:
        peaks: bytes, by the identity of a configuration.
    """

    def __init__(self, peaks: Mapping[str, int]) -> None:
        self._peaks = peaks

    def predict_all(
        self, configs: Sequence[TrialConfig], *, on_progress: OnProgress = tell_nobody
    ) -> WholeMemory:
        """See `MemoryPredictor.predict_all`."""
        return WholeMemory(configs, [self._known(config) for config in configs])

    def _known(self, config: TrialConfig) -> MemoryPrediction | InputError:
        peak = self._peaks.get(identity(config))
        if peak is None:
            return InputError("of some rows there is no prediction")
        stated = stated_uncertainty(config)
        return MemoryPrediction(
            peak_allocated_bytes=peak,
            breakdown={},
            moment="backward",
            uncertainty=stated.allocated,
            reserved_uncertainty=stated.reserved,
        )


def only_recorded(surface: Surface) -> Callable[[TrialConfig], Violation | None]:
    """Return the rule of a study of recorded trials: nothing is known of any other."""
    known = {identity(row.config) for row in surface.rows}
    unknown = Violation("not-recorded", "no trial of it was recorded")
    return lambda config: None if identity(config) in known else unknown


SamplerName = Literal["guided", "tpe", "gp", "random"]
SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)
WITHIN = 0.02
"""Relative: a trial this near to the best of the surface has found it."""
DRAWS: Mapping[str, int] = {"tpe": 4, "gp": 1, "random": 16}
"""Times that one of Optuna's samplers may draw until it meets a row that is there.

Each draw of gp is an optimization of its own, and most come out the same.
"""


def forecast_of(surface: Surface) -> SpeedModel:
    """Return the speed model of the GPU that a surface was measured on."""
    return SpeedForecast(model=surface.model, gpu=surface.card)


@dataclass(frozen=True)
class Recorded:
    """A surface under a budget, with what is predicted of its rows.

    Picklable, so that other processes can search it.
    """

    surface: Surface
    budget_bytes: int
    peaks: Mapping[str, int]
    """Predicted allocated peak by the identity of a configuration; those not there are not
    predicted."""
    speed: Callable[[Surface], SpeedModel] = forecast_of
    """Makes the speed model of one search."""

    @property
    def best(self) -> SurfaceRow:
        """The fastest row that fits."""
        return self.surface.fitting(self.budget_bytes)[0]

    def is_found(self, row: SurfaceRow) -> bool:
        """Whether a row fits, and is about as fast as the best."""
        least = (self.best.tokens_per_second or 0.0) * (1.0 - WITHIN)
        return row.fits(self.budget_bytes) and (row.tokens_per_second or 0.0) >= least


@dataclass(frozen=True)
class Search:
    """One search of one sampler, until it was near the best."""

    trials: int
    oom: int
    device_seconds: float
    ask_seconds: tuple[float, ...]


def search(recorded: Recorded, sampler: SamplerName, *, seed: int) -> Search:
    """Let a sampler search a surface until it is near the best, and count what that takes."""
    rows, asks = list[SurfaceRow](), list[float]()
    for row, seconds in trials_of(recorded, sampler, seed=seed):
        rows.append(row)
        asks.append(seconds)
        if recorded.is_found(row):
            break
    ooms = sum(not row.fits(recorded.budget_bytes) for row in rows)
    device_seconds = sum(row.device_seconds or 0.0 for row in rows)
    return Search(len(rows), ooms, device_seconds, tuple(asks))


def trials_of(
    recorded: Recorded, sampler: SamplerName, *, seed: int
) -> Iterator[tuple[SurfaceRow, float]]:
    """Yield the trials that a sampler asks for, one after the other, until every row was tried,
    each with the seconds that asking took.

    What the pre-flight refuses is asked for when nothing else is left, and then tried after all.
    """
    quiet_optuna()
    rows, forecaster = Rows(recorded.surface, seed=seed), forecaster_of(recorded)
    chooser = sampler_of(sampler, rows, forecaster, seed=seed)
    study = optuna.create_study(sampler=chooser, direction="maximize")
    for _ in rows.all:
        started = time.perf_counter()
        trial = study.ask(rows.free)
        seconds = time.perf_counter() - started
        row = rows.row_of(trial.params)
        assert row is not None, "a sampler asks for rows alone"
        tell(study, trial, row, recorded, forecaster)
        yield row, seconds


def forecaster_of(recorded: Recorded) -> Forecaster:
    """Return what is predicted of a surface's rows; every one was run, so no rule forbids it."""
    surface = recorded.surface
    return build_forecaster(
        surface.model,
        Target(gpu=surface.card.name, device="cuda", budget_bytes=recorded.budget_bytes),
        shapes=None,
        predictor=RecordedPeaks(recorded.peaks),
        violation=lambda _: None,
        speed=recorded.speed(surface),
        is_cut_up=False,
    )


def tell(
    study: optuna.Study,
    trial: optuna.Trial,
    row: SurfaceRow,
    recorded: Recorded,
    forecaster: Forecaster,
) -> None:
    """Tell a study of one objective, and the forecaster, what a trial of a row comes to."""
    budget_bytes = recorded.budget_bytes
    record = record_of(row, recorded.surface.model, number=trial.number, budget_bytes=budget_bytes)
    prediction = forecaster.expect(row.config).record
    record = record.model_copy(update={"prediction": prediction})
    result = codec.to_optuna(record, objectives=("tokens_per_second",), budget_bytes=budget_bytes)
    for key, value in result.attributes.items():
        trial.set_user_attr(key, value)
    trial.set_constraint(codec.CONSTRAINT, result.violation)
    study.tell(trial, values=result.values, state=result.state)
    forecaster.learn(record)


def sampler_of(name: SamplerName, rows: Rows, forecaster: Forecaster, *, seed: int) -> BaseSampler:
    """Return a sampler that asks for a surface's rows."""
    if name != "guided":
        inner = optunas_own(name, seed=seed)
        return WithoutRepeats(inner, rows, forecaster=forecaster, attempts=DRAWS[name])
    guided = GuidedSampler(rows, forecaster=forecaster, seed=seed)
    guided.prepare()
    return guided


class Rows(Candidates):
    """The rows of a surface as candidates, in an order that the seed gives; see `Candidates`.

    Numbers are counted in the order of the values that occur, so that one of Optuna's samplers
    knows what lies between what. What order the rows had in the file shows nowhere.
    """

    is_listed = True
    is_whole = True

    def __init__(self, surface: Surface, *, seed: int) -> None:
        by_key = {identity(row.config): row for row in surface.rows}
        keys = sorted(by_key)
        random.Random(seed).shuffle(keys)
        self.free: dict[str, BaseDistribution] = {}
        params: dict[str, Params] = {key: {} for key in keys}
        for name in CONFIG_KEYS:
            values = {key: _value(name, by_key[key].config) for key in keys}
            if len({*values.values()}) == 1:
                continue
            if _are_numbers(values.values()):
                order = sorted({*values.values()})
                self.free[name] = IntDistribution(0, len(order) - 1)
                values = {key: order.index(value) for key, value in values.items()}
            else:
                self.free[name] = CategoricalDistribution(sorted({*values.values()}, key=str))
            for key, value in values.items():
                params[key][name] = value
        self.all = tuple(Candidate(params[key], by_key[key].config, key) for key in keys)
        self._rows = {frozenset(params[key].items()): by_key[key] for key in keys}
        self._places = np.array([self._place(candidate.params) for candidate in self.all])

    def near(self, best: Sequence[Params]) -> tuple[Candidate, ...]:
        """See `Candidates.near`."""
        return self.all

    def row_of(self, params: Params) -> SurfaceRow | None:
        """Return the row of a trial's parameters; None where there is none."""
        return self._rows.get(frozenset(params.items()))

    def config(self, params: Params) -> TrialConfig | None:
        """See `Candidates.config`."""
        row = self.row_of(params)
        return None if row is None else row.config

    def instead_of(self, params: Params) -> Iterator[Params]:
        """Yield the rows, the nearest first."""
        apart = np.abs(self._places - np.array(self._place(params))).sum(axis=1)
        return (self.all[at].params for at in np.argsort(apart, kind="stable"))

    def _place(self, params: Params) -> list[float]:
        """Return where parameters lie: numbers from 0 to 1, words as 0 or 1 each, so that a word
        that differs is as far as the ends of a number."""
        place: list[float] = []
        for name, distribution in self.free.items():
            if isinstance(distribution, IntDistribution):
                place.append(params[name] / distribution.high)
            else:
                choices = cast(CategoricalDistribution, distribution).choices
                place += [0.5 * (params[name] == choice) for choice in choices]
        return place


def _value(key: str, config: TrialConfig) -> Any:
    """Return a setting's value: a number, or JSON text of anything else."""
    # An effective batch or an alpha that is left out follows from the other settings.
    value = {
        "effective_batch_size": config.samples_per_step,
        "lora_alpha": config.alpha,
    }.get(key, getattr(config, key))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else json.dumps(value)
