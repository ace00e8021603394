"""The speed model's factors: how far they may be from the catalogue, and their fit to trials.

Every factor multiplies a physical term and cannot be negative; few trials move it little from what
the catalogue says. In logarithms the model is nearly straight and its uncertainty is normal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec, SpeedUncertainty
from search_spaces.knobs import Numerics
from search_spaces.models import ModelSpec
from sweep.predict.speed.phases import StepPhases, refusal
from sweep.predict.speed.work import TERMS, Term

Factor = Term | Literal["launch", "overhead"]
FACTORS: tuple[Factor, ...] = (*TERMS, "launch", "overhead")

Array = NDArray[np.float64]
Rows = NDArray[np.intp] | slice

NINE_IN_TEN = 1.645
"""Standard deviations to either side that hold nine in ten."""
CARD_SPREAD = 0.3
"""How far a whole card may be from its catalogue entry's rates: clocks, power limit, cooling."""
EIGHT_BIT_SPREAD = 0.34
"""How far 8-bit products may be from what a GPU's 16-bit ones and its data sheet imply.

Measured over implied: of FP8 1.01 on a B200, 0.99 (in a training) and 0.92 on an H200, 0.96 on an
H100, 0.82 on an RTX 5090, 0.67 on an H100 PCIe with scales by blocks; of INT8 0.70 on an H200 and
0.46 by a Triton kernel on an A100. This is the root mean square of their logarithms; sources are in
`docs/speed.md`. Where trainings in 8 bits were measured, it is as of the other matrix products.
"""
EIGHT_BIT_DOUBT = NINE_IN_TEN * EIGHT_BIT_SPREAD
"""How far 8-bit products may be off, relative, where no training in such was measured."""
FACTOR_SPREAD: dict[Factor, float] = {
    "matmul": 0.1,
    "eight_bit": EIGHT_BIT_SPREAD,
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
    numerics: frozenset[Numerics] = frozenset()
    """Classes of numerics among them."""

    def uncertainty(self, card: SpeedUncertainty) -> SpeedUncertainty:
        """Return how far steps of the same study may be off: never more than ``card`` says."""
        return SpeedUncertainty(
            device=self._narrowed(UNCERTAINTY_AFTER_ONE.device, card.device),
            launch=self._narrowed(UNCERTAINTY_AFTER_ONE.launch, card.launch),
        )

    def _narrowed(self, after_one: float, uncalibrated: float) -> float:
        return min(uncalibrated, max(STEP_NOISE, after_one / math.sqrt(self.trials)))


def in_order(calibration: Calibration | None) -> Array:
    """Return factors in the order of `FACTORS`; the catalogue's rates where there are none."""
    if calibration is None:
        return np.ones(len(FACTORS))
    return np.array([calibration.factors[factor] for factor in FACTORS])


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
    configs = [config for config, _ in observations]
    measured = np.array([seconds for _, seconds in observations])
    for reason in (refusal(config, model=model, gpu=gpu) for config in configs):
        if reason is not None:
            raise InputError(reason)
    steps = StepPhases.of(configs, model=model, gpu=gpu)
    factors = _fitted(steps, measured)
    errors = np.abs(steps.seconds(factors) / measured - 1.0)
    by_name = dict(zip(FACTORS, factors.tolist(), strict=True))
    classes = frozenset(config.numerics for config in configs)
    return Calibration(gpu.name, len(observations), by_name, float(np.median(errors)), classes)


def _fitted(steps: StepPhases, measured: Array) -> Array:
    """Return the non-negative factors nearest to trials and prior, each error over its spread."""
    # Only a fit needs it, and it takes longer to import than a plan takes to make.
    from scipy.optimize import nnls

    # What weighs factors against the catalogue's rates, a row for each direction.
    prior = np.linalg.cholesky(np.linalg.inv(factor_covariance())).T
    targets = np.full(len(measured), 1.0 / STEP_NOISE)
    wanted = np.concatenate([targets, prior.sum(axis=1)])
    factors = np.ones(len(FACTORS))
    for _ in range(ROUNDS):
        trials = steps.slopes(factors) / (measured[:, None] * STEP_NOISE)
        nearest, _ = nnls(np.vstack([trials, prior]), wanted)
        factors = factors + DAMPING * (nearest - factors)
    return factors


def factor_covariance(spread: Mapping[Factor, float] = FACTOR_SPREAD) -> Array:
    """Return how far the factors may be from the catalogue's rates, together: a covariance in the
    order of `FACTORS`."""
    on_card = np.array([float(factor in TERMS) for factor in FACTORS])
    spreads = np.array([spread[factor] for factor in FACTORS])
    return np.asarray(np.diag(spreads**2) + CARD_SPREAD**2 * np.outer(on_card, on_card))


class LogFactors:
    """The steps of configurations on a card, by the logarithms of the speed model's factors.

    A configuration without a prediction is taken for the median of the others.

    Args:
        configs: what is to be trained.
        model: the model's config.
        gpu: the card that runs it.

    Raises:
        ValueError: none of the configurations has a prediction.
    """

    def __init__(self, configs: Sequence[TrialConfig], *, model: ModelSpec, gpu: GpuSpec) -> None:
        phases = StepPhases.of(configs, model=model, gpu=gpu)
        seconds = phases.seconds(np.ones(len(FACTORS)))
        known = np.flatnonzero(~np.isnan(seconds))
        if not len(known):
            raise ValueError("none of the configurations has a predicted step")
        median = known[np.argsort(seconds[known])[len(known) // 2]]
        stand_ins = np.where(np.isnan(seconds), median, np.arange(len(seconds)))
        self._phases = _part(phases, stand_ins)
        eight_bit = FACTOR_SPREAD["matmul" if gpu.measured_8bit else "eight_bit"]
        self._spreads = {**FACTOR_SPREAD, "eight_bit": eight_bit}

    @cached_property
    def spread(self) -> Array:
        """Covariance of the factors' logarithms before anything was measured."""
        return factor_covariance(self._spreads)

    @cached_property
    def launch_shares(self) -> Array:
        """Share of each step that goes with the host's launches, by the catalogue's rates."""
        unchanged = np.zeros(len(FACTORS))
        return self.slopes(unchanged, slice(None))[:, FACTORS.index("launch")]

    def log_seconds(self, log_factors: Array, rows: Rows) -> Array:
        """Return the logarithm of some configurations' seconds."""
        return np.log(_part(self._phases, rows).seconds(np.exp(log_factors)))

    def slopes(self, log_factors: Array, rows: Rows) -> Array:
        """Return by how much some configurations' log seconds rise with each log factor."""
        phases, factors = _part(self._phases, rows), np.exp(log_factors)
        return np.asarray(phases.slopes(factors) * factors / phases.seconds(factors)[:, None])


def ratio_spread(
    config: TrialConfig, other: TrialConfig, *, model: ModelSpec, gpu: GpuSpec
) -> float:
    """Return how far two configurations' speed ratio may be off: a logarithm's standard deviation.

    What a GPU is off by as a whole is in both, and cancels. Errors are those of `LogFactors`.
    """
    steps = LogFactors([config, other], model=model, gpu=gpu)
    own, others = steps.slopes(np.zeros(len(FACTORS)), slice(None))
    return float(np.sqrt((own - others) @ steps.spread @ (own - others)))


def _part(phases: StepPhases, rows: Rows) -> StepPhases:
    """Return the steps of some of the configurations."""
    parts = {field.name: getattr(phases, field.name)[rows] for field in fields(phases)}
    return replace(phases, **parts)
