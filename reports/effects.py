"""What each setting is worth: one log-linear fit of speed and of peak memory over a study's trials.

The logarithm is fitted by every setting that varied, by least squares. A change that the trials do
not determine, as where two settings were never varied apart, is unknown: a median of everything
tried at one value would be the effect of its company. What the fit misses is in its intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from scipy.special import stdtrit

from qlora_sweep.reports import units
from qlora_sweep.reports.figures import BLUE, PageFigure, Section, dashed, framed, whiskers
from qlora_sweep.reports.view import StudyView
from qlora_sweep.search_spaces.config import KNOBS, TrialConfig, canonical
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.records import Measurement

DEGREES_ENOUGH = 3
"""The fewest trials beyond what a fit determines: with fewer, what it misses is hardly seen."""
TRIALS_PER_VALUE, VALUES_MAX = 5, 8
"""A number with fewer trials for each of its values, or with more values, is fitted by a slope."""
_SAME = 1e-8
_NAMED = 3

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Ratio:
    """A quantity after a change over the same before it, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        ends = f"{_percent(self.low)} to {_percent(self.high)} %"
        if self.low <= 1.0 <= self.high:
            return f"no difference shown ({ends})"
        return f"{_percent(self.value)} % ({ends})"


@dataclass(frozen=True)
class Effect:
    """What going from one value of a setting to another does; None is unknown."""

    key: str
    label: str
    speed: Ratio | None
    memory: Ratio | None
    why: str
    """Why the change of speed is unknown; empty where it is known."""


@dataclass(frozen=True)
class _Setting:
    """A setting with the values that were measured, and its columns of a fit."""

    key: str
    levels: tuple[Any, ...]
    is_slope: bool

    @property
    def is_doubling(self) -> bool:
        return self.is_slope and min(self.levels) > 0 and isinstance(self.levels[0], int)

    def scale(self, value: Any) -> float:
        """Return where a value is on the slope, whose unit is the change that is told."""
        if self.is_doubling:
            return math.log2(value)
        return float((value - self.levels[0]) / (self.levels[-1] - self.levels[0]))

    def columns(self, values: Sequence[Any]) -> list[list[float]]:
        """Return one column for a slope, else one for each value but the first."""
        if self.is_slope:
            return [[self.scale(value) for value in values]]
        return [[float(value == level) for value in values] for level in self.levels[1:]]

    def changes(self, usual: Any) -> Iterator[tuple[str, list[float]]]:
        """Yield each change to tell with its weights: neighbours of a number, words against the
        usual one."""
        name, known = KNOBS[self.key].label, self.levels
        if len(known) < 2:
            yield name, []
        elif self.is_slope:
            ends = f"{units.short(known[0])} to {units.short(known[-1])}"
            yield (f"twice the {name} ({ends})" if self.is_doubling else f"{name} {ends}"), [1.0]
        else:
            first = usual if usual in known else known[0]
            pairs = [(first, level) for level in known if level != first]
            if _are_numbers(known):
                pairs = list(pairwise(known))
            for before, after in pairs:
                words = (units.short(units.phrase(self.key, value)) for value in (before, after))
                weights = [float(at == after) - float(at == before) for at in known[1:]]
                yield " → ".join(words), weights


class Fit:
    """The logarithm of a quantity by every setting that varied.

    Args:
        matrix: trials by columns; the first is the intercept.
        values: positive, one a trial.
    """

    def __init__(self, matrix: Vector, values: Sequence[float]) -> None:
        self.matrix, self._logs = matrix, np.log(values)
        self._inverse = np.linalg.pinv(matrix)
        # numpy 2.0 knows no rank of a matrix without columns.
        rank = int(np.linalg.matrix_rank(matrix)) if matrix.size else 0
        self.degrees = len(values) - rank
        residual = self._logs - matrix @ (self._inverse @ self._logs)
        self._deviation = math.sqrt(float(residual @ residual) / max(1, self.degrees))

    def aliases(self, contrast: Vector) -> list[int]:
        """Return the columns that the trials do not tell a contrast apart from."""
        outside = np.abs(contrast - contrast @ self._inverse @ self.matrix)
        return [int(at) for at in np.argsort(-outside, kind="stable") if outside[at] > _SAME]

    def ratio(self, contrast: Vector) -> Ratio | None:
        """Return a change with Student's interval; None where the trials do not determine it."""
        if self.degrees < DEGREES_ENOUGH or self.aliases(contrast):
            return None
        weights = contrast @ self._inverse
        value = float(weights @ self._logs)
        half = float(stdtrit(self.degrees, 0.975) * self._deviation * np.linalg.norm(weights))
        ends = (np.clip(value + side * half, -50, 50) for side in (0, -1, 1))
        return Ratio(*(math.exp(end) for end in ends))


def effects_of(view: StudyView) -> Section | None:
    """Return what a study tells of its settings, in the order of its space's dimensions; None where
    fewer than two trials were measured."""
    space = view.space
    # Of one configuration its last trial counts.
    last = {
        canonical(record.config): (_settings(record.config), record.measurement)
        for record in sorted(view.records, key=lambda record: record.number)
        if record.measurement is not None
    }
    measured = list(last.values())
    if len(measured) < 2:
        return None
    # A speed of few steps has no interval: its peak counts all the same. Where no speed has one, as
    # of recorded trials, all count.
    timed = [pair for pair in measured if pair[1].speed_interval] or measured
    settings = _varied(space, measured, trials=len(timed))
    of_speed, places = _fitted(settings, timed, lambda one: one.tokens_per_second)
    of_memory, _ = _fitted(settings, measured, lambda one: float(one.peak_allocated_bytes))
    owner = [""] + [one.key for one in settings for _ in places[one.key]]
    usual, effects = _settings(view.baseline_config), []
    for setting in settings[: len(space.dimensions)]:
        for label, weights in setting.changes(usual[setting.key]):
            contrast = np.zeros(len(owner))
            contrast[list(places[setting.key])] = weights
            speed = of_speed.ratio(contrast) if weights else None
            memory = of_memory.ratio(contrast) if weights else None
            why = "" if speed else _why(setting, contrast, of_speed, owner)
            effects.append(Effect(setting.key, label, speed, memory, why))
    known = [effect for effect in effects if effect.speed or effect.memory]
    rows = [
        (one.label, str(one.speed or f"unknown: {one.why}"), str(one.memory or "unknown"))
        for one in effects
    ]
    figures = [_figure(known)] if known else []
    return Section(effects=effects, rows=rows, trials=len(timed), figures=figures)


