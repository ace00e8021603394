"""The few trials on a GPU that would narrow the predicted speed of a plan's answer most.

They are expected to update a GPU's factors as `sweep calibrate` does: as a linear model with normal
errors, in another session than the one that is predicted.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from qlora_sweep.search_spaces.config import BATCH_KEYS, TrialConfig
from qlora_sweep.search_spaces.costs import SECONDS_PER_HOUR
from qlora_sweep.search_spaces.kinds import Numerics
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.sweep.planning.candidates import single_changes
from qlora_sweep.sweep.planning.survey import (
    COMPILE_SECONDS,
    START_SECONDS,
    STEPS_OVER_FEWEST,
    TRIAL_SECONDS,
    Survey,
)
from qlora_sweep.sweep.predict.forecast import Forecast
from qlora_sweep.sweep.predict.memory.prediction import Fit
from qlora_sweep.sweep.predict.speed.contributed import SESSION, Array
from qlora_sweep.sweep.predict.speed.predictor import FACTORS, Factor, StepTimes, within

TRIALS = 3
"""So many are printed: they take two minutes and a half of an A10, its start included."""
_SAME = BATCH_KEYS + ("sharding", "packing")
"""Settings that are the recommended one's in every trial: a space leaves no batches out, and a
contribution is of one GPU and full rows."""


@dataclass(frozen=True)
class CalibrationTrial:
    """One trial."""

    forecast: Forecast
    seconds: float
    """That it is expected to take, beside the worker's start."""
    factor: Factor
    """The part of a step of which it teaches most."""
    log_spreads: tuple[float, float]
    """Standard deviation of that factor's logarithm before and after the trial."""


@dataclass(frozen=True)
class Lessons:
    """The trials that would teach most, in that order."""

    survey: Survey
    answer: Forecast
    """The recommended configuration."""
    lessons: tuple[CalibrationTrial, ...]
    log_spreads: tuple[float, float]
    """Of its speed before the trials and, as is expected, after them."""
    offers: Sequence[Offer] = ()

    @property
    def seconds(self) -> float:
        """What all trials are expected to take, one study's start included."""
        return START_SECONDS + sum(lesson.seconds for lesson in self.lessons)

    @property
    def usd(self) -> float | None:
        """What that costs at the cheapest price by the hour; None without a price."""
        if not self.offers:
            return None
        cheapest = min(self.offers, key=lambda offer: offer.usd_per_hour)
        return cheapest.usd_per_hour * self.seconds / SECONDS_PER_HOUR

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """What nine in ten such speeds are between, before and after: tokens per second."""
        speed = self.answer.tokens_per_second or 0.0
        return [within(speed, spread).ends for spread in self.log_spreads]

    @property
    def commands(self) -> list[str]:
        """What to type on the GPU: the space, its study, and what others may calibrate by."""
        space = self._space()
        name = space["name"]
        written = shlex.quote(json.dumps(space))
        return [
            f"echo {written} > {name}.yaml",
            f"sweep run {name}.yaml",
            f"sweep contribute {name} -o {name}.jsonl",
            f"sweep calibrate {name}.jsonl",
        ]

    def _space(self) -> dict[str, Any]:
        """Return a space of these configurations and no others, of which none is stopped early."""
        gpu = self.survey.forecaster.gpu.name
        configs = [lesson.forecast.config.model_dump(mode="json") for lesson in self.lessons]
        first = configs[0]
        standard = TrialConfig().model_dump(mode="json")
        values: dict[str, list[Any]] = {}
        fixed: dict[str, Any] = {}
        for key, value in first.items():
            tried = list(dict.fromkeys(config[key] for config in configs))
            if len(tried) > 1:
                values[key] = tried
            elif value != standard[key]:
                fixed[key] = value
        rules: list[dict[str, Any]] = []
        for rule in _rules_for(configs, values):
            rules.append({key: [value] for key, value in rule.items()})
        return {
            "name": f"{gpu}-calibration",
            "gpu": gpu,
            "model": self.survey.space.model,
            "sampler": "grid",
            # What is after speed stops a trial that is slow.
            "objectives": ["peak_memory"],
            "trials": len(configs),
            "confirm": False,
            "fixed": fixed,
            "dimensions": values,
            "leave_out": rules,
        }


def _rules_for(
    configs: Sequence[Mapping[str, Any]], values: Mapping[str, Sequence[Any]]
) -> list[dict[str, Any]]:
    """Return rules that leave of all combinations of these values the configurations alone.

    Of few settings first: pairs that no configuration has say most of it in few words.
    """
    rules: list[dict[str, Any]] = []
    for count in range(2, len(values) + 1):
        for keys in itertools.combinations(values, count):
            for combination in itertools.product(*map(values.__getitem__, keys)):
                rule = dict(zip(keys, combination, strict=True))
                is_said = any(other.items() <= rule.items() for other in rules)
                if not is_said and not any(rule.items() <= config.items() for config in configs):
                    rules.append(rule)
    return rules


