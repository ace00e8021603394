"""Searches of recorded trials: how many rows of a surface a sampler tries.

A sampler may ask for the surface's configurations and nothing else, knows the same of them as every
other, and is told what was recorded.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler

from qlora_sweep.search_spaces.config import CONFIG_KEYS, TrialConfig
from qlora_sweep.storage import codec
from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.surfaces import Surface, SurfaceRow
from qlora_sweep.sweep.predict.building import build_forecaster
from qlora_sweep.sweep.predict.forecast import Forecaster, SpeedForecast, SpeedModel
from qlora_sweep.sweep.sampling.encoding import Candidate, Candidates, Params, identity
from qlora_sweep.sweep.sampling.guided import GuidedSampler
from qlora_sweep.sweep.sampling.samplers import WithoutRepeats, optunas_own, quiet_optuna
from qlora_sweep.sweep.study.recorded import RecordedPeaks, are_numbers, record_of

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
    return SpeedForecast(model=surface.model, gpu=surface.measured_on)


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
        Target(gpu=surface.measured_on.name, device="cuda", budget_bytes=recorded.budget_bytes),
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
            if are_numbers(values.values()):
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
