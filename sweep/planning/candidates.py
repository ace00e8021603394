"""The configurations that a plan looks at, and which of their forecasts it prefers.

A row of a space is every micro-batch of otherwise equal configurations.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, partial
from operator import attrgetter
from typing import Any, Literal, get_args

from search_spaces.config import KNOBS, TARGET_SETS, TrialConfig, canonical
from search_spaces.costs import Range
from search_spaces.dimensions import Choices, Dimension, FloatRange
from search_spaces.loading import load_space, parse_space, preset_name
from search_spaces.presets import starting_text
from search_spaces.space import SearchSpace
from sweep.predict.forecast import Forecast, Forecaster
from sweep.predict.memory.prediction import Fit
from sweep.predict.speed.predictor import ratio_spread, within

SpaceKind = Literal["preset", "file", "standard"]
"""Where a space comes from: shipped under its name, written by the user, or made for a GPU."""

ROWS_MAX = 6_000
CONFIGURATIONS_MAX = 60_000
"""Spaces with more of either, or with a continuous dimension, are judged by a sample of rows."""
ROWS_SAMPLED = 1_500
BATCHES_MAX = 256
"""Micro-batches that are looked at in one row."""
VALUES_SHOWN = 16
"""Rows or columns that the table takes from one dimension."""
WORTH_SPEED = 0.005
"""A smaller gain in speed, relative, is none."""
WELL_PREDICTED = 0.05
"""A peak whose prediction may be further off than this (compiled layers') is less than sure."""

_TOGETHER = attrgetter("data_parallel", "sharding")
"""Where two configurations differ in these, each has its own doubt of what GPUs wait for each
other."""


@dataclass(frozen=True)
class Asked:
    """What was asked of a GPU, for the answer to say."""

    kind: SpaceKind | None = None
    """None where one configuration is asked about, and no space."""
    held: Mapping[str, Any] = field(default_factory=dict)
    """Settings that were typed: they are fixed, and the rest of the space is searched."""
    run_command: str = ""
    """What to type to measure on the GPU what is searched here."""
    grpo: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `GRPOConfig`, under method grpo."""


NOT_ASKED = Asked()


@cache
def own_space(gpu: str, model: str | None) -> tuple[SearchSpace, SpaceKind]:
    """Return the space that a GPU's name means, and where it comes from.

    It is the preset of that name, else what `sweep init --gpu` writes for the GPU and the model.

    Raises:
        InputError: no such model.
        EnvironmentFault: a hub id, and the hub is not to be had.
    """
    if preset_name(gpu) is not None:
        return load_space(gpu), "preset"
    return parse_space(starting_text(gpu, model), label=gpu), "standard"


def rows(space: SearchSpace) -> Iterator[list[TrialConfig]]:
    """Yield configurations that differ in their micro-batch alone, the smallest first.

    All of the space where that is little enough, else a sample that is the same every time.
    """
    others = {key: d for key, d in space.dimensions.items() if key != "micro_batch_size"}
    batches = batches_of(space)
    # Rows that are left out are not counted.
    kept = len(space.together) / math.prod(len(space.values_of(key)) for key in space.together[0])
    for values in _row_values(others, kept=kept, batches=len(batches), seed=space.seed):
        params = dict(zip(others, values, strict=True))
        if not space.leaves_out(params):
            row = [{**params, "micro_batch_size": batch} for batch in batches]
            yield [space.config(params) for params in row if space.holds_batches_of(params)]


def batches_of(space: SearchSpace) -> list[int]:
    """Return the micro-batches of a space, the smallest first: a dimension's, or the fixed one."""
    return evenly_spaced(space.values_of("micro_batch_size"), most=BATCHES_MAX)


def evenly_spaced(values: Iterable[Any], *, most: int) -> list[Any]:
    """Return at most ``most`` of the values in order, evenly spread, both ends among them."""
    ordered = sorted(set(values))
    if len(ordered) <= most:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]