class _Known:
    """What trials of some configurations leave open, by row."""

    def __init__(self, times: StepTimes) -> None:
        mean = np.zeros(len(FACTORS))
        self.prior = times.spread
        if times.evidence is not None:
            mean = times.evidence.mean
            self.prior = times.evidence.covariance
        self.slopes = times.slopes(mean, slice(None))
        self._noise = times.own_spread**2

    def after(self, rows: Sequence[int]) -> Array:
        """Return the covariance of the log factors after trials of these rows in one session."""
        seen = self.slopes[list(rows)]
        # (trials, trials)
        expected = seen @ (self.prior + SESSION) @ seen.T + np.diag(self._noise[list(rows)])
        # (factors, factors)
        learnt: Array = self.prior @ seen.T @ np.linalg.solve(expected, seen @ self.prior)
        return self.prior - learnt

    def log_spread(self, covariance: Array) -> Array:
        """Return how far each row's log seconds are off in another session."""
        explained = np.einsum("nf,fg,ng->n", self.slopes, covariance + SESSION, self.slopes)
        return np.asarray(np.sqrt(explained + self._noise))


def lessons(survey: Survey, *, offers: Sequence[Offer] = ()) -> Lessons | None:
    """Return the trials that would narrow the interval of the recommended configuration's speed.

    Each next one takes most a second off the spread of its speed and of its nearest rivals': the
    fastest of those that differ from it in one setting, and of other classes of numerics. All
    surely fit.

    Args:
        survey: of the space on the GPU.
        offers: of the GPU.

    Returns:
        None where nothing surely fits, or no speed is predicted.
    """
    answer = survey.recommended
    if answer is None or answer.fit is not Fit.YES or answer.speed is None:
        return None
    forecasts = survey.forecaster.forecast(_worth_a_trial(survey, answer))
    able = list(forecasts)
    known = _Known(forecasts.times)
    seconds = list(map(partial(_seconds, survey.space), able))
    fastest = np.argsort(-forecasts.tokens_per_second).tolist()
    of_numerics: dict[Numerics, int] = {}
    for row in fastest:
        of_numerics.setdefault(able[row].config.numerics, row)
    # The answer, which is the first, and its nearest rivals.
    wanted = sorted({0}.union(fastest[: 1 + TRIALS], of_numerics.values()))

    def spread(rows: Sequence[int]) -> float:
        return float(np.sqrt((known.log_spread(known.after(rows))[wanted] ** 2).sum()))

    chosen: list[int] = []
    taught: list[CalibrationTrial] = []
    left = list(range(len(able)))
    while left and len(chosen) < TRIALS:
        now = spread(chosen)
        best = min(left, key=lambda row: (spread(chosen + [row]) - now) / seconds[row])
        left.remove(best)
        before = np.sqrt(np.diag(known.after(chosen)))
        chosen.append(best)
        after = np.sqrt(np.diag(known.after(chosen)))
        factor = int(np.argmax(before - after))
        spreads = (float(before[factor]), float(after[factor]))
        taught.append(CalibrationTrial(able[best], seconds[best], FACTORS[factor], spreads))
    before_all = answer.speed.log_spread
    after_all = min(before_all, float(known.log_spread(known.after(chosen))[0]))
    return Lessons(survey, answer, tuple(taught), (before_all, after_all), offers)


def _worth_a_trial(survey: Survey, answer: Forecast) -> list[TrialConfig]:
    """Return the answer, then what differs from it in one setting or is of other numerics, as far
    as it surely fits and has a predicted speed."""
    same = answer.config.model_dump(include=set(_SAME))
    configs = [answer.config]
    for forecast in survey.fastest_by_numerics.values():
        # At the same micro-batch they may only fit at half the length.
        for length in (answer.config.seq_len, max(1, answer.config.seq_len // 2)):
            configs.append(forecast.config.changed(**{**same, "seq_len": length}))
    for config, key in single_changes(answer.config, survey.forecaster).items():
        if key not in _SAME:
            configs.append(config)
    worth: list[TrialConfig] = []
    for forecast in survey.forecaster.forecast(list(dict.fromkeys(configs))):
        if forecast.fit is Fit.YES and forecast.speed is not None:
            worth.append(forecast.config)
    return worth


def _seconds(space: SearchSpace, forecast: Forecast) -> float:
    """Return what a trial is expected to take: its steps, its compile, and what is beside them."""
    steps = STEPS_OVER_FEWEST * (space.steps.warmup_min + space.steps.measured_min)
    step_seconds = forecast.step_seconds or 0.0
    return TRIAL_SECONDS + COMPILE_SECONDS * forecast.config.compile + steps * step_seconds
