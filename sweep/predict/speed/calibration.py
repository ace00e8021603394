"""Owns the fit of the speed model to trials that were measured on a card.

Every factor multiplies a physical term and cannot be negative; few trials move it little from what
the catalogue says. Knows nothing of studies, storage or processes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec, SpeedUncertainty
from search_spaces.models import ModelSpec
from sweep.predict.speed.phases import OVERLAP_EXPONENT, StepPhases, overlapped, step_phases
from sweep.predict.speed.work import TERMS, Term

Factor = Term | Literal["launch", "overhead"]
FACTORS: tuple[Factor, ...] = (*TERMS, "launch", "overhead")

CARD_SPREAD = 0.3
"""How far a whole card may be from its catalogue entry's rates: clocks, power limit, cooling."""
FACTOR_SPREAD: dict[Factor, float] = {
    "matmul": 0.1,
    "lora": 0.3,
    "attention": 0.3,
    "dequant": 0.3,
    "elementwise": 0.2,
    "loss": 0.3,
    "optimizer": 0.5,
    "launch": 0.5,
    "overhead": 1.0,
}
"""How far one term may be from its prediction beyond that; what the fit weighs trials against."""
STEP_NOISE = 0.02
"""Relative error of one trial: its median's interval, and what the model leaves out."""
ROUNDS = 30
"""The maximum of host and card is made straight again around each solution."""
DAMPING = 0.5
"""Share of the way to each solution: going all of it can swing between host and card for ever."""
UNCERTAINTY_AFTER_ONE = SpeedUncertainty(device=0.11, launch=0.45)
"""Nine in ten of a study's other steps are within this much once one trial is known.

From the trials of two studies on an H200. It falls with the root of their number; the host's part
is as much the host's pace from minute to minute, and is known least. Another day's session is off
by more than this.
"""


@dataclass(frozen=True)
class Calibration:
    """Factors by which a card's terms differ from the prediction."""

    gpu: str
    """Card that the trials ran on."""
    trials: int
    """Trials that it was fitted to."""
    factors: dict[Factor, float]
    relative_error: float
    """Median relative error over those trials; an optimistic view of new ones."""

    def uncertainty(self, card: SpeedUncertainty) -> SpeedUncertainty:
        """Return how far steps of the same study may be off: never more than ``card`` says."""
        return SpeedUncertainty(
            device=self._narrowed(UNCERTAINTY_AFTER_ONE.device, card.device),
            launch=self._narrowed(UNCERTAINTY_AFTER_ONE.launch, card.launch),
        )

    def _narrowed(self, after_one: float, uncalibrated: float) -> float:
        return min(uncalibrated, max(STEP_NOISE, after_one / math.sqrt(self.trials)))


def predicted_seconds(step: StepPhases, factors: dict[Factor, float]) -> float:
    """Return the seconds of a step under ``factors``."""
    total = step.overhead * factors["overhead"]
    for phase in step.phases:
        device = sum(phase.device(term) * factors[term] for term in TERMS)
        total += overlapped(device, phase.launch * factors["launch"])
    return total


def launch_share(step: StepPhases, factors: dict[Factor, float]) -> float:
    """Return the share of a step's seconds that goes with the host's launches, not with the card.

    By that many per cent the step is longer where a launch costs one per cent more.
    """
    seconds_per_factor = dict(zip(FACTORS, _slopes(step, factors), strict=True))
    return seconds_per_factor["launch"] * factors["launch"] / predicted_seconds(step, factors)


def calibrate(
    observations: Sequence[tuple[TrialConfig, float]], *, model: ModelSpec, gpu: GpuSpec
) -> Calibration:
    """Fit the factors to measured trials.

    Args:
        observations: configurations and their measured seconds per optimizer step.
        model: the model they were measured with.
        gpu: the card they were measured on.

    Raises:
        ValueError: there is no observation, or a step time is not positive.
        InputError: the architecture is not known, or the card has no rate for a compute type.
    """
    if not observations or any(seconds <= 0.0 for _, seconds in observations):
        raise ValueError("calibrate needs at least one trial, and positive step times")
    steps = [step_phases(config, model=model, gpu=gpu) for config, _ in observations]
    measured = [seconds for _, seconds in observations]
    factors: dict[Factor, float] = dict.fromkeys(FACTORS, 1.0)
    for _ in range(ROUNDS):
        nearest = _solve([_slopes(step, factors) for step in steps], measured)
        factors = {f: v + DAMPING * (nearest[f] - v) for f, v in factors.items()}
    errors = (
        abs(predicted_seconds(step, factors) / seconds - 1.0)
        for step, seconds in zip(steps, measured, strict=True)
    )
    return Calibration(gpu.name, len(observations), factors, statistics.median(errors))


def _slopes(step: StepPhases, factors: dict[Factor, float]) -> list[float]:
    """Return seconds per unit of each factor.

    The step's time is homogeneous in the factors, so these times the factors are the step itself.
    """
    slopes: dict[Factor, float] = dict.fromkeys(FACTORS, 0.0)
    slopes["overhead"] = step.overhead
    for phase in step.phases:
        device = sum(phase.device(term) * factors[term] for term in TERMS)
        launch = phase.launch * factors["launch"]
        whole = overlapped(device, launch)
        if whole == 0.0:
            continue
        for term in TERMS:
            slopes[term] += phase.device(term) * (device / whole) ** (OVERLAP_EXPONENT - 1.0)
        slopes["launch"] += phase.launch * (launch / whole) ** (OVERLAP_EXPONENT - 1.0)
    return [slopes[factor] for factor in FACTORS]


def _solve(slopes: list[list[float]], measured: list[float]) -> dict[Factor, float]:
    """Return the non-negative factors nearest to trials and prior, each error over its spread."""
    # Only a fit needs them, and together they take longer to import than a plan takes to make.
    import numpy as np
    from scipy.optimize import nnls

    seconds = np.asarray(measured)[:, None]
    trials = np.asarray(slopes) / (seconds * STEP_NOISE)
    targets = np.full(len(measured), 1.0 / STEP_NOISE)
    on_card = np.array([float(factor in TERMS) for factor in FACTORS])
    spreads = np.array([FACTOR_SPREAD[factor] for factor in FACTORS])
    covariance = np.diag(spreads**2) + CARD_SPREAD**2 * np.outer(on_card, on_card)
    prior = np.linalg.cholesky(np.linalg.inv(covariance)).T
    solution, _ = nnls(
        np.vstack([trials, prior]), np.concatenate([targets, prior @ np.ones(len(FACTORS))])
    )
    return {factor: float(value) for factor, value in zip(FACTORS, solution, strict=True)}
