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
from typing import Any

import numpy as np

from qlora_sweep.search_spaces.config import BATCH_KEYS, TrialConfig
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
_SAME = (*BATCH_KEYS, "data_parallel", "sharding", "packing")
"""Settings that are the recommended one's in every trial: a space leaves no batches out, and a
contribution is of one GPU and full rows."""


@dataclass(frozen=True)
class Lesson:
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
    lessons: tuple[Lesson, ...]
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
        prices = [offer.usd_per_hour for offer in self.offers]
        return min(prices) * self.seconds / 3600 if prices else None

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """What nine in ten such speeds are between, before and after: tokens per second."""
        speed = self.answer.tokens_per_second or 0.0
        return [within(speed, spread).ends for spread in self.log_spreads]

    @property
    def commands(self) -> list[str]:
        """What to type on the GPU: the space, its study, and what others may calibrate by."""
        space = self._space()
        name, written = space["name"], shlex.quote(json.dumps(space))
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
        keys = [k for k in configs[0] if any(c[k] != configs[0][k] for c in configs)]
        values = {key: list(dict.fromkeys(c[key] for c in configs)) for key in keys}
        left_out: list[dict[str, Any]] = []
        # Pairs that none has say most of it in few words.
        for some in (s for n in range(2, len(keys) + 1) for s in itertools.combinations(keys, n)):
            for row in itertools.product(*(values[key] for key in some)):
                rule = dict(zip(some, row, strict=True))
                if not any(of.items() <= rule.items() for of in left_out) and not any(
                    rule.items() <= config.items() for config in configs
                ):
                    left_out.append(rule)
        standard = TrialConfig().model_dump(mode="json")
        return {
            "name": f"{gpu}-calibration",
            "gpu": gpu,
            "model": self.survey.space.model,
            "sampler": "grid",
            # What is after speed stops a trial that is slow.
            "objectives": ["peak_memory"],
            "trials": len(configs),
            "confirm": False,
            "fixed": {
                key: value
                for key, value in configs[0].items()
                if key not in keys and value != standard[key]
            },
            "dimensions": values,
            "leave_out": [{key: [value] for key, value in rule.items()} for rule in left_out],
        }


class _Known:
    """What trials of some configurations leave open, by row."""

    def __init__(self, times: StepTimes) -> None:
        mean = np.zeros(len(FACTORS)) if times.evidence is None else times.evidence.mean
        self.prior = times.spread if times.evidence is None else times.evidence.covariance
        self.slopes = times.slopes(mean, slice(None))
        self._noise = times.own_spread**2

    def after(self, rows: Sequence[int]) -> Array:
        """Return the covariance of the log factors after trials of these rows in one session."""
        seen = self.slopes[list(rows)]
        told = seen @ (self.prior + SESSION) @ seen.T + np.diag(self._noise[list(rows)])
        learnt: Array = self.prior @ seen.T @ np.linalg.solve(told, seen @ self.prior)
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
    forecaster = survey.forecaster
    same = {key: getattr(answer.config, key) for key in _SAME}
    others = [forecast.config for forecast in survey.fastest_by_numerics.values()]
    # At the same micro-batch they may only fit at half the length.
    lengths = (answer.config.seq_len, max(1, answer.config.seq_len // 2))
    reshaped = [
        config.changed(**same | {"seq_len": length})
        for config, length in itertools.product(others, lengths)
    ]
    changes = [
        c for c, key in single_changes(answer.config, forecaster).items() if key not in _SAME
    ]
    configs = list(dict.fromkeys([answer.config, *reshaped, *changes]))
    found = forecaster.forecast(configs)
    able = [one for at in range(len(found)) if (one := found[at]).fit is Fit.YES and one.speed]
    forecasts = forecaster.forecast([forecast.config for forecast in able])
    known, cost = _Known(forecasts.times), [_seconds(one, survey.space) for one in able]
    fastest = np.argsort(-forecasts.tokens_per_second).tolist()
    of_numerics = {able[row].config.numerics: row for row in reversed(fastest)}
    wanted = sorted({0, *fastest[: 1 + TRIALS], *of_numerics.values()})

    def spread(rows: Sequence[int]) -> float:
        return float(np.sqrt((known.log_spread(known.after(rows))[wanted] ** 2).sum()))

    chosen: list[int] = []
    taught: list[Lesson] = []
    for _ in range(min(TRIALS, len(able))):
        left = [row for row in range(len(able)) if row not in chosen]
        best = min(left, key=lambda r: (spread([*chosen, r]) - spread(chosen)) / cost[r])
        before, after = (np.sqrt(np.diag(known.after(r))) for r in (chosen, [*chosen, best]))
        at = int(np.argmax(before - after))
        spreads = float(before[at]), float(after[at])
        taught.append(Lesson(able[best], cost[best], FACTORS[at], spreads))
        chosen.append(best)
    before_all = answer.speed.log_spread
    after_all = min(before_all, float(known.log_spread(known.after(chosen))[0]))
    return Lessons(survey, answer, tuple(taught), (before_all, after_all), offers)


def _seconds(forecast: Forecast, space: SearchSpace) -> float:
    """Return what a trial is expected to take: its steps, its compile, and what is beside them."""
    steps = STEPS_OVER_FEWEST * (space.steps.warmup_min + space.steps.measured_min)
    step_seconds = forecast.step_seconds or 0.0
    return TRIAL_SECONDS + COMPILE_SECONDS * forecast.config.compile + steps * step_seconds


def lessons_document(answer: Lessons) -> Mapping[str, Any]:
    """Return the trials, what they teach, and what to type, as a JSON document."""
    forecaster, (before, after) = answer.survey.forecaster, answer.ranges
    return {
        "gpu": forecaster.gpu.name,
        "model": forecaster.model.name,
        "recommended": answer.answer.config.model_dump(mode="json"),
        "tokens_per_second": answer.answer.tokens_per_second,
        "tokens_per_second_range": list(before),
        "expected_range": list(after),
        "trials": [
            {
                "config": lesson.forecast.config.model_dump(mode="json"),
                "seconds": lesson.seconds,
                "teaches": lesson.factor,
                "log_spread_before": lesson.log_spreads[0],
                "log_spread_after": lesson.log_spreads[1],
            }
            for lesson in answer.lessons
        ],
        **{key: getattr(answer, key) for key in ("seconds", "usd", "commands")},
    }
