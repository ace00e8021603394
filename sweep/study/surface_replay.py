"""Owns the trying of samplers on a surface: how many recorded trials each needs to find the best.

A sampler may ask for the surface's configurations and nothing else, knows the same of them as every
other, and is told what was recorded. Knows nothing of files or terminals.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

from search_spaces.config import CONFIG_KEYS, TrialConfig
from search_spaces.space import StepBudget
from storage import mapping
from storage.records import TrialRecord
from storage.surfaces import Surface, SurfaceRow
from sweep.sampling.candidates import Candidate
from sweep.sampling.encoding import Params, identity
from sweep.sampling.guided import GuidedSampler, Outlook
from sweep.sampling.samplers import optunas_own, quiet_optuna
from sweep.study.preflight import Preflight, SpeedForecast, SpeedModel
from sweep.study.recorded import RecordedPeaks, record_of

SamplerName = Literal["guided", "tpe", "gp", "random"]
SAMPLERS: tuple[SamplerName, ...] = ("guided", "tpe", "gp", "random")
WITHIN = 0.02
"""Relative: a trial this near to the best of the surface has found it."""
DRAWS: Mapping[str, int] = {"tpe": 4, "gp": 1, "random": 16}
"""Times that one of Optuna's samplers may draw until it meets a row that is there.

