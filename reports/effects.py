"""What each setting is worth: one log-linear fit of speed and of peak memory over a study's trials.

The logarithm is fitted by every setting that varied, by least squares. A change that the trials do
not determine, as where two settings were never varied apart, is unknown: a median of everything
tried at one value would be the effect of its company. What the fit misses is in its intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from scipy.special import stdtrit

from qlora_sweep.reports import format as units
from qlora_sweep.reports.document import TrialTable
from qlora_sweep.reports.figures import BLUE, PageFigure, Section, dashed, framed, whiskers
from qlora_sweep.search_spaces.config import SETTINGS, TrialConfig, canonical
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.records import Measurement

DEGREES_ENOUGH = 3
"""The fewest trials beyond what a fit determines: with fewer, what it misses is hardly seen."""
TRIALS_PER_VALUE = 5
VALUES_MAX = 8
"""A number with fewer trials for each of its values, or with more values, is fitted by a slope."""
_SAME = 1e-8
_NAMED = 3

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class EffectRatio:
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
    speed: EffectRatio | None
    memory: EffectRatio | None
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
            return [list(map(self.scale, values))]
        return [[float(value == level) for value in values] for level in self.levels[1:]]

    def changes(self, usual: Any) -> Iterator[tuple[str, list[float]]]:
        """Yield each change to tell with its weights: neighbours of a number, words against the
        usual one."""
        name = SETTINGS[self.key].label
        levels = self.levels
        if len(levels) < 2:
            yield name, []
        elif self.is_slope:
            ends = f"{units.short(levels[0])} to {units.short(levels[-1])}"
            if self.is_doubling:
                yield f"twice the {name} ({ends})", [1.0]
            else:
                yield f"{name} {ends}", [1.0]
        elif _are_numbers(levels):
            for before, after in pairwise(levels):
                yield self._change(before, after)
        else:
            first = levels[0]
            if usual in levels:
                first = usual
            for level in levels:
                if level != first:
                    yield self._change(first, level)

    def _change(self, before: Any, after: Any) -> tuple[str, list[float]]:
        """Return a change in words, with its weights: one for each value but the first."""
        weights = [float(level == after) - float(level == before) for level in self.levels[1:]]
        first = units.short(units.phrase(self.key, before))
        return f"{first} → {units.short(units.phrase(self.key, after))}", weights


class EffectFit:
    """The logarithm of a quantity by every setting that varied.

    Args:
        matrix: trials by columns; the first is the intercept.
        values: positive, one a trial.
    """

    def __init__(self, matrix: Vector, values: Sequence[float]) -> None:
        self.matrix = matrix
        self._logs = np.log(values)  # (trials,)
        self._inverse = np.linalg.pinv(matrix)  # (columns, trials)
        self.degrees = len(values)
        # numpy 2.0 knows no rank of a matrix without columns.
        if matrix.size:
            self.degrees -= int(np.linalg.matrix_rank(matrix))
        residual = self._logs - matrix @ (self._inverse @ self._logs)
        self._deviation = math.sqrt(float(residual @ residual) / max(1, self.degrees))

    def aliases(self, contrast: Vector) -> list[int]:
        """Return the columns that the trials do not tell a contrast, (columns,), apart from."""
        outside = np.abs(contrast - contrast @ self._inverse @ self.matrix)  # (columns,)
        order = np.argsort(-outside, kind="stable")
        aliases: list[int] = order[outside[order] > _SAME].tolist()
        return aliases

    def ratio(self, contrast: Vector) -> EffectRatio | None:
        """Return a change with Student's interval; None where the trials do not determine it."""
        if self.degrees < DEGREES_ENOUGH or self.aliases(contrast):
            return None
        weights = contrast @ self._inverse  # (trials,)
        value = float(weights @ self._logs)
        half = float(stdtrit(self.degrees, 0.975) * self._deviation * np.linalg.norm(weights))
        logs = np.clip([value, value - half, value + half], -50, 50)
        return EffectRatio(*map(math.exp, logs))


def effects_of(document: TrialTable) -> Section | None:
    """Return what a study tells of its settings, in the order of its space's dimensions; None where
    fewer than two trials were measured."""
    view = document.view
    space = view.space
    # Of one configuration its last trial counts.
    last: dict[TrialConfig, _Trial] = {}
    for record in sorted(document.records, key=lambda record: record.number):
        if record.measurement is not None:
            trial = (_settings(record.config), record.measurement)
            last[canonical(record.config)] = trial
    measured = list(last.values())
    if len(measured) < 2:
        return None
    # A speed of few steps has no interval: its peak counts all the same. Where no speed has one, as
    # of recorded trials, all count.
    timed = [pair for pair in measured if pair[1].speed_interval] or measured
    settings = _varied(space, measured, trials=len(timed))
    of_speed, places = _fitted(settings, timed, lambda trial: trial.tokens_per_second)
    of_memory, _ = _fitted(settings, measured, lambda trial: float(trial.peak_allocated_bytes))
    # Which setting a column is of; the intercept is of none.
    owners = [""]
    for setting in settings:
        owners += [setting.key] * len(places[setting.key])
    usual = _settings(view.baseline_config)
    effects = []
    determined = []
    rows = []
    for setting in settings[: len(space.dimensions)]:
        for label, weights in setting.changes(usual[setting.key]):
            contrast = np.zeros(len(owners))
            contrast[list(places[setting.key])] = weights
            speed = None
            memory = None
            why = ""
            if weights:
                speed = of_speed.ratio(contrast)
                memory = of_memory.ratio(contrast)
            if speed is None:
                why = _why(setting, contrast, of_speed, owners)
            effect = Effect(setting.key, label, speed, memory, why)
            effects.append(effect)
            if speed or memory:
                determined.append(effect)
            rows.append((label, str(speed or f"unknown: {why}"), str(memory or "unknown")))
    figures = []
    if determined:
        figures.append(_figure(determined))
    return Section(effects=effects, rows=rows, trials=len(timed), figures=figures)


