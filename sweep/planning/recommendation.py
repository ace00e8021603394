"""Which of many forecasts is recommended: of which capacity class, and sure against fast."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum

from search_spaces.config import TrialConfig
from search_spaces.linears import CapacityClass, lora_parameters
from search_spaces.models import ModelSpec
from sweep.predict.forecast import Forecast
from sweep.predict.memory.prediction import Fit

STANDARD = TrialConfig()
"""The published recipe, whose capacity class is rank 16 on q,k,v,o."""
WELL_PREDICTED = 0.05
"""A peak whose prediction may be further off than this (compiled layers') is less than sure."""


class Certainty(IntEnum):
    """How sure it is that a configuration fits."""

    DOUBTFUL = 0
    """The budget lies within the prediction's uncertainty."""
    LIKELY = 1
    """It fits, by a prediction that is wide of the truth at times."""
    SURE = 2


def certainty(forecast: Forecast) -> Certainty:
    """Return how sure it is that a forecast that may fit does."""
    memory = forecast.memory if forecast.trial is None else None
    return certainty_of(forecast.fit, uncertainty=0.0 if memory is None else memory.uncertainty)


def certainty_of(fit: Fit, *, uncertainty: float) -> Certainty:
    """Return how sure a fit is that a memory prediction of that relative uncertainty tells."""
    if fit is not Fit.YES:
        return Certainty.DOUBTFUL
    return Certainty.SURE if uncertainty <= WELL_PREDICTED else Certainty.LIKELY


def speed_order(forecast: Forecast) -> tuple[float, int]:
    """Return what sorts forecasts of one certainty: speed, then tokens where none is known."""
    return forecast.tokens_per_second or 0.0, forecast.config.tokens_per_micro_batch


def is_surely_faster(candidate: Forecast, other: Forecast) -> bool:
    """Whether ``candidate`` is faster even if it is as slow, and ``other`` as fast, as may be."""
    speeds, others = candidate.tokens_per_second_range, other.tokens_per_second_range
    return speeds is not None and others is not None and speeds[0] > others[1]


def preferred(candidates: Iterable[Forecast]) -> Forecast | None:
    """Return the fastest of the surest, unless a less sure one is faster beyond the uncertainty.

    A gain inside the error of the speeds is no reason to risk running out of memory.
    """
    chosen: Forecast | None = None
    best = _fastest_by_certainty(candidates)
    for level in sorted(best, reverse=True):
        if chosen is None or is_surely_faster(best[level], chosen):
            chosen = best[level]
    return chosen


def alternative(candidates: Iterable[Forecast], chosen: Forecast) -> Forecast | None:
    """Return what is worth naming beside the preferred forecast, if anything is.

    Where a surer one was passed over, that is the surest; else it is the fastest of those that are
    less sure, where it is predicted to be faster.
    """
    best = _fastest_by_certainty(candidates)
    surest = max(best, default=Certainty.DOUBTFUL)
    if surest > certainty(chosen):
        return best[surest]
    faster = [rival for rival in best.values() if speed_order(rival)[0] > speed_order(chosen)[0]]
    return max(faster, key=speed_order, default=None)


def _fastest_by_certainty(candidates: Iterable[Forecast]) -> dict[Certainty, Forecast]:
    best: dict[Certainty, Forecast] = {}
    for candidate in candidates:
        level = certainty(candidate)
        if level not in best or speed_order(candidate) > speed_order(best[level]):
            best[level] = candidate
    return best


def nearest_capacity(classes: Iterable[CapacityClass], *, model: ModelSpec) -> CapacityClass | None:
    """Return the class nearest to the standard recipe's; None where there is no class.

    The same target modules come first, then the number of trainable parameters (the rank, where the
    architecture does not tell), then more of them.
    """
    standard = CapacityClass.of(STANDARD, model)

    def distance(capacity: CapacityClass) -> tuple[bool, float, float]:
        size = _size(capacity, standard, model)
        # Rounded, so that half and twice the parameters are equally near.
        return capacity.modules != standard.modules, round(abs(math.log(size)), 6), -size

    return min(classes, key=distance, default=None)


def _size(capacity: CapacityClass, standard: CapacityClass, model: ModelSpec) -> float:
    """Return the size of a class's adapters over that of the standard one's."""
    own, reference = (
        lora_parameters(TrialConfig(lora_rank=known.lora_rank, target_modules=known.modules), model)
        for known in (capacity, standard)
    )
    if own is None or reference is None:
        return capacity.lora_rank / standard.lora_rank
    return own / reference