def _row_values(
    dimensions: Mapping[str, Dimension], *, kept: float, batches: int, seed: int
) -> Iterator[tuple[Any, ...]]:
    columns = [dimension.values() for dimension in dimensions.values()]
    known = [column for column in columns if column is not None]
    most = min(ROWS_MAX, CONFIGURATIONS_MAX // batches)
    if len(known) == len(columns) and kept * math.prod(map(len, known)) <= most:
        yield from itertools.product(*known)
        return
    drawn = dict(dimensions)
    if "seq_len" in drawn:
        # So few lengths that each has many rows, and a place in the table.
        lengths = evenly_spaced(drawn["seq_len"].values() or (), most=VALUES_SHOWN)
        drawn["seq_len"] = Choices(choices=tuple(lengths))
    lean = list(_leanest(drawn))
    yield from lean
    draw = random.Random(seed)
    for _ in range(min(ROWS_SAMPLED, most) - len(lean)):
        yield tuple(_drawn(dimension, draw) for dimension in drawn.values())


def _leanest(dimensions: Mapping[str, Dimension]) -> Iterator[tuple[Any, ...]]:
    """Yield the row that needs least memory at each length: a sample must not miss what fits."""
    columns: list[Sequence[Any]] = []
    for key, dimension in dimensions.items():
        values = dimension.values()
        if values is None:
            assert isinstance(dimension, FloatRange)
            values = (dimension.low, dimension.high)
        columns.append(values if key == "seq_len" else [min(values, key=partial(_weight, key))])
    yield from itertools.product(*columns)


def _weight(key: str, value: Any) -> float:
    """Return a figure that grows with the memory that a value takes, as a rule."""
    lean_first = KNOBS[key].lean_first
    if lean_first:
        return lean_first.index(value) if value in lean_first else len(lean_first)
    if not isinstance(value, int | float):
        return 0.0
    return -float(value) if KNOBS[key].memory == "shrinks" else float(value)


def _drawn(dimension: Dimension, draw: random.Random) -> Any:
    values = dimension.values()
    if values is not None:
        return draw.choice(values)
    assert isinstance(dimension, FloatRange)
    return dimension.at(draw.random())


def single_changes(config: TrialConfig, forecaster: Forecaster) -> dict[TrialConfig, str]:
    """Return every valid configuration with one setting changed, and which."""
    changes: dict[TrialConfig, str] = {}
    for key in KNOBS:
        for value in _other_values(key, config):
            try:
                changed = config.changed(**{key: value})
            except ValueError:
                continue
            if canonical(changed) != canonical(config) and forecaster.is_valid(changed):
                changes[changed] = key
    return changes


def _other_values(key: str, config: TrialConfig) -> Sequence[Any]:
    value, kind = getattr(config, key), TrialConfig.model_fields[key].annotation
    if key in _VALUES:
        values = _VALUES[key](value)
    elif kind is bool:
        values = (not value,)
    else:
        values = get_args(kind)
    return [other for other in dict.fromkeys(values) if other != value]


def _half_and_double(value: int | None) -> tuple[int, ...]:
    return () if value is None else (max(1, value // 2), value * 2)


_VALUES: Mapping[str, Callable[[Any], Sequence[Any]]] = {
    "lora_rank": _half_and_double,
    # It scales a product and changes neither speed nor memory.
    "lora_alpha": lambda _: (),
    "learning_rate": lambda _: (),
    # It is another training, of another dataset.
    "method": lambda _: (),
    "lora_dropout": lambda _: (0.0, 0.05),
    "target_modules": lambda _: TARGET_SETS,
    "micro_batch_size": _half_and_double,
    "seq_len": _half_and_double,
    "effective_batch_size": _half_and_double,
    "quantized_fraction": lambda _: (0.5, 1.0),
    "checkpoint_fraction": lambda value: (0.0, value / 2, 0.5, 1.0),
}
"""What numbers and lists are turned to, by key; words and truth values go through all of theirs."""


class Certainty(IntEnum):
    """How sure it is that a configuration fits."""

    DOUBTFUL = 0
    """The budget lies within the prediction's uncertainty."""
    LIKELY = 1
    """It fits, by a prediction that is wide of the truth at times."""
    SURE = 2


def certainty(forecast: Forecast, *, fit: Fit | None = None) -> Certainty:
    """Return how sure it is that a forecast that may fit does.

    Args:
        forecast: the forecast.
        fit: whether it fits, where that is known from elsewhere.
    """
    if (fit or forecast.fit) is not Fit.YES:
        return Certainty.DOUBTFUL
    is_well_predicted = forecast.memory_uncertainty <= WELL_PREDICTED
    return Certainty.SURE if is_well_predicted else Certainty.LIKELY


def speed_order(forecast: Forecast) -> tuple[float, int]:
    """Return what sorts forecasts of one certainty: speed, then tokens where none is known."""
    return forecast.tokens_per_second or 0.0, forecast.config.tokens_per_micro_batch


def speed_ratio(one: Forecast, other: Forecast) -> Range | None:
    """Return how many times as fast as another a forecast is, with the ends of nine in ten such
    ratios; None where a speed or its interval is not known.

    On one GPU what is predicted of both is compared, unless both were measured: a measurement over
    a prediction would tell more of the prediction. What both are off by in common cancels there.
    The errors of two GPUs are taken as independent, as are those of packing, and of what several
    GPUs wait for each other in one way and in another.
    """
    of, own, others = one.forecaster, one.speed, other.speed
    is_one_gpu = of.gpu == other.forecaster.gpu
    if is_one_gpu and own and others and not (one.measured and other.measured):
        apart = math.hypot(own.log_spread, others.log_spread)
        configs = one.config, other.config
        if configs[0].packing == configs[1].packing:
            shared = ratio_spread(one.log_slopes, other.log_slopes, gpu=of.gpu)
            owns = [] if configs[0] == configs[1] else [one.own_spread, other.own_spread]
            if _TOGETHER(configs[0]) != _TOGETHER(configs[1]):
                owns += [of.gpu.speed.shared for config in configs if config.data_parallel > 1]
            apart = min(apart, math.hypot(shared, *owns))
        times = own.tokens_per_second / others.tokens_per_second
        return Range(times, *within(times, apart))
    known = [
        Range(forecast.tokens_per_second, *forecast.tokens_per_second_range)
        for forecast in (one, other)
        if forecast.tokens_per_second and forecast.tokens_per_second_range
    ]
    return known[0].over(known[1]) if len(known) == 2 else None


def is_faster(one: Forecast, other: Forecast) -> bool:
    """Whether a forecast is faster than another beyond doubt, and by enough to be worth a line."""
    times = speed_ratio(one, other)
    return times is not None and times.low > 1.0 and times.value > 1.0 + WORTH_SPEED


def preferred(candidates: Iterable[Forecast]) -> Forecast | None:
    """Return the fastest of the surest, unless a less sure one is so much faster that their
    intervals are apart.

    Any smaller gain, be it sure, is no reason to risk running out of memory.
    """
    chosen: Forecast | None = None
    best = _fastest_by_certainty(candidates)
    for level in sorted(best, reverse=True):
        ends, least = best[level].tokens_per_second_range, chosen and chosen.tokens_per_second_range
        if chosen is None or (ends and least and ends[0] > least[1]):
            chosen = best[level]
    return chosen


def alternative(candidates: Iterable[Forecast], chosen: Forecast) -> Forecast | None:
    """Return what is worth naming beside the preferred forecast, if anything is.

    Where a surer one was passed over, that is the surest; else it is the fastest of those that are
    less sure, where it is faster beyond doubt.
    """
    best = _fastest_by_certainty(candidates)
    surest = max(best, default=Certainty.DOUBTFUL)
    if surest > certainty(chosen):
        return best[surest]
    faster = [rival for rival in best.values() if rival is not chosen and is_faster(rival, chosen)]
    return max(faster, key=speed_order, default=None)


def _fastest_by_certainty(candidates: Iterable[Forecast]) -> dict[Certainty, Forecast]:
    best: dict[Certainty, Forecast] = {}
    for candidate in candidates:
        level = certainty(candidate)
        if level not in best or speed_order(candidate) > speed_order(best[level]):
            best[level] = candidate
    return best
