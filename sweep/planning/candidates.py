"""Which of the configurations that were found a plan recommends, and what it sets beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any, Literal, get_args

from qlora_sweep.search_spaces.config import SETTINGS, TARGET_SETS, TrialConfig, canonical
from qlora_sweep.search_spaces.costs import ties
from qlora_sweep.search_spaces.estimates import Estimate
from qlora_sweep.search_spaces.kinds import Numerics
from qlora_sweep.search_spaces.loading import parse_space, preset_name
from qlora_sweep.search_spaces.preference import TIE, plainness
from qlora_sweep.search_spaces.presets import preset_space, starting_text
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.sweep.predict.contributions import contributed_speed
from qlora_sweep.sweep.predict.forecast import Forecast, Forecaster
from qlora_sweep.sweep.predict.memory.prediction import Fit
from qlora_sweep.sweep.predict.speed.predictor import SpeedPrediction, ratio_spread, within

SpaceKind = Literal["preset", "file", "standard"]
"""Where a space comes from: shipped under its name, written by the user, or made for a GPU."""

VALUES_SHOWN = 16
"""Rows or columns that the table takes from one dimension."""
WORTH_SPEED = 0.005
"""A smaller gain in speed, relative, is none."""

_ON_HOST = ("offload_fraction", "checkpoint_offload")
"""Settings that save nothing on a GPU without memory of its own."""
_TOGETHER = attrgetter("data_parallel", "sharding")
"""Where two configurations differ in these, each has its own doubt of what GPUs wait for each
other."""


@dataclass(frozen=True)
class PlanOptions:
    """What was asked of a GPU, for the answer to say."""

    kind: SpaceKind | None = None
    """None where one configuration is asked about, and no space."""
    fixed_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that were typed: they are fixed, and the rest of the space is searched."""
    run_command: str = ""
    """What to type to measure on the GPU what is searched here."""
    grpo: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `GRPOConfig`, under method grpo."""


NOT_ASKED = PlanOptions()


@cache
def own_space(gpu: str, model: str | None) -> tuple[SearchSpace, SpaceKind]:
    """Return the space that a GPU's name means, and where it comes from.

    It is the preset of that name, else what `sweep init --gpu` writes for the GPU and the model.

    Raises:
        InputError: no such model.
        EnvironmentFault: a hub id, and the hub is not to be had.
    """
    preset = preset_name(gpu)
    if preset is not None:
        return preset_space(preset, model=model), "preset"
    return parse_space(starting_text(gpu, model), label=gpu), "standard"


def shown_batches(space: SearchSpace) -> tuple[int, ...]:
    """Return the micro-batches of a space, the smallest first; doublings where it has many."""
    batches = sorted(set(space.values_of("micro_batch_size")))
    if len(batches) > VALUES_SHOWN:
        doublings = [batch for batch in batches if batch.bit_count() == 1]
        batches = doublings or batches
    return tuple(evenly_spaced(batches, most=VALUES_SHOWN))


def evenly_spaced(values: Iterable[Any], *, most: int) -> list[Any]:
    """Return at most ``most`` of the values in order, evenly spread, both ends among them."""
    ordered = sorted(set(values))
    if len(ordered) <= most:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]


def single_changes(config: TrialConfig, forecaster: Forecaster) -> dict[TrialConfig, str]:
    """Return every valid configuration with one setting changed, and which."""
    changes: dict[TrialConfig, str] = {}
    for key in SETTINGS:
        if key in _ON_HOST and forecaster.gpu.shares_host_memory:
            continue
        for value in _other_values(key, config):
            try:
                changed = config.changed(**{key: value})
            except ValueError:
                continue
            if canonical(changed) != canonical(config) and forecaster.is_valid(changed):
                changes[changed] = key
    return changes


def _other_values(key: str, config: TrialConfig) -> Sequence[Any]:
    value = getattr(config, key)
    kind = TrialConfig.model_fields[key].annotation
    if key in _VALUES:
        values = _VALUES[key](value)
    elif kind is bool:
        values = (not value,)
    else:
        values = get_args(kind)
    others = dict.fromkeys(values)
    others.pop(value, None)
    return list(others)


def _half_and_double(value: int | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (max(1, value // 2), value * 2)


_VALUES: Mapping[str, Callable[[Any], Sequence[Any]]] = {
    "lora_rank": _half_and_double,
    # It scales a product and changes neither speed nor memory.
    "lora_alpha": lambda _: (),
    "learning_rate": lambda _: (),
    # It is another training, of another dataset.
    "method": lambda _: (),
    # It is another program.
    "trainer": lambda _: (),
    "lora_dropout": lambda _: (0.0, 0.05),
    "target_modules": lambda _: TARGET_SETS,
    "micro_batch_size": _half_and_double,
    "seq_len": _half_and_double,
    "effective_batch_size": _half_and_double,
    "quantized_fraction": lambda _: (0.5, 1.0),
    "offload_fraction": lambda _: (0.0, 0.5, 1.0),
    "checkpoint_fraction": lambda value: (0.0, value / 2, 0.5, 1.0),
}
"""What numbers and lists are turned to, by key; words and truth values go through all of theirs."""


def speed_order(forecast: Forecast) -> tuple[float, int]:
    """Return what sorts forecasts of one certainty: speed, then tokens where none is known."""
    return forecast.tokens_per_second or 0.0, forecast.config.tokens_per_micro_batch


def speed_ratio(one: Forecast, other: Forecast) -> Estimate | None:
    """Return how many times as fast as another a forecast is, with the ends of nine in ten such
    ratios; None where a speed or its interval is not known.

    On one GPU what is predicted of both is compared, unless both were measured: a measurement over
    a prediction would tell more of the prediction. What both are off by in common cancels there.
    The errors of two GPUs are taken as independent, as are those of packing, and of what several
    GPUs wait for each other in one way and in another.
    """
    gpu = one.forecaster.gpu
    were_measured = one.measured and other.measured
    if gpu == other.forecaster.gpu and one.speed and other.speed and not were_measured:
        times = one.speed.tokens_per_second / other.speed.tokens_per_second
        return within(times, _ratio_spread(one, other, one.speed, other.speed))
    speed = one.speed_estimate
    other_speed = other.speed_estimate
    if speed is None or other_speed is None:
        return None
    return speed.over(other_speed)


def _ratio_spread(
    one: Forecast, other: Forecast, speed: SpeedPrediction, other_speed: SpeedPrediction
) -> float:
    """Return the standard deviation of the logarithm of a ratio of two speeds on one GPU."""
    independent = math.hypot(speed.log_spread, other_speed.log_spread)
    if one.config.packing != other.config.packing:
        return independent
    gpu = one.forecaster.gpu
    evidence = contributed_speed(gpu.name)
    spreads = [ratio_spread(one.log_slopes, other.log_slopes, gpu=gpu, evidence=evidence)]
    if one.config != other.config:
        spreads += [one.own_spread, other.own_spread]
    if _TOGETHER(one.config) != _TOGETHER(other.config):
        for config in (one.config, other.config):
            if config.data_parallel > 1:
                spreads.append(gpu.speed.shared)
    return min(independent, math.hypot(*spreads))


def is_faster(one: Forecast, other: Forecast) -> bool:
    """Whether a forecast is faster than another beyond doubt, and by enough to be worth a line."""
    times = speed_ratio(one, other)
    return times is not None and times.low > 1.0 and times.value > 1.0 + WORTH_SPEED


def recommended(candidates: Iterable[Forecast]) -> Forecast | None:
    """Return the one to recommend of one capacity class; None where nothing may fit.

    It surely fits, where anything does; else it may. Between classes of numerics it is of the
    plainest that may be the fastest: of 16-bit compute, unless 8 bits are faster beyond doubt.
    Within its class it is the plainest of those that tie with the fastest.
    """
    best = best_of_each_numerics(candidates)
    ranked = sorted(best.values(), key=speed_order, reverse=True)
    if not ranked:
        return None
    tied: Sequence[Forecast] = ranked
    if ranked[0].tokens_per_second:
        tied = ties(ranked, speed_ratio)
    # The first of the plainest: `min` keeps the order of those that are equal.
    return min(tied, key=lambda forecast: forecast.config.is_8bit_compute)


def best_of_each_numerics(candidates: Iterable[Forecast]) -> dict[Numerics, Forecast]:
    """Return the one to recommend of each class of numerics, of those that fit as surely as any
    does: the plainest of those that tie with its fastest, whatever their length."""
    classes: dict[Numerics, list[Forecast]] = {}
    surest = 1
    for forecast in candidates:
        certainty = _certainty(forecast)
        if certainty > surest:
            surest = certainty
            classes.clear()
        if certainty == surest:
            classes.setdefault(forecast.config.numerics, []).append(forecast)
    return {numerics: _plainest(of_class) for numerics, of_class in classes.items()}


def _certainty(forecast: Forecast) -> int:
    """Return how surely a forecast fits: of what may, a best guess that it does is surer."""
    if forecast.fit is Fit.NO:
        return 0
    if forecast.fit is Fit.YES:
        return 3
    return 2 if forecast.fits else 1


def _plainest(candidates: Sequence[Forecast]) -> Forecast:
    """Return the plainest of those of one length that tie with the fastest."""
    fastest = max(candidates, key=speed_order)
    if fastest.tokens_per_second is None:
        return fastest
    least = fastest.tokens_per_second / (1.0 + TIE)
    tied: list[Forecast] = []
    for forecast in candidates:
        is_of_length = forecast.config.seq_len == fastest.config.seq_len
        if is_of_length and (forecast.tokens_per_second or 0.0) >= least:
            tied.append(forecast)
    return min(
        tied, key=lambda forecast: plainness(forecast.config, forecast.peak_allocated_bytes or 0)
    )


def alternative(candidates: Iterable[Forecast], chosen: Forecast) -> Forecast | None:
    """Return what may fit and is faster than what is recommended beyond doubt, of its class of
    numerics; None for none."""
    less_sure: list[Forecast] = []
    for forecast in candidates:
        is_rival = forecast.fit is Fit.UNCERTAIN and forecast is not chosen
        is_of_class = forecast.config.numerics == chosen.config.numerics
        if is_rival and is_of_class and is_faster(forecast, chosen):
            less_sure.append(forecast)
    return max(less_sure, key=speed_order, default=None)