Each draw of gp is an optimization of its own, and most come out the same.
"""


@dataclass(frozen=True)
class Search:
    """One search of one sampler, until it was near the best."""

    trials: int
    oom: int
    device_seconds: float
    ask_seconds: tuple[float, ...]


def forecast_of(surface: Surface) -> SpeedModel:
    """Return the speed model of the card that a surface was measured on."""
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


def search(recorded: Recorded, sampler: SamplerName, *, seed: int) -> Search:
    """Let a sampler search a surface until it is near the best, and count what that takes."""
    ooms, device_seconds, asks = 0, 0.0, []
    for trial in trials_of(recorded, sampler, seed=seed):
        asks.append(trial.ask_seconds)
        device_seconds += trial.row.device_seconds or 0.0
        ooms += not trial.row.fits(recorded.budget_bytes)
        if recorded.is_found(trial.row):
            break
    return Search(len(asks), ooms, device_seconds, tuple(asks))


@dataclass(frozen=True)
class Replayed:
    """One trial of a search, told."""

    row: SurfaceRow
    ask_seconds: float
    outlook: Callable[[], Outlook | None]
    """What is still to be gained after it; None from a sampler that cannot tell."""


def trials_of(recorded: Recorded, sampler: SamplerName, *, seed: int) -> Iterator[Replayed]:
    """Yield the trials that a sampler asks for, one after the other, until every row was tried.

    What the pre-flight refuses is asked for when nothing else is left, and then tried after all.
    """
    quiet_optuna()
    rows = _Rows.of(recorded.surface, seed=seed)
    preflight = _preflight(recorded)
    chooser = _sampler(sampler, rows, preflight, seed=seed)
    study = optuna.create_study(sampler=chooser, direction="maximize")

    def outlook() -> Outlook | None:
        return chooser.outlook(study) if isinstance(chooser, GuidedSampler) else None

    for _ in rows.candidates:
        started = time.perf_counter()
        trial = study.ask(dict(rows.distributions))
        seconds = time.perf_counter() - started
        row = rows.row_of(trial.params)
        record = record_of(trial.number, row, recorded.surface, budget_bytes=recorded.budget_bytes)
        record = record.model_copy(update={"prediction": preflight.expect(row.config).record})
        _tell(study, trial, record, budget_bytes=recorded.budget_bytes)
        preflight.learn(record)
        yield Replayed(row, seconds, outlook)


def _sampler(name: SamplerName, rows: _Rows, preflight: Preflight, *, seed: int) -> BaseSampler:
    if name == "guided":
        guided = GuidedSampler(
            rows,
            preflight=preflight,
            objectives=("tokens_per_second",),
            distributions=rows.distributions,
            steps=StepBudget(),
            seed=seed,
        )
        guided.prepare()
        return guided
    return _RowSampler(optunas_own(name, seed=seed), rows, preflight, seed=seed, draws=DRAWS[name])


def _preflight(recorded: Recorded) -> Preflight:
    return Preflight(
        model=recorded.surface.model,
        budget_bytes=recorded.budget_bytes,
        # Every row was run, so no rule forbids it.
        violation=lambda _: None,
        predictor=RecordedPeaks(recorded.peaks),
        speed=recorded.speed(recorded.surface),
        is_cut_up=False,
    )


@dataclass(frozen=True)
class _Rows:
    """The rows of a surface as a sampler is shown them, in an order that the seed gives.

    Numbers are counted in the order of the values that occur, so that one of Optuna's samplers
    knows what lies between what.
    """

    candidates: tuple[Candidate, ...]
    distributions: Mapping[str, BaseDistribution]
    _rows: Mapping[str, SurfaceRow]
    is_listed: bool = True

    @classmethod
    def of(cls, surface: Surface, *, seed: int) -> _Rows:
        """Return the rows; what order they had in the file shows nowhere."""
        by_key = {identity(row.config): row for row in surface.rows}
        keys = sorted(by_key)
        random.Random(seed).shuffle(keys)
        values = {key: _values(key, surface.rows) for key in CONFIG_KEYS}
        free = {key: known for key, known in values.items() if len(known) > 1}
        candidates = tuple(
            Candidate(_params(by_key[key].config, free), by_key[key].config, key) for key in keys
        )
        distributions = {key: _distribution(known) for key, known in free.items()}
        return cls(candidates, distributions, {_text(c.params): by_key[c.key] for c in candidates})

    def near(self, best: Sequence[Params]) -> tuple[Candidate, ...]:
        """See `Candidates.near`."""
        return self.candidates

    def config(self, params: Params) -> TrialConfig:
        """See `Candidates.config`."""
        return self.row_of(params).config

    def row_of(self, params: Params) -> SurfaceRow:
        """Return the row of a trial's parameters."""
        return self._rows[_text(params)]

    @cached_property
    def places(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Where each candidate lies: numbers from 0 to 1, words as 0 or 1 each."""
        return np.array([self.place(candidate.params) for candidate in self.candidates])

    def place(self, params: Params) -> list[float]:
        """Return where parameters lie; a word that differs is as far as the ends of a number."""
        place: list[float] = []
        for name, distribution in self.distributions.items():
            if isinstance(distribution, IntDistribution):
                place.append(params[name] / distribution.high)
            else:
                choices = cast(CategoricalDistribution, distribution).choices
                place += [0.5 * (params[name] == choice) for choice in choices]
        return place


def _values(key: str, rows: Sequence[SurfaceRow]) -> list[Any]:
    """Return the values of a knob that occur: numbers in order, words as JSON text."""
    found = {_value(key, row.config) for row in rows}
    is_number = all(isinstance(value, int | float) for value in found)
    return sorted(found) if is_number else sorted(found, key=str)


def _value(key: str, config: TrialConfig) -> Any:
    # An effective batch or an alpha that is left out follows from the other knobs.
    value = {
        "effective_batch_size": config.samples_per_step,
        "lora_alpha": config.alpha,
    }.get(key, getattr(config, key))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return json.dumps(value)


def _params(config: TrialConfig, free: Mapping[str, list[Any]]) -> Params:
    params: Params = {}
    for key, known in free.items():
        value = _value(key, config)
        params[key] = value if isinstance(value, str) else known.index(value)
    return params


def _distribution(known: list[Any]) -> BaseDistribution:
    if isinstance(known[0], str):
        return CategoricalDistribution(known)
    return IntDistribution(0, len(known) - 1)


def _text(params: Params) -> str:
    return json.dumps(params, sort_keys=True)


class _RowSampler(RandomSampler):
    """One of Optuna's samplers, held to the rows that are there, were not tried and may fit.

    It draws until it meets such a row; failing that the one nearest to its first draw is taken.
    """

    def __init__(
        self, inner: BaseSampler, rows: _Rows, preflight: Preflight, *, seed: int, draws: int
    ) -> None:
        super().__init__(seed=seed)
        self._draws = draws
        self._inner = inner
        self._rows = rows
        self._preflight = preflight

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return all dimensions."""
        return dict(self._rows.distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> Params:
        """Return a row's parameters."""
        left = self._left(study, trial)
        wanted = {_text(self._rows.candidates[at].params) for at in left}
        first: Params | None = None
        for _ in range(self._draws):
            drawn = self._inner.sample_relative(study, trial, search_space)
            for name, distribution in search_space.items():
                if name not in drawn:
                    drawn[name] = self._inner.sample_independent(study, trial, name, distribution)
            if _text(drawn) in wanted:
                return drawn
            first = first or drawn
        assert first is not None, "a sampler draws at least once"
        apart = np.abs(self._rows.places[left] - np.array(self._rows.place(first))).sum(axis=1)
        return self._rows.candidates[left[int(np.argmin(apart))]].params

    def _left(self, study: optuna.Study, trial: FrozenTrial) -> list[int]:
        trials = study.get_trials(deepcopy=False)
        tried = {_text(other.params) for other in trials if other.number != trial.number}
        left = [at for at, c in enumerate(self._rows.candidates) if _text(c.params) not in tried]
        acceptable = [at for at in left if not self._is_refused(at)]
        return acceptable or left

    def _is_refused(self, at: int) -> bool:
        return self._preflight.expect(self._rows.candidates[at].config).is_refused


def _tell(
    study: optuna.Study, trial: optuna.Trial, record: TrialRecord, *, budget_bytes: int
) -> None:
    result = mapping.to_optuna(record, objectives=("tokens_per_second",), budget_bytes=budget_bytes)
    for key, value in result.attributes.items():
        trial.set_user_attr(key, value)
    trial.set_constraint(mapping.CONSTRAINT, result.violation)
    study.tell(trial, values=result.values, state=TrialState.COMPLETE)