_Trial = tuple[Mapping[str, Any], Measurement]


def _settings(config: TrialConfig) -> Mapping[str, Any]:
    """Return what a configuration sets, alike for two that train alike."""
    # What follows from another setting where it is not written out is no difference of its own.
    settings = canonical(config).model_dump(mode="python")
    settings["lora_alpha"] = config.lora_alpha
    settings["effective_batch_size"] = config.effective_batch_size
    return settings


def _varied(space: SearchSpace, measured: Sequence[_Trial], *, trials: int) -> list[_Setting]:
    """Return the space's dimensions, then what varied beside them, as an outside baseline does."""
    varied = []
    # A dict's union keeps the dimensions first.
    for key in dict.fromkeys(space.dimensions) | dict.fromkeys(SETTINGS):
        levels = {settings[key] for settings, _ in measured}
        if len(levels) < 2 and key not in space.dimensions:
            continue
        is_slope = False
        if _are_numbers(levels):
            ordered = sorted(levels)
            is_sparse = len(levels) > VALUES_MAX or trials < TRIALS_PER_VALUE * len(levels)
            is_slope = len(levels) > 2 and is_sparse
        else:
            ordered = sorted(levels, key=partial(units.lean_order, key))
        varied.append(_Setting(key, tuple(ordered), is_slope))
    return varied


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _fitted(
    settings: Sequence[_Setting], trials: Sequence[_Trial], quantity: Any
) -> tuple[EffectFit, Mapping[str, range]]:
    """Return a fit, and which columns are a setting's."""
    columns = [[1.0] * len(trials)]
    places = {}
    for setting in settings:
        added = setting.columns([values[setting.key] for values, _ in trials])
        places[setting.key] = range(len(columns), len(columns) + len(added))
        columns += added
    matrix = np.array(columns).T  # (trials, columns)
    return EffectFit(matrix, [quantity(measured) for _, measured in trials]), places


def _why(setting: _Setting, contrast: Vector, fit: EffectFit, owners: Sequence[str]) -> str:
    """Return why a change of speed is unknown."""
    if len(setting.levels) < 2:
        only = units.short(units.phrase(setting.key, setting.levels[0]))
        return f"every trial that was measured had {only}"
    aliases = dict.fromkeys(map(owners.__getitem__, fit.aliases(contrast)))
    names = [SETTINGS[key].label for key in aliases if key not in ("", setting.key)]
    if len(names) > _NAMED:
        named = ", ".join(names[:_NAMED])
        return f"never varied apart from {named} and {len(names) - _NAMED} more"
    if names:
        return f"never varied apart from {', '.join(names)}"
    if fit.degrees >= DEGREES_ENOUGH:
        return "no speed was measured to the end at one of its values"
    return f"too few trials: {fit.degrees} more than there are unknowns"


def _percent(ratio: float) -> str:
    share = 100 * (ratio - 1)
    if share >= 1000:
        return "over +1,000"
    if abs(share) < 10:
        return f"{share:+.1f}"
    return f"{share:+.0f}"


def _figure(effects: Sequence[Effect]) -> PageFigure:
    """Return speed and memory side by side, in logarithms: twice and half are as far from one."""
    figure = go.Figure(layout=framed(110 + 46 * len(effects)))
    panels = (("speed", "", [0.0, 0.48]), ("memory", "2", [0.52, 1.0]))
    for quantity, axis, domain in panels:
        values = []
        ends = []
        places = []
        texts = []
        reach = math.log10(1.5)
        for place, effect in enumerate(effects):
            ratio: EffectRatio | None = getattr(effect, quantity)
            if ratio is None:
                continue
            values.append(ratio.value)
            ends.append((ratio.low, ratio.high))
            places.append(place)
            texts.append(f"{escape(effect.label)}<br>{ratio}")
            reach = max(reach, 1.6 * abs(math.log10(ratio.value)))
        figure.add_scatter(
            x=values,
            y=places,
            xaxis=f"x{axis}",
            mode="markers",
            name=quantity,
            marker={"size": 10, "color": BLUE},
            error_x=whiskers(values, ends),
            text=texts,
            hovertemplate="%{text}<extra></extra>",
        )
        layout = {
            "title": {"text": f"{quantity} after / before"},
            "type": "log",
            "range": [-reach, reach],
            "tickvals": [0.1, 0.2, 0.5, 0.7, 1, 1.4, 2, 5, 10],
            "domain": domain,
        }
        figure.update_layout({f"xaxis{axis}": layout})
        figure.add_shape(dashed(1.0) | {"xref": f"x{axis}"})
    labels = []
    for effect in effects:
        labels.append(escape(effect.label).replace(" → ", "<br>→ "))
    rows = {"tickvals": list(range(len(effects))), "ticktext": labels, "autorange": "reversed"}
    figure.update_layout(showlegend=False, yaxis=rows | {"zeroline": False})
    caption = (
        "After the change over before it, all else being equal; whiskers are 95 % intervals. At "
        "the dashed line nothing changes."
    )
    return PageFigure("effects", "What each setting does to speed and memory", caption, figure)