_Trial = tuple[Mapping[str, Any], Measurement]


def _settings(config: TrialConfig) -> Mapping[str, Any]:
    """Return what a configuration sets, alike for two that train alike."""
    # What follows from another setting where it is not written out is no difference of its own.
    written = {key: getattr(config, key) for key in ("lora_alpha", "effective_batch_size")}
    return canonical(config).model_dump(mode="python") | written


def _varied(space: SearchSpace, measured: Sequence[_Trial], *, trials: int) -> list[_Setting]:
    """Return the space's dimensions, then what varied beside them, as an outside baseline does."""
    found = []
    for key in (*space.dimensions, *(key for key in KNOBS if key not in space.dimensions)):
        levels, lean = {settings[key] for settings, _ in measured}, KNOBS[key].lean_first
        if len(levels) < 2 and key not in space.dimensions:
            continue
        are_numbers = _are_numbers(levels)
        order: Any = lambda value, lean=lean: (  # noqa: E731
            lean.index(value) if value in lean else len(lean),
            str(value),
        )
        ordered = tuple(sorted(levels, key=None if are_numbers else order))
        is_sparse = len(levels) > VALUES_MAX or trials < TRIALS_PER_VALUE * len(levels)
        found.append(_Setting(key, ordered, len(levels) > 2 and are_numbers and is_sparse))
    return found


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _fitted(
    settings: Sequence[_Setting], trials: Sequence[_Trial], quantity: Any
) -> tuple[Fit, Mapping[str, range]]:
    """Return a fit, and which columns are a setting's."""
    columns, places = [[1.0] * len(trials)], {}
    for setting in settings:
        added = setting.columns([of[setting.key] for of, _ in trials])
        places[setting.key] = range(len(columns), len(columns) + len(added))
        columns += added
    return Fit(np.array(columns).T, [quantity(one) for _, one in trials]), places


def _why(setting: _Setting, contrast: Vector, fit: Fit, owner: Sequence[str]) -> str:
    """Return why a change of speed is unknown."""
    if len(setting.levels) < 2:
        only = units.short(units.phrase(setting.key, setting.levels[0]))
        return f"every trial that was measured had {only}"
    aliases = (owner[at] for at in fit.aliases(contrast))
    names = [KNOBS[key].label for key in dict.fromkeys(aliases) if key not in ("", setting.key)]
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return f"never varied apart from {', '.join(names[:_NAMED])}{more}"
    if fit.degrees >= DEGREES_ENOUGH:
        return "no speed was measured to the end at one of its values"
    return f"too few trials: {fit.degrees} more than there are unknowns"


def _percent(ratio: float) -> str:
    share = 100 * (ratio - 1)
    if share >= 1000:
        return "over +1,000"
    return f"{share:+.1f}" if abs(share) < 10 else f"{share:+.0f}"


def _figure(effects: Sequence[Effect]) -> PageFigure:
    """Return speed and memory side by side, in logarithms: twice and half are as far from one."""
    figure = go.Figure(layout=framed(110 + 46 * len(effects)))
    for at, quantity in enumerate(("speed", "memory"), start=1):
        known = [(n, effect, getattr(effect, quantity)) for n, effect in enumerate(effects)]
        known = [one for one in known if one[2] is not None]
        values = [ratio.value for *_, ratio in known]
        axis = "" if at == 1 else "2"
        figure.add_scatter(
            x=values,
            y=[n for n, *_ in known],
            xaxis=f"x{axis}",
            mode="markers",
            name=quantity,
            marker={"size": 10, "color": BLUE},
            error_x=whiskers(values, [(ratio.low, ratio.high) for *_, ratio in known]),
            text=[f"{escape(effect.label)}<br>{ratio}" for _, effect, ratio in known],
            hovertemplate="%{text}<extra></extra>",
        )
        reach = max([math.log10(1.5), *(1.6 * abs(math.log10(value)) for value in values)])
        layout = {
            "title": {"text": f"{quantity} after / before"},
            "type": "log",
            "range": [-reach, reach],
            "tickvals": [0.1, 0.2, 0.5, 0.7, 1, 1.4, 2, 5, 10],
            "domain": [0.0, 0.48] if at == 1 else [0.52, 1.0],
        }
        figure.update_layout({f"xaxis{axis}": layout})
        figure.add_shape(dashed(1.0) | {"xref": f"x{axis}"})
    labels = [escape(effect.label).replace(" → ", "<br>→ ") for effect in effects]
    rows = {"tickvals": list(range(len(effects))), "ticktext": labels, "autorange": "reversed"}
    figure.update_layout(showlegend=False, yaxis=rows | {"zeroline": False})
    caption = (
        "After the change over before it, all else being equal; whiskers are 95 % intervals. At "
        "the dashed line nothing changes."
    )
    return PageFigure("effects", "What each setting does to speed and memory", caption, figure)
