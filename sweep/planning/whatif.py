"""Owns what a single change of a configuration would do to its speed and its memory.

Every knob that is declared is turned, one at a time; what a rule forbids or nothing is predicted of
is left out. Pure: a forecast and what answers for its card in, changes out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, get_args

from search_spaces.config import TrialConfig, canonical
from search_spaces.knobs import CAPACITY_KEYS, KNOBS, TARGET_SETS
from sweep.planning.forecast import Forecast, Forecaster, Progress, silent
from sweep.predict.memory.prediction import Fit

WORTH_SPEED = 0.005
"""A smaller gain in speed, relative, is none."""
WORTH_MEMORY = 0.01
"""Nor is a smaller saving of memory, relative to the peak."""
SHOWN_OF_EACH = 4
"""Changes of one use that are worth a line."""
TASK_KEYS = (*CAPACITY_KEYS, "seq_len", "effective_batch_size", "lora_dropout", "compute_dtype")
"""Settings that change what is trained, or the class of numerics, which is a matter of the task and
no advice about a GPU."""


class Use(IntEnum):
    """What a change is good for, the best first."""

    FASTER = 0
    LEANER = 1
    FASTER_WHERE_IT_FITS = 2
    """It would be faster on a card with more memory."""
    NONE = 3


@dataclass(frozen=True)
class WhatIf:
    """One knob turned."""

    key: str
    """The knob."""
    forecast: Forecast
    """Of the configuration with the change."""
    speed_change: float | None
    """In tokens/s, relative: both are the same card's, so that its error is in neither. None
    where no speed is known."""
    memory_change_bytes: int
    """In the allocated peak."""
    use: Use

    @property
    def value(self) -> Any:
        """What the knob is turned to."""
        return getattr(self.forecast.config, self.key)


def what_ifs(
    shown: Forecast, forecaster: Forecaster, *, progress: Progress = silent
) -> tuple[WhatIf, ...]:
    """Return every single change of a configuration, the most useful first.

    Empty where its own memory is not known.

    Raises:
        EnvironmentFault: the tracing process does not answer.
    """
    if shown.memory is None or shown.broken is not None:
        return ()
    changed = single_changes(shown.config, forecaster)
    forecaster.prepare(list(changed), progress=progress)
    found = (_what_if(key, config, shown, forecaster) for config, key in changed.items())
    return tuple(sorted(filter(None, found), key=_order))


def single_changes(config: TrialConfig, forecaster: Forecaster) -> dict[TrialConfig, str]:
    """Return every valid configuration with one knob turned, and which."""
    return dict(_changes(config, forecaster))


def few(changes: Iterable[WhatIf]) -> list[WhatIf]:
    """Return the changes that are worth a line: useful ones that leave the task what it is.

    Of each use a few, every knob before a second value of any.
    """
    useful = [one for one in changes if one.use is not Use.NONE and one.key not in TASK_KEYS]
    return [one for use in Use for one in _of_use(useful, use)]


def _of_use(changes: Sequence[WhatIf], use: Use) -> list[WhatIf]:
    turned: Counter[str] = Counter()
    ranked: list[tuple[int, WhatIf]] = []
    for change in changes:
        if change.use is use:
            ranked.append((turned[change.key], change))
            turned[change.key] += 1
    chosen = sorted(ranked, key=lambda pair: pair[0])[:SHOWN_OF_EACH]
    return sorted((change for _, change in chosen), key=_order)


def _changes(config: TrialConfig, forecaster: Forecaster) -> Iterator[tuple[TrialConfig, str]]:
    """Yield configurations with one knob turned, and the knob."""
    for key in KNOBS:
        for value in _other_values(key, config):
            try:
                changed = TrialConfig.model_validate({**config.model_dump(), key: value})
            except ValueError:
                continue
            is_same = canonical(changed) == canonical(config)
            if not is_same and forecaster.broken(changed) is None:
                yield changed, key


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
    "lora_dropout": lambda _: (0.0, 0.05),
    "target_modules": lambda _: TARGET_SETS,
    "micro_batch_size": _half_and_double,
    "seq_len": _half_and_double,
    "effective_batch_size": _half_and_double,
    "quantized_fraction": lambda _: (0.5, 1.0),
    "checkpoint_fraction": lambda value: (0.0, value / 2, 0.5, 1.0),
}
"""What numbers and lists are turned to, by key; words and truth values go through all of theirs."""


def _what_if(
    key: str, config: TrialConfig, shown: Forecast, forecaster: Forecaster
) -> WhatIf | None:
    forecast = forecaster.forecast(config)
    if forecast.broken is not None or forecast.memory is None or shown.memory is None:
        return None
    speed = _speed_change(shown, forecast)
    saved = shown.memory.peak_allocated_bytes - forecast.memory.peak_allocated_bytes
    is_leaner = saved > WORTH_MEMORY * shown.memory.peak_allocated_bytes
    return WhatIf(key, forecast, speed, -saved, _use(forecast.fit, speed, is_leaner=is_leaner))


def _use(fit: Fit, speed_change: float | None, *, is_leaner: bool) -> Use:
    is_faster = speed_change is not None and speed_change > WORTH_SPEED
    if fit is Fit.NO:
        return Use.FASTER_WHERE_IT_FITS if is_faster else Use.NONE
    if is_faster:
        return Use.FASTER
    return Use.LEANER if is_leaner else Use.NONE


def _speed_change(shown: Forecast, changed: Forecast) -> float | None:
    """Return the change in predicted speed, also where the shown one was measured: a measurement
    against a prediction would tell more of the prediction than of the change.
    """
    if shown.speed is None or changed.speed is None:
        return None
    return changed.speed.tokens_per_second / shown.speed.tokens_per_second - 1.0


def _order(change: WhatIf) -> tuple[Use, float]:
    """Return what sorts changes: by use, then by how much of it."""
    if change.use is Use.LEANER:
        return change.use, float(change.memory_change_bytes)
    return change.use, -(change.speed_change or 0.0)
