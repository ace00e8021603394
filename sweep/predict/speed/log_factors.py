"""Owns the speed model as a fit sees it: the logarithm of each step over those of the factors.

A factor multiplies one part of a step and cannot be negative, so that in logarithms the model is
nearly straight and its uncertainty is normal. Knows nothing of trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from sweep.predict.speed.arrays import StepTimes
from sweep.predict.speed.calibration import FACTOR_SPREAD, FACTORS, factor_covariance
from sweep.predict.speed.phases import StepPhases

Array = NDArray[np.float64]
Rows = NDArray[np.intp] | slice


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
        phases = StepTimes(configs, model=model, gpu=gpu).phases
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
